"""git, in scratch repositories of our own: no configuration, hook, filter or attribute reaches it, neither the
machine's nor one that lay in an archive.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from moetier.git import command, environment
from moetier_stack.archive import check_name
from moetier_stack.errors import StackError

WHO = {
    f"GIT_{role}_{what}": value
    for role in ("AUTHOR", "COMMITTER")
    for what, value in (("NAME", "moetier stack"), ("EMAIL", "stack@moetier.invalid"))
}

FILES_ARE_BYTES = {
    "core.autocrlf": "false",
    "core.safecrlf": "false",
    "core.attributesFile": os.devnull,
    "core.excludesFile": os.devnull,
}


def git(
    folder: Path, *arguments: str, check: bool = True, data: bytes | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run git in `folder`; StackError with its words if it fails, or if there is no git."""
    alone = {
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_NO_REPLACE_OBJECTS": "1",
        "GIT_CEILING_DIRECTORIES": str(folder.resolve().parent),
    }
    try:
        done = subprocess.run(
            command(*arguments, settings=FILES_ARE_BYTES),
            cwd=folder,
            env={**environment(), **alone, **WHO},
            input=data,
            capture_output=True,
            check=False,
        )
    except FileNotFoundError:
        raise StackError("git is not installed; install it (on Debian: apt-get install git)") from None
    if check and done.returncode:
        words = done.stderr.decode(errors="replace").strip()
        raise StackError(f"git {arguments[0]} failed: {words[-2000:]}")
    return done


def init(folder: Path) -> None:
    """An empty repository with no hooks, in which a file is its bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    git(folder, "init", "--quiet", "--template=", "--initial-branch=stack")
    info = folder / ".git" / "info"
    info.mkdir(exist_ok=True)
    (info / "attributes").write_text("* -text -filter -ident -eol -working-tree-encoding !merge !diff\n")
    git(folder, "config", "commit.gpgSign", "false")
    git(folder, "config", "core.hooksPath", os.devnull)
    git(folder, "config", "core.fsmonitor", "false")


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files below `folder`; StackError for a path that leads out of it, or to where git keeps what it runs."""
    for path, content in files.items():
        check_name(folder, path, "do not use these files")
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)


def applies(folder: Path, patch: bytes, files: Mapping[str, bytes]) -> str:
    """Git's objection to applying a patch to these files, without fuzz; empty: it applies. `folder` must be empty."""
    init(folder)
    write_files(folder, files)
    done = git(folder, "apply", "--check", "--whitespace=nowarn", "-", check=False, data=patch)
    return done.stderr.decode(errors="replace").strip() if done.returncode else ""
