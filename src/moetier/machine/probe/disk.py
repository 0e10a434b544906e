"""The file system of a folder: what it is, and whether reads can pass the page cache and go through io_uring."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import tempfile
from dataclasses import dataclass
from pathlib import Path

from moetier.errors import SettingsError
from moetier.machine import limits as machine
from moetier.machine.facts import Disk, IoUring
from moetier.machine.probe.files import fields, number

BLOCK = 4096
CAP_SYS_ADMIN = 21
IO_URING_SETUP = 425
"""The system call's number, the same on every architecture."""
PARAMS_BYTES = 256
"""More than struct io_uring_params has."""

VIRTUAL = ("vd", "xvd")
"""Names of disks that a hypervisor gives: they say that they spin, whatever is behind them."""


@dataclass(frozen=True)
class Mount:
    """A line of /proc/self/mountinfo."""

    point: Path
    filesystem: str
    source: str


def probe_disk(folder: Path, root: Path = machine.ROOT) -> Disk:
    """The file system that holds `folder`; SettingsError where there is no such folder."""
    if not folder.is_dir():
        raise SettingsError(f"{folder}: expected a folder, found none; name the one that the expert store is in")
    resolved = folder.resolve()
    try:
        str(resolved).encode()
    except UnicodeEncodeError:
        raise SettingsError(f"{resolved}: expected a folder whose name is text (UTF-8), found other bytes") from None
    mount, size = _mount_of(resolved, root), os.statvfs(resolved)
    uring, reason = probe_io_uring(root)
    return Disk(
        path=str(resolved),
        filesystem=mount.filesystem if mount else None,
        device=mount.source if mount else None,
        size_bytes=size.f_blocks * size.f_frsize,
        free_bytes=size.f_bavail * size.f_frsize,
        rotational=_rotational(resolved, root),
        o_direct=_o_direct(resolved),
        io_uring=uring,
        io_uring_reason=reason,
    )


def _mount_of(folder: Path, root: Path) -> Mount | None:
    """The deepest mount above `folder`, the last of those on one point."""
    found: Mount | None = None
    try:
        lines = (root / "proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        left, dash, right = line.partition(" - ")
        words, after = left.split(" "), right.split(" ")
        if not dash or len(words) < 5 or len(after) < 2:
            continue
        mount = Mount(Path(_unescaped(words[4])), after[0], _unescaped(after[1]))
        if folder.is_relative_to(mount.point) and (found is None or mount.point.is_relative_to(found.point)):
            found = mount
    return found


def _unescaped(word: str) -> str:
    """Blanks and backslashes come as octal numbers."""
    for code in ("\\040", "\\011", "\\012", "\\134"):
        word = word.replace(code, chr(int(code[1:], 8)))
    return word


def _rotational(folder: Path, root: Path) -> bool | None:
    """Whether the device spins. A partition's folder has no queue, its parent has; a virtual disk does not know."""
    device = folder.stat().st_dev
    block = (root / f"sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    if block.name.startswith(VIRTUAL):
        return None
    found = number(block / "queue/rotational")
    if found is None:
        found = number(block.parent / "queue/rotational")
    return None if found is None else bool(found)


def _o_direct(folder: Path) -> bool | None:
    """Read one block past the page cache, from a file that lies there, else from one made for it."""
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_file(follow_symlinks=False) and entry.stat().st_size >= BLOCK and os.access(entry, os.R_OK):
                    return _reads_directly(entry.path)
    except OSError:
        pass
    try:
        with tempfile.TemporaryFile(dir=folder) as file:  # without a name: a kill leaves nothing
            file.write(bytes(BLOCK))
            file.flush()
            return _reads_directly(f"/proc/self/fd/{file.fileno()}")
    except OSError:
        return None


def _reads_directly(path: str) -> bool:
    try:
        file = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        with mmap.mmap(-1, BLOCK) as block:
            return os.preadv(file, [block], 0) == BLOCK
    except OSError:
        return False
    finally:
        os.close(file)


def probe_io_uring(root: Path = machine.ROOT) -> tuple[IoUring, str | None]:
    """Ask the kernel for a ring, and if it refuses, who refused.

    Returns
    -------
    IoUring, str or None
        What may be done, and the reason where it may not.

    """
    libc = ctypes.CDLL(None, use_errno=True)
    ring = libc.syscall(IO_URING_SETUP, 1, ctypes.create_string_buffer(PARAMS_BYTES))
    if ring >= 0:
        os.close(ring)
        return IoUring.ALLOWED, None
    return _refusal(ctypes.get_errno(), root)


def _refusal(code: int, root: Path) -> tuple[IoUring, str]:
    status = fields(root / "proc/self/status")
    filtered = status.get("Seccomp", "0") != "0"
    if code == errno.ENOSYS and not filtered:
        return IoUring.ABSENT, f"kernel {platform.release()} has no io_uring"
    if code == errno.ENOSYS:
        return IoUring.FORBIDDEN, "a seccomp filter (ENOSYS), or the kernel has none"
    if code not in (errno.EPERM, errno.EACCES):
        return IoUring.FORBIDDEN, f"io_uring_setup: {os.strerror(code)}"
    level = number(root / "proc/sys/kernel/io_uring_disabled")
    privileged = int(status.get("CapEff", "0"), 16) >> CAP_SYS_ADMIN & 1
    if level == 2 or (level == 1 and not privileged):
        return IoUring.FORBIDDEN, f"sysctl kernel.io_uring_disabled={level}"
    if filtered:
        return IoUring.FORBIDDEN, "a seccomp filter (EPERM), as container runtimes set by default"
    return IoUring.FORBIDDEN, f"io_uring_setup: {os.strerror(code)}, by a security module"
