"""When a change counts as landed: changes that really went in, their alterations, moved and reformatted ones."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from moetier_stack.archive import Tree, read_tree
from moetier_stack.errors import StackError
from moetier_stack.index import Index, fetch
from moetier_stack.patch import read_patch
from moetier_stack.status import State, carry_status
from tests.stack.changes import Change, changes
from tests.stack.project import FILES, Files, patch_bytes, replacing

CUT = 20


def _tree(name: str, files: Files) -> Tree:
    texts = {path: text.encode() for path, text in files.items()}
    return Tree(name, {path: hashlib.sha256(text).hexdigest() for path, text in texts.items()}, texts)


@pytest.fixture(scope="module")
def releases() -> tuple[Tree, Tree]:
    """VLLM's sources 0.31.0 and 0.32.0: from the cache that MOETIER_STACK_CACHE names, else from the index."""
    cache = Path(os.environ.get("MOETIER_STACK_CACHE") or Path(tempfile.gettempdir()) / "moetier-stack-tests")
    trees = []
    for version in ("0.31.0", "0.32.0"):
        found = sorted(cache.glob(f"*/vllm-{version}.tar.gz"))
        if not found:
            try:
                found = [fetch(Index().named("vllm", f"vllm-{version}.tar.gz"), cache)]
            except StackError as error:
                pytest.skip(f"wants vLLM's sdists, and the index cannot be asked: {error}")
        trees.append(read_tree(found[0]))
    return trees[0], trees[1]


@pytest.fixture(scope="module")
def cut(releases: tuple[Tree, Tree], tmp_path_factory: pytest.TempPathFactory) -> list[Change]:
    found = changes(*releases, tmp_path_factory.mktemp("cut") / "repo", CUT)
    assert len(found) == CUT
    return found


def _state(change: Change, releases: tuple[Tree, Tree]) -> State:
    return carry_status(read_patch(change.name, change.data), change.data, *releases, "0.32.0").state


def test_changes_that_went_in_between_two_releases_are_landed(cut: list[Change], releases: tuple[Tree, Tree]) -> None:
    states = {change.name: _state(change, releases) for change in cut}
    assert sum(state is State.LANDED for state in states.values()) >= 18, states


@pytest.mark.parametrize("how", ["word", "comment", "twice"])
def test_none_is_landed_once_one_line_is_altered(how: str, cut: list[Change], releases: tuple[Tree, Tree]) -> None:
    for number, change in enumerate(cut):
        altered = change.altered(number, how)
        assert altered is not None
        assert altered.data != change.data
        assert _state(altered, releases) is not State.LANDED, altered.data.decode()


def test_none_is_landed_in_the_release_that_it_was_cut_against(cut: list[Change], releases: tuple[Tree, Tree]) -> None:
    for change in cut:
        assert _state(change, (releases[0], releases[0])) is State.APPLIES


def test_reformatted_changes_are_mostly_landed_and_altered_ones_never(
    cut: list[Change], releases: tuple[Tree, Tree], tmp_path: Path
) -> None:
    ruff = shutil.which("ruff", path=str(Path(sys.executable).parent)) or shutil.which("ruff")
    if ruff is None:
        pytest.skip("wants ruff to reformat with")
    old, new = releases
    for change in cut:
        path = tmp_path / change.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(new.texts[change.path])
    style = ["--isolated", "--no-cache", "--line-length", "70", "--config", 'format.quote-style="single"']
    subprocess.run([ruff, "format", "--quiet", *style, "."], cwd=tmp_path, check=True)
    formatted = {change.path: (tmp_path / change.path).read_bytes() for change in cut}
    assert sum(formatted[path] != new.texts[path] for path in formatted) > CUT / 2
    reformatted = new.replaced(dict(formatted))
    landed = sum(_state(change, (old, reformatted)) is State.LANDED for change in cut)
    assert landed >= 16, f"{landed} of {CUT}"
    for change in cut:
        altered = change.altered(0, "word")
        assert altered is not None
        assert _state(altered, (old, reformatted)) is not State.LANDED, altered.data.decode()


NEW_FUNCTION = "def wave(name):\n    text = 'Waves at ' + name\n    return text\n\n\n"
CHANGE = replacing("demo/app.py", "def leave(name):", NEW_FUNCTION + "def leave(name):")
UPSTREAM: dict[str, tuple[Callable[[Files], Files], State]] = {
    "as-it-is": (CHANGE, State.LANDED),
    "not-there": (lambda files: files, State.APPLIES),
    "moved-in-its-file": (
        lambda files: {**files, "demo/app.py": files["demo/app.py"] + "\n\n" + NEW_FUNCTION.rstrip() + "\n"},
        State.LANDED,
    ),
    "moved-to-another-file": (lambda files: {**files, "demo/wave.py": NEW_FUNCTION}, State.LANDED),
    "moved-into-a-class": (
        lambda files: {**files, "demo/app.py": files["demo/app.py"] + "\n\nclass A:\n" + _deeper(NEW_FUNCTION)},
        State.LANDED,
    ),
    "reformatted": (
        lambda files: replacing("demo/app.py", "'Waves at ' + name", '(\n        "Waves at " + name\n    )')(
            CHANGE(files)
        ),
        State.LANDED,
    ),
    "another-word": (lambda files: replacing("demo/app.py", "Waves at", "Waves to")(CHANGE(files)), State.APPLIES),
    "another-indentation": (
        lambda files: replacing("demo/app.py", "    return text\n", "    if name:\n        return text\n")(
            CHANGE(files)
        ),
        State.APPLIES,
    ),
    "a-line-more": (
        lambda files: replacing("demo/app.py", "    return text\n", "    text += '!'\n    return text\n")(
            CHANGE(files)
        ),
        State.APPLIES,
    ),
    "only-a-part": (
        lambda files: {**files, "demo/wave.py": NEW_FUNCTION.replace("    return text\n", "")},
        State.APPLIES,
    ),
}


def _deeper(text: str) -> str:
    return "".join(f"    {line}" if line.strip() else line for line in text.splitlines(keepends=True))


@pytest.mark.parametrize(("upstream", "state"), UPSTREAM.values(), ids=UPSTREAM)
def test_a_new_function(upstream: Callable[[Files], Files], state: State, tmp_path: Path) -> None:
    data = patch_bytes(tmp_path / "repo", FILES, CHANGE(FILES))
    trees = _tree("pinned", FILES), _tree("upstream", upstream(FILES))
    found = carry_status(read_patch("wave", data), data, *trees, "1.1").state
    assert (found is State.LANDED) == (state is State.LANDED)


TUPLE = "PAIRS = [('a', 1), ('b', 2)]\nONE = f(1)\nEND = 0\n"
LOOKALIKES: dict[str, tuple[str, str]] = {
    "tuple-of-one-is-no-value": ("ONE = (1,)", "ONE = (1)"),
    "subscript-with-a-comma-is-a-tuple": ("ONE = f[1,]", "ONE = f[1]"),
    "text-of-a-comment": ("ONE = 1  # right", "ONE = 1  # wrong"),
    "bytes-are-no-text": ("ONE = b'x'", "ONE = 'x'"),
    "spaces-inside-text": ("ONE = 'a  b'", "ONE = 'a b'"),
}


@pytest.mark.parametrize(("wanted", "there"), LOOKALIKES.values(), ids=LOOKALIKES)
def test_what_only_looks_the_same_is_not_landed(wanted: str, there: str, tmp_path: Path) -> None:
    old = {"demo/app.py": TUPLE}
    data = patch_bytes(tmp_path / "repo", old, {"demo/app.py": TUPLE.replace("ONE = f(1)", wanted)})
    upstream = _tree("upstream", {"demo/app.py": TUPLE.replace("ONE = f(1)", there)})
    state = carry_status(read_patch("one", data), data, _tree("pinned", old), upstream, "1.1").state
    assert state is State.REBASE


def test_a_carry_whose_context_was_altered_is_refused(tmp_path: Path) -> None:
    data = patch_bytes(tmp_path / "repo", FILES, CHANGE(FILES)).replace(b" def leave(name):", b" def leaves(name):")
    tree = _tree("pinned", FILES)
    with pytest.raises(StackError, match="without fuzz"):
        carry_status(read_patch("wave", data), data, tree, tree, "1.1")
