"""Folders for temporary files, caches and state: those that the environment names, else what can stand in for them."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from moetier.errors import SettingsError

STAND_INS = ("/dev/shm", "/run/shm")  # noqa: S108 (memory that a read-only container can write, too)
"""Beside XDG_RUNTIME_DIR: where temporary files go if no usual place takes any."""


NO_TEMPORARY_FOLDER = (
    "expected a folder for temporary files, found that none of TMPDIR, /tmp, /var/tmp, /dev/shm and the current folder "
    "takes a file; set TMPDIR to a folder that can be written and is not full"
)


def find_temporary_folder() -> None:
    """Make Python's temporary folder, and that of the programs we start, one that takes files, if there is one.

    Most verbs need none, so one that does says NO_TEMPORARY_FOLDER.
    """
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        folder = next((folder for folder in _stand_ins() if takes_files(folder)), None)
        if folder is not None:
            tempfile.tempdir = os.environ["TMPDIR"] = str(folder)


def temporary_folder() -> Path:
    """The folder for temporary files; SettingsError where none takes a file."""
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:
        raise SettingsError(NO_TEMPORARY_FOLDER) from None


def _stand_ins() -> list[Path]:
    return [Path(name) for name in (os.environ.get("XDG_RUNTIME_DIR", ""), *STAND_INS) if name]


def temporary_roots() -> list[Path]:
    """Every folder that temporary files of this user may be in, the preferred one first."""
    named = [os.environ.get(name, "") for name in ("TMPDIR", "TEMP", "TMP")]
    roots = [Path(name) for name in (str(temporary_folder()), *named, "/tmp", "/var/tmp") if name]  # noqa: S108
    return list(dict.fromkeys(root.absolute() for root in (*roots, *_stand_ins())))


def takes_files(folder: Path) -> bool:
    """Whether a file can be made and written there: tried, for permissions do not tell of full or read-only disks."""
    with contextlib.suppress(OSError, ValueError), tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"moetier")
        file.flush()
        return True
    return False


def home() -> Path | None:
    """The user's home folder; None where HOME is unset and the user has no passwd entry, or HOME is not absolute."""
    try:
        found = Path.home()
    except RuntimeError:
        return None
    return found if found.is_absolute() else None


def cache_home() -> Path:
    """The folder of caches, by the XDG convention; SettingsError where there is none."""
    return _by_convention("XDG_CACHE_HOME", ".cache")


def state_home() -> Path:
    """The folder of logs and the like, by the XDG convention; SettingsError where there is none."""
    return _by_convention("XDG_STATE_HOME", ".local/state")


def _by_convention(variable: str, below_home: str) -> Path:
    """The folder that the variable names, unless its name is relative, which the convention says to ignore."""
    named, owner = Path(os.environ.get(variable) or ""), home()
    if named.is_absolute():
        return named
    if owner is None:
        raise SettingsError(f"expected a home folder (HOME), found none; set {variable} to a folder")
    return owner / below_home
