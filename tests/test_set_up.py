"""`make setup` knows an interpreter again, however it is found."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parent.parent / "tools" / "interpreter.py"


def identity(python: str | Path) -> str:
    return subprocess.run([python, TOOL], check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("way", ["symlink", "shim", "venv", "copied venv"])
def test_one_interpreter_has_one_identity(way: str, tmp_path: Path) -> None:
    python = tmp_path / "python3"
    if way == "symlink":
        python.symlink_to(os.path.realpath(sys.executable))
        python = tmp_path / "again"
        python.symlink_to(tmp_path / "python3")
    elif way == "shim":
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        python.chmod(0o755)
    else:
        venv.create(tmp_path / "venv", with_pip=False, symlinks=way == "venv")
        python = tmp_path / "venv/bin/python3"
    assert identity(python) == identity(sys.executable)


def test_another_interpreter_has_another() -> None:
    other = shutil.which("python3", path="/usr/bin")
    if other is None or os.path.realpath(other) == os.path.realpath(getattr(sys, "_base_executable", sys.executable)):
        pytest.skip("there is no second interpreter in /usr/bin")
    assert identity(other) != identity(sys.executable)
