"""What `moetier stack` says where programs or our own wheel are missing; done as it says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.remedies.stacks import stack
from tests.remedies.trouble import Trouble
from tests.stack.project import Demo, wheel_bytes

remedy = pytest.mark.remedy


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder on the path, empty: no git, and no program that builds images."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def _install_git(programs: Path) -> None:
    """Put git on the path, as a package manager does."""
    git = shutil.which("git", path=os.defpath)
    assert git is not None
    (programs / "git").symlink_to(git)


@remedy("moetier_stack/git.py", "git is not installed")
def test_git_is_installed(trouble: Trouble, locked: Demo, programs: Path) -> None:
    with trouble:
        stack(locked, "verify")
    _install_git(programs)
    stack(locked, "verify")
    trouble.gone()


BUILD = """
import zipfile
def build_wheel(folder, *_):
    name = "moetier-1.0-py3-none-any.whl"
    info = "moetier-1.0.dist-info"
    with zipfile.ZipFile(f"{folder}/{name}", "w") as out:
        out.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\\nName: moetier\\nVersion: 1.0\\n")
        out.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        out.writestr(f"{info}/RECORD", f"{info}/METADATA,,\\n{info}/WHEEL,,\\n{info}/RECORD,,\\n")
    return name
"""
"""The build of a project called moetier that compiles nothing."""


@remedy("moetier_stack/cli.py", "an image needs moetier's own wheel")
@remedy("moetier_stack/image.py", "expected moetier's own wheel")
def test_an_image_with_our_wheel(
    trouble: Trouble, locked: Demo, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(locked.folder)
    image = ("image", "-p", "patched", "--context", locked.folder / "context")
    Path("moetier-1.0.tar.gz").write_text("no wheel")
    for wheel in ((), ("--moetier-wheel", "moetier-1.0.tar.gz")):
        with trouble:
            stack(locked, *image, *wheel)
        assert "pip wheel --no-deps -w dist ." in trouble.text
    Path("build.py").write_text(BUILD)
    Path("pyproject.toml").write_text('[build-system]\nrequires = []\nbuild-backend = "build"\nbackend-path = ["."]\n')
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", "dist", "."]
    subprocess.run(pip, check=True, capture_output=True)
    stack(locked, *image, "--moetier-wheel", *Path("dist").glob("*.whl"))
    trouble.gone()


@pytest.mark.parametrize("removed", [True, False], ids=["removed", "another"])
@remedy("moetier_stack/image.py", "remove it, or name another with --context")
def test_an_images_context_is_new(trouble: Trouble, locked: Demo, programs: Path, removed: bool) -> None:
    ours = locked.folder / "moetier-1.0-py3-none-any.whl"
    ours.write_bytes(wheel_bytes("1.0", {}, "moetier"))
    context = locked.folder / "context"
    context.mkdir()
    image = ("image", "-p", "patched", "--moetier-wheel", ours)
    with trouble:
        stack(locked, *image, "--context", context)
    if removed:
        context.rmdir()
    stack(locked, *image, "--context", context if removed else locked.folder / "another")
    trouble.gone()
