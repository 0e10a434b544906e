"""`stack wheel`: the wheel of a profile, patched from the pinned one or built from patched sources."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from moetier_stack.errors import StackError
from moetier_stack.index import sha256_of
from moetier_stack.rebase import apply_profile
from moetier_stack.wheel import build_wheel, check_wheel
from moetier_stack.workspace import Workspace

EPOCH = "315532800"
"""1980, the earliest that a wheel can say."""


def build_patched_wheel(space: Workspace, profile: str, folder: Path) -> Path:
    """Write a profile's wheel into `folder`; StackError unless it is what the lock says."""
    definition = space.definition.profile(profile)
    if definition.build == "source":
        return _from_source(space, profile, folder)
    path = space.wheel(profile)
    wheel = space.tree(path)
    check_wheel(path, wheel)
    changed = space.patched_wheel(profile, wheel)
    if wheel.replaced(changed).hash() != space.lock.profiles[profile].wheel_tree:
        raise StackError(f"profile {profile}: the patched wheel is not the locked one; see `moetier stack verify`")
    return build_wheel(path, changed, profile, folder)


def _from_source(space: Workspace, profile: str, folder: Path) -> Path:
    """Pip builds it in this environment, which must have what the project's build needs.

    The time of its files is fixed, so that the same compiler gives the same bytes.
    """
    with tempfile.TemporaryDirectory(prefix="moetier-stack-") as work:
        sources, out = Path(work) / "sources", Path(work) / "out"
        apply_profile(space, profile, sources)
        command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
        done = subprocess.run(
            [*command, "-w", str(out), str(sources)],
            env={"SOURCE_DATE_EPOCH": EPOCH} | os.environ,
            capture_output=True,
            text=True,
            check=False,
        )
        made = sorted(out.glob("*.whl")) if out.is_dir() else []
        if done.returncode or len(made) != 1:
            raise StackError(f"profile {profile}: pip cannot build it from source:\n{done.stderr[-2000:].strip()}")
        return build_wheel(made[0], {}, profile, folder)


def wheel_hash(path: Path) -> str:
    return sha256_of(path)
