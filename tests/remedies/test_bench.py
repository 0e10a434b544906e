"""What `moetier bench` says of recipes, machines and where a result goes; done as it says, and the recipe runs."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import moetier
from moetier.doctor.measure import kernel
from moetier_bench.documents import Library, Suite
from moetier_bench.probes import Coding
from moetier_bench.recipes import run_recipe
from tests.bench.checkouts import scripted_library
from tests.bench.made import commit_all, git
from tests.remedies.commands import moetier as command
from tests.remedies.trouble import Trouble

remedy = pytest.mark.remedy
SUITE = Suite(id="small", summary="for tests", probes=(Coding(max_tokens=16, repeats=1),))
REVISION = "1" * 40


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    root = tmp_path / "checkout"
    root.mkdir()
    return scripted_library(root, monkeypatch)


def _run(library: Library, **options: Any) -> None:
    """Run the recipe as `moetier bench run` does; the result is written."""
    out = options.pop("out", library.root.parent / "out")
    given = {"allow_dirty": True, **options}
    written = list(run_recipe(library, library.recipe("nano/dram"), [SUITE], out, print, **given))
    assert [result.failure for _, result in written] == [None]


def _edit(library: Library, change: Callable[[dict[str, Any]], None]) -> None:
    path = library.root / "recipes/nano/dram.yaml"
    values = yaml.safe_load(path.read_text())
    change(values)
    path.write_text(yaml.safe_dump(values))


def _model(**values: Any) -> Callable[[Library], None]:
    return lambda library: _edit(library, lambda recipe: recipe["model"].update(values))


def _planned(library: Library) -> None:
    _edit(library, lambda recipe: recipe.update(status="plan"))
    _model(folder=None, repo="someone/nano", revision=None, identity=None)(library)


def _pinned(library: Library) -> None:
    from moetier.store.checkpoint import Checkpoint

    identity = Checkpoint.open(library.root / "scripted").identity()
    _model(revision=REVISION, identity=identity)(library)
    _edit(library, lambda recipe: recipe.update(status="run"))


def _nothing(_: Library) -> None:
    """The remedy is an option."""


HERE = [
    pytest.param(
        _model(folder=None, repo="someone/nano", revision=REVISION),
        _nothing,
        {},
        {"model": "scripted"},
        marks=remedy("moetier_bench/documents.py", "download {}"),
    ),
    pytest.param(
        _model(folder="nowhere"),
        _nothing,
        {},
        {"model": "scripted"},
        marks=remedy("moetier_bench/documents.py", "expected its checkpoint"),
    ),
    pytest.param(_planned, _pinned, {}, {"model": "scripted"}, marks=remedy("moetier_bench/recipes.py", "is a plan")),
    pytest.param(
        _nothing,
        _nothing,
        {"commit": "abc", "allow_dirty": False},
        {"commit": "git rev-parse HEAD", "allow_dirty": False},
        marks=remedy("moetier_bench/recipes.py", "expected the 40 digits"),
    ),
    pytest.param(
        _nothing,
        _nothing,
        {"allow_dirty": False},
        {},
        marks=remedy("moetier_bench/recipes.py", "a git checkout that moetier is installed from"),
        id="allow-dirty",
    ),
    pytest.param(
        _nothing,
        _nothing,
        {"allow_dirty": False},
        {"commit": "git rev-parse HEAD", "allow_dirty": False},
        marks=remedy("moetier_bench/recipes.py", "a git checkout that moetier is installed from"),
        id="commit",
    ),
]


@pytest.mark.parametrize(("damage", "cure", "wrong", "right"), HERE)
def test_a_recipe_is_run(
    trouble: Trouble,
    library: Library,
    damage: Callable[[Library], None],
    cure: Callable[[Library], None],
    wrong: dict[str, Any],
    right: dict[str, Any],
    tmp_path: Path,
) -> None:
    damage(library)
    with trouble:
        _run(library, **wrong)
    cure(library)
    if "model" in right:
        right = {**right, "model": library.root / right["model"]}
    if "commit" in right:
        elsewhere = tmp_path / "elsewhere"  # the checkout that the copy is of
        elsewhere.mkdir()
        _into_git(elsewhere)
        words = right["commit"].split()
        done = subprocess.run(words, cwd=elsewhere, capture_output=True, text=True, check=True)
        right = {**right, "commit": done.stdout.strip()}
    _run(library, **right)
    trouble.gone()


def _into_git(root: Path) -> None:
    (root / "file").write_text("x")
    git(root, "init", "-q")
    commit_all(root)


@pytest.fixture
def checkout(library: Library, monkeypatch: pytest.MonkeyPatch) -> Library:
    """The same as a git checkout that moetier is installed from, as `make setup` does it."""
    package = library.root / "src" / "moetier"
    package.mkdir(parents=True)
    shutil.copy(moetier.__file__, package)
    (library.root / ".gitignore").write_text("scripted/\n")
    _into_git(library.root)
    monkeypatch.setattr(moetier, "__file__", str(package / "__init__.py"))
    return library


@remedy("moetier_bench/recipes.py", "a git checkout that moetier is installed from")
def test_a_checkout_is_installed_from(
    trouble: Trouble, checkout: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(moetier, "__file__", str(tmp_path / "site-packages/moetier/__init__.py"))
        with trouble:
            _run(checkout, allow_dirty=False)
    _run(checkout, allow_dirty=False)
    trouble.gone()


@pytest.mark.parametrize("committed", [True, False])
@remedy("moetier_bench/recipes.py", "this tree is not clean")
def test_a_tree_is_committed(trouble: Trouble, checkout: Library, committed: bool) -> None:
    (checkout.root / "file").write_text("y")
    with trouble:
        _run(checkout, allow_dirty=False)
    if committed:
        commit_all(checkout.root)
    _run(checkout, allow_dirty=not committed)
    trouble.gone()


@remedy("moetier_bench/recipes.py", "a result of a changed tree")
def test_a_changed_trees_result_goes_elsewhere(trouble: Trouble, checkout: Library, tmp_path: Path) -> None:
    (checkout.root / "file").write_text("y")
    with trouble:
        _run(checkout, out=checkout.root / "results")
    _run(checkout, out=tmp_path / "elsewhere")
    trouble.gone()


@remedy("moetier_bench/recipes.py", "--commit is for a copy without git")
def test_a_checkout_knows_its_commit(trouble: Trouble, checkout: Library) -> None:
    with trouble:
        _run(checkout, commit=REVISION)
    _run(checkout)
    trouble.gone()


@remedy("moetier_bench/result.py", "commit a change first")
def test_a_result_of_another_commit(trouble: Trouble, checkout: Library) -> None:
    _run(checkout, allow_dirty=False)
    with trouble:
        _run(checkout, allow_dirty=False)
    (checkout.root / "file").write_text("y")
    commit_all(checkout.root)
    _run(checkout, allow_dirty=False)
    trouble.gone()


def _below_a_file(folder: Path) -> Path:
    (folder / "file").write_text("x")
    return folder / "file" / "out"


@pytest.mark.parametrize(
    "out",
    [
        pytest.param(_below_a_file, marks=remedy("moetier_bench/result.py", "cannot be made")),
        pytest.param(lambda _: Path("/proc"), marks=remedy("moetier_bench/result.py", "MiB that can be written")),
    ],
)
def test_a_result_goes_to_another_folder(
    trouble: Trouble, library: Library, tmp_path: Path, out: Callable[[Path], Path]
) -> None:
    with trouble:
        _run(library, out=out(tmp_path))
    _run(library, out=tmp_path / "another")
    trouble.gone()


@remedy("moetier_bench/here.py", "moetier bench machine")
def test_this_machine_is_written_down(trouble: Trouble, library: Library) -> None:
    (library.root / "machines" / "here.yaml").unlink()
    with trouble:
        _run(library)
    command("bench", "machine", "mine", "--summary", "TEXT", "--root", library.root)
    _run(library)
    trouble.gone()


@pytest.mark.parametrize("removed", [True, False])
@remedy("moetier_bench/cli/documents.py", "name the machine otherwise")
def test_a_machine_of_that_name(trouble: Trouble, library: Library, removed: bool) -> None:
    def machine(name: str) -> None:
        command("bench", "machine", name, "--summary", "x", "--root", library.root)

    with trouble:
        machine("here")
    if removed:
        (library.root / "machines" / "here.yaml").unlink()
    machine("here" if removed else "mine")
    trouble.gone()


@remedy("moetier_bench/documents.py", "`moetier bench list` shows what is")
def test_a_recipe_that_is_not_there(trouble: Trouble, library: Library) -> None:
    with trouble:
        command("bench", "show", "recipe", "nano/dran", "--root", library.root)
    assert "nano/dram" in command("bench", "list", "--root", library.root)
    command("bench", "show", "recipe", "nano/dram", "--root", library.root)
    trouble.gone()


@remedy("moetier_bench/documents.py", "correct or remove it")
def test_a_document_that_cannot_be_read(trouble: Trouble, library: Library) -> None:
    path = library.root / "recipes" / "nano" / "other.yaml"
    path.mkdir()
    with trouble:
        command("bench", "lint", "--root", library.root)
    path.rmdir()
    command("bench", "lint", "--root", library.root)
    trouble.gone()


@remedy("doctor/measure/kernel.py", "whose records are larger than the caches")
def test_a_kernel_faster_than_its_memory(trouble: Trouble, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where another program slows the readings of the memory."""
    read = kernel.read_bandwidth
    monkeypatch.setattr(kernel, "read_bandwidth", lambda *given: read(*given) / 1000)
    shape = ("bench", "kernel", "--shape", "512,512,8,2", "--threads", "1", "--tokens", "1")
    with trouble:
        command(*shape)
    monkeypatch.undo()
    command(*shape, "--experts", "64")
    trouble.gone()
