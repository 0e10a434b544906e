"""Wheel and sdist have every file of the package, and what is installed from them works without the checkout."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.store.checkpoints import write_checkpoint

ROOT = Path(__file__).parents[2]
BUILD = """
import sys
from scikit_build_core.build import build_sdist, build_wheel
kind, out, *settings = sys.argv[1:]
print((build_sdist if kind == "sdist" else build_wheel)(out, dict(setting.split("=") for setting in settings)))
"""
NOT_PACKED = ("models/", "benchmarks/", ".ci/")
"""Of the checkout, what the sdist leaves out."""
MODELS = [path.stem for path in sorted((ROOT / "src/moetier/plan/models").glob("*.json"))]


def tracked(*folders: str) -> set[str]:
    """Files of the checkout, new ones too."""
    listed = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *folders]
    done = subprocess.run(listed, capture_output=True, check=False)
    if done.returncode:
        pytest.skip("the checkout is not git's")
    return {name for name in done.stdout.decode().split("\0") if name and (ROOT / name).is_file()}


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout without what was built in it."""
    pytest.importorskip("scikit_build_core", reason="building wants scikit-build-core")
    copy = tmp_path_factory.mktemp("source")
    for name in tracked():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((ROOT / name).read_bytes())
    return copy


def build(source: Path, kind: str, out: Path, *settings: str) -> Path:
    """With the packages that are here, not those of an index."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # of cmake and ninja
    done = subprocess.run(
        [sys.executable, "-c", BUILD, kind, str(out), *settings],
        cwd=source, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return out / done.stdout.strip().splitlines()[-1]


def test_the_sdist_is_the_checkout_without_models_and_benchmarks(source: Path, tmp_path: Path) -> None:
    with tarfile.open(build(source, "sdist", tmp_path)) as archive:
        packed = {member.name.partition("/")[2] for member in archive if member.isfile()}
    assert packed - {"PKG-INFO"} == {name for name in tracked() if not name.startswith(NOT_PACKED)}


def test_the_wheel_has_every_file_of_the_package(source: Path, tmp_path: Path) -> None:
    """Built without the extension, which takes a minute: which files of Python and data there are is the same."""
    wheel = build(source, "wheel", tmp_path, "wheel.cmake=false")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == {name.removeprefix("src/") for name in tracked("src")}
    for what in (".json", ".toml", ".yaml", ".cu", ".cuh", ".pyi"):
        assert any(name.endswith(what) for name in packed), what


class Installed:
    """moetier in an environment of its own, called from a folder that has nothing to do with the checkout."""

    def __init__(self, archive: Path, folder: Path) -> None:
        self.bin, self.work = folder / "bin", folder / "work"
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        self.pip(str(archive))
        self.work.mkdir()
        self.environment = {
            "PATH": f"{self.bin}:/usr/bin:/bin", "HOME": str(self.work), "XDG_CACHE_HOME": str(self.work / ".cache"),
        }  # fmt: skip

    def pip(self, *what: str) -> None:
        done = subprocess.run([self.bin / "pip", "install", "-q", *what], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]

    def __call__(self, *arguments: str | Path, code: int | None = 0) -> str:
        """What a verb writes: with --json, on standard output alone."""
        done = subprocess.run(
            [self.bin / "moetier", *map(str, arguments)],
            cwd=self.work, env=self.environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert "Traceback" not in done.stderr, done.stderr
        assert code is None or done.returncode == code, (arguments, done.returncode, done.stdout, done.stderr)
        return done.stdout if "--json" in arguments else done.stdout + done.stderr


@pytest.mark.campaign
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_every_verb_works_where_it_is_installed(kind: str, source: Path, tmp_path: Path) -> None:
    moetier = Installed(build(source, kind, tmp_path), tmp_path / "environment")
    assert str(ROOT) not in moetier("version", "--json")
    verbs = ["store", "serve", "eval", "bench", "trace", "stack", "doctor", "plan", "calibrate", "identity", "prove"]
    for words in ([], *([verb] for verb in verbs)):
        assert "Usage" in moetier(*words, "--help")
    for group in ("store", "eval", "bench", "trace", "stack"):
        for verb in subverbs(moetier(group, "--help")):
            assert "Usage" in moetier(group, verb, "--help")

    listed = json.loads(moetier("plan", "--models", "--json"))
    assert len(listed) == len(MODELS) > 0
    for model in MODELS:
        assert json.loads(
            moetier("plan", model, "--gpus", "2x32GB", "--ram", "512GB", "--disk", "7GB/s", "--json", code=None)
        )
    doctor = json.loads(moetier("doctor", "--json", code=None))
    (moetier.work / "machine.json").write_text(json.dumps(doctor))
    assert "qwen3-235b on" in moetier("plan", "qwen3-235b", "--machine", "machine.json", code=None)

    made = write_checkpoint(moetier.work / "checkpoint")
    moetier("store", "build", made.path, "s", "--check", "2", "--trim", "t")
    for words in (["info", "s"], ["verify", "s"], ["verify", "s", "--checkpoint", made.path]):
        assert json.loads(moetier("store", *words, "--json"))
    assert "values that differ: 0" in moetier("identity", "--store", "s")
    rows = json.loads(moetier("bench", "kernel", "--shape", "512,512,64,4", "-M", "1", "--json").splitlines()[-1])[
        "rows"
    ]
    assert rows[0]["us"] > 0


def subverbs(text: str) -> list[str]:
    """Verbs that a --help lists."""
    return re.findall(r"^│ ([a-z]+)", text.partition("Commands")[2], re.MULTILINE)


@pytest.mark.campaign
def test_a_verb_that_wants_more_names_a_command_that_brings_it(source: Path, tmp_path: Path) -> None:
    """Without vLLM and torch; the advice is followed."""
    moetier = Installed(build(source, "wheel", tmp_path), tmp_path / "environment")
    made = write_checkpoint(moetier.work / "checkpoint")
    moetier("store", "build", made.path, "s")
    assert "vllm" in moetier("serve", made.path, "--store", "s", code=2).lower()
    for words, package in (
        (["bench", "list"], "moetier[bench]"),
        (["store", "build", "hf://org/name", "x", "--trim", "y"], "huggingface_hub"),
    ):
        said = moetier(*words, code=2)
        assert "pip install" in said
        assert package in said
        moetier.pip("huggingface_hub" if package == "huggingface_hub" else f"{next(tmp_path.glob('*.whl'))}[bench]")
        assert "pip install" not in moetier(*words, code=None)
