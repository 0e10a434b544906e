"""git, in scratch repositories of our own: no configuration, hook or attribute of the machine reaches it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from moetier.stack.errors import StackError

WHO = {
    f"GIT_{role}_{what}": value
    for role in ("AUTHOR", "COMMITTER")
    for what, value in (("NAME", "moetier stack"), ("EMAIL", "stack@moetier.invalid"))
}


def git(
    folder: Path, *arguments: str, check: bool = True, data: bytes | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run git in `folder`; StackError with its words if it fails, or if there is no git."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    alone = {
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CEILING_DIRECTORIES": str(folder.resolve().parent),
        "GIT_TERMINAL_PROMPT": "0",
        "LC_ALL": "C",
    }
    options = ["-c", "core.autocrlf=false", "-c", "core.safecrlf=false", "-c", "core.attributesFile=/dev/null"]
    try:
        done = subprocess.run(
            ["git", *options, *arguments],
            cwd=folder,
            env={**kept, **alone, **WHO},
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
    (info / "attributes").write_text("* -text -filter -ident -eol\n")
    git(folder, "config", "commit.gpgSign", "false")


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)


def applies(folder: Path, patch: bytes, files: Mapping[str, bytes]) -> str:
    """Git's objection to applying a patch to these files, without fuzz; empty: it applies. `folder` must be empty."""
    init(folder)
    write_files(folder, files)
    done = git(folder, "apply", "--check", "--whitespace=nowarn", "-", check=False, data=patch)
    return done.stderr.decode(errors="replace").strip() if done.returncode else ""
