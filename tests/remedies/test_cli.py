"""What the command line says of files, and of what `store build` takes; done as it says, and the verb ends well."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moetier.plan.describe import describe
from moetier.store.store import Store
from tests.remedies.commands import moetier
from tests.remedies.trouble import Trouble
from tests.store.checkpoints import write_checkpoint
from tests.store.hub import serving

remedy = pytest.mark.remedy
COMMAND = "from moetier.cli import main; main()"
ABSENT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name == "moetier_bench":
            raise ModuleNotFoundError(name + " is not there", name=name)
sys.meta_path.insert(0, Absent())
"""


def run(*arguments: str | Path, out: Path) -> str:
    """Run `moetier` in a process of its own, its output in a file; returns what it says beside."""
    with out.open("w") as file:
        done = subprocess.run(
            [sys.executable, "-c", COMMAND, *map(str, arguments)],
            stdout=file, stderr=subprocess.PIPE, text=True, timeout=300, check=False,
        )  # fmt: skip
    assert (done.returncode == 0) == (not done.stderr), done.stderr
    return done.stderr


@remedy("kernels/cpu/__init__.py", "it can plan, and nothing else")
def test_what_was_compiled_is_installed(trouble: Trouble, tmp_path: Path) -> None:
    """As where no compiler was: the extension is found by nobody, then as it is here."""
    hidden = "import sys; sys.modules['moetier.kernels.cpu._native'] = None; " + COMMAND
    words = ("identity", "--calls", "1", "--store", str(tmp_path / "none"))
    without = subprocess.run([sys.executable, "-c", hidden, *words], capture_output=True, text=True, check=False)
    assert without.returncode == 2
    trouble.said(without.stderr)
    assert "none" in run(*words, out=tmp_path / "said"), "it is the store that is not there now"
    trouble.gone()


@remedy("cli/verbs.py", "install moetier whole")
def test_a_package_that_is_not_there_is_installed(trouble: Trouble, tmp_path: Path) -> None:
    hidden = ABSENT + COMMAND
    without = subprocess.run(
        [sys.executable, "-c", hidden, "bench", "list"], capture_output=True, text=True, check=False
    )
    assert without.returncode == 2
    trouble.said(without.stderr)
    assert run("bench", "list", out=tmp_path / "list") == ""
    trouble.gone()


@remedy("cli/__init__.py", "make room where the output goes")
def test_output_where_there_is_room(trouble: Trouble, tmp_path: Path) -> None:
    trouble.said(run("plan", "--models", out=Path("/dev/full")))
    assert run("plan", "--models", out=tmp_path / "models") == ""
    assert "glm-4.5-air" in (tmp_path / "models").read_text()
    trouble.gone()


@remedy("cli/__init__.py", "check the name, its permissions and the disk")
def test_a_file_of_another_name(trouble: Trouble, tmp_path: Path) -> None:
    words, right = ("plan", "glm-4.5-air", "--machine"), tmp_path / "machine.json"
    trouble.said(run(*words, tmp_path / "machin.json", out=tmp_path / "plan"))
    right.write_text(describe("4x32GB", "512GB").to_json())
    assert run(*words, right, out=tmp_path / "plan") == ""
    trouble.gone()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "repository", layers=(1, 2), shards=2).path


@pytest.mark.parametrize("wrong", [1, 2])
@remedy("cli/store.py", "give it twice, with --check N")
def test_weights_are_deleted_when_it_is_asked_for_twice(
    trouble: Trouble, checkpoint: Path, tmp_path: Path, wrong: int
) -> None:
    more = ("--skip-support-check", *(("--check", "1", "--trim", tmp_path / "t") if wrong == 1 else ()))
    with trouble:
        moetier("store", "build", checkpoint, tmp_path / "s", *["--delete-source"] * wrong, *more)
    assert list(checkpoint.glob("*.safetensors"))
    right = ("--delete-source", "--delete-source", "--check", "1", "--trim", tmp_path / "t", "--skip-support-check")
    moetier("store", "build", checkpoint, tmp_path / "s", *right)
    assert not list(checkpoint.glob("*.safetensors"))
    Store.open(tmp_path / "s").close()
    trouble.gone()


@pytest.fixture
def hub(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The checkpoint as org/model on a hub of our own."""
    pytest.importorskip("huggingface_hub", reason="a repository is read with it")
    (checkpoint / "tokenizer.json").write_text('{"a": 1}')
    with serving(checkpoint) as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.endpoint)
        monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
        yield


@pytest.mark.parametrize("wrong", ["--trim", "--deep", "--delete-source"])
@remedy("cli/store.py", "is never whole on this disk")
def test_a_repository_is_trimmed(trouble: Trouble, hub: None, tmp_path: Path, wrong: str) -> None:
    trim = ("--trim", tmp_path / "t")
    more = {"--trim": (), "--deep": (*trim, "--deep"), "--delete-source": (*trim, "--check", "1", *[wrong] * 2)}
    built = ("store", "build", "hf://org/model", tmp_path / "s", "--skip-support-check")
    with trouble:
        moetier(*built, *more[wrong])
    moetier(*built, *trim)
    Store.open(tmp_path / "s").close()
    trouble.gone()
