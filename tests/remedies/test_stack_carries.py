"""What is wrong with a carry, and what its message tells to do about it, done."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.remedies.stacks import carry_path, drop, lock_and_verify, polite, shifted, stack
from tests.remedies.trouble import Trouble
from tests.stack.project import FILES, POLITE, Demo, Edit, patch_bytes, replacing

remedy = pytest.mark.remedy
Step = Callable[[Demo], None]
ESTEEMED = replacing("demo/app.py", '"Dear " + name', '"Esteemed " + name')
TEST = "def test_one():\n    assert True\n"
MARK = b"diff --git"


def _changed(change: Callable[[bytes], bytes]) -> Step:
    """Define the stack with the carry's patch changed by hand."""
    return lambda demo: demo.write(("polite", change(demo.patch(POLITE))))


def _twice(data: bytes) -> bytes:
    return data + data[data.index(MARK) :]


def _renamed(data: bytes) -> bytes:
    rename = MARK + b" a/demo/data.txt b/demo/words.txt\nsimilarity index 100%\nrename from demo/data.txt\n"
    return data.replace(MARK, rename + b"rename to demo/words.txt\n" + MARK, 1)


def _without_change(data: bytes) -> bytes:
    """Its one hunk with only its context left."""
    lines = [line for line in data.split(b"\n") if not re.match(rb"[-+] ", line)]
    return re.sub(rb"@@ -(\d+),7 \+(\d+),7 @@", rb"@@ -\1,6 +\2,6 @@", b"\n".join(lines))


def _create(name: str, word: str) -> Callable[[Demo], bytes]:
    new = {**FILES, "demo/new.py": f'WORD = "{word}"\n'}
    return lambda demo: patch_bytes(demo.folder / f"repo-{name}", FILES, new)


def _nothing(demo: Demo) -> None:
    demo.write()
    drop(demo, "polite")


def _two_of_one_file(demo: Demo) -> None:
    demo.write(("one", _create("one", "a")(demo)), ("two", _create("two", "b")(demo)))


def _one_of_one_file(demo: Demo) -> None:
    drop(demo, "one", "two")
    demo.write(("both", _create("both", "ab")(demo)))


def _two_on_one_line(demo: Demo) -> None:
    demo.write(("polite", demo.patch(POLITE)), ("esteemed", demo.patch(ESTEEMED, "q")))


def _one_on_one_line(demo: Demo) -> None:
    drop(demo, "polite", "esteemed")
    demo.write(("both", demo.patch(replacing("demo/app.py", '"Dear " + name', '"Dearest, esteemed " + name'), "both")))


def _both(files: dict[str, str]) -> dict[str, str]:
    return {**POLITE(files), "tests/test_app.py": TEST}


def _test_alone(files: dict[str, str]) -> dict[str, str]:
    return {**files, "tests/test_app.py": TEST}


def _mixed(scope: str) -> Step:
    return lambda demo: demo.write(("both", demo.patch(_both)), scope=scope)


def _parted(demo: Demo) -> None:
    """Two carries: the program's change, and the test."""
    drop(demo, "both")
    demo.write(("polite", demo.patch(POLITE, "r")), ("tested", demo.patch(_test_alone, "s")), scope="test")
    demo.edit_toml('scope = "test"', 'scope = "runtime"')


def _native(demo: Demo) -> None:
    demo.write(("native", demo.patch(replacing("demo/native.cpp", "1", "2"))))


def _from_source(demo: Demo) -> None:
    demo.edit_toml('carries = ["native"]', 'carries = ["native"]\nbuild = "source"')


HALF = "x" * 1000 + "\n"
"""A line of a file so long that half of it may be a carry, and all of it not."""


def _adding(name: str, *files: str) -> Callable[[Demo], tuple[str, bytes]]:
    new = {**FILES, **{f"demo/{file}.txt": HALF * 2500 for file in files}}
    return lambda demo: (name, patch_bytes(demo.folder / f"repo-{name}", FILES, new))


def _large(demo: Demo) -> None:
    demo.write(_adding("all", "a", "b")(demo))


def _parts(demo: Demo) -> None:
    drop(demo, "all")
    demo.write(_adding("one", "a")(demo), _adding("two", "b")(demo))


FAULTS = [
    pytest.param(_changed(_twice), polite, marks=remedy("moetier_stack/patch.py", "is in it twice")),
    pytest.param(
        _changed(lambda data: data[: data.index(MARK)]),
        _nothing,
        marks=remedy("moetier_stack/patch.py", "it changes nothing;"),
    ),
    pytest.param(
        _changed(lambda data: data.replace(b"\n", b"\r\n")),
        polite,
        marks=remedy("moetier_stack/patch.py", "carriage returns"),
    ),
    pytest.param(
        _changed(lambda data: data[data.index(MARK) :]),
        polite,
        marks=remedy("moetier_stack/patch.py", "not of git format"),
    ),
    pytest.param(_changed(_renamed), polite, marks=remedy("moetier_stack/patch.py", "it renames")),
    pytest.param(
        _changed(lambda data: data[: data.index(b"@@ -")]),
        polite,
        marks=remedy("moetier_stack/patch.py", "has no hunk"),
    ),
    pytest.param(
        _changed(_without_change), polite, marks=remedy("moetier_stack/patch.py", "{} changes nothing; write")
    ),
    pytest.param(_two_of_one_file, _one_of_one_file, marks=remedy("moetier_stack/patch.py", "create or delete")),
    pytest.param(_two_on_one_line, _one_on_one_line, marks=remedy("moetier_stack/patch.py", "at line")),
    pytest.param(_mixed("test"), _parted, marks=remedy("moetier_stack/patch.py", "is outside tests/")),
    pytest.param(_mixed("runtime"), _parted, marks=remedy("moetier_stack/patch.py", "is a test, and")),
    pytest.param(
        _changed(lambda data: data.replace(b"demo/app.py", b"../demo/app.py")),
        polite,
        marks=remedy("moetier_stack/patch.py", "make the patch in the root of the tree"),
    ),
    pytest.param(_native, _from_source, marks=remedy("moetier_stack/patch.py", "set build =")),
    pytest.param(_large, _parts, marks=remedy("moetier_stack/workspace.py", "make several carries of it")),
    pytest.param(
        lambda demo: (polite(demo), drop(demo, "polite")),
        polite,
        marks=remedy("moetier_stack/workspace.py", "put its patch there"),
    ),
]


@pytest.mark.parametrize(("damage", "cure"), FAULTS)
def test_a_carry_is_put_right(trouble: Trouble, demo: Demo, damage: Step, cure: Step) -> None:
    damage(demo)
    with trouble:
        lock_and_verify(demo)
    cure(demo)
    lock_and_verify(demo)
    trouble.gone()


@pytest.mark.parametrize("name", ["named", "removed"])
@remedy("moetier_stack/verify.py", "no carry of stack.toml names it")
def test_a_stray_patch(trouble: Trouble, demo: Demo, name: str) -> None:
    polite(demo)
    stack(demo, "lock")
    stray = demo.patch(replacing("demo/app.py", '"Bye " + name', '"Farewell " + name'), "q")
    carry_path(demo, "stray").write_bytes(stray)
    with trouble:
        stack(demo, "verify")
    if name == "removed":
        drop(demo, "stray")
    else:
        demo.write(("polite", carry_path(demo, "polite").read_bytes()), ("stray", stray))
        stack(demo, "lock")
    stack(demo, "verify")
    trouble.gone()


@remedy("moetier_stack/patch.py", "it creates")
@remedy("moetier_stack/upstream.py", "drop the carry when you move there")
def test_a_file_that_came_from_upstream(trouble: Trouble, demo: Demo, tmp_path: Path) -> None:
    demo.write(("new", _create("new", "a")(demo)))
    stack(demo, "lock")
    demo.release.add("1.1", {**FILES, "demo/new.py": 'WORD = "a"\n'})
    with trouble:
        stack(demo, "lock", "--update", "demo=1.1")
    stack(demo, "status", "--doc", tmp_path / "upstream.md")
    trouble.said((tmp_path / "upstream.md").read_text())
    demo.write()
    drop(demo, "new")
    stack(demo, "lock", "--update", "demo=1.1")
    stack(demo, "verify")
    trouble.gone()


def _follow(demo: Demo, printed: str) -> None:
    """Run the command that `stack rebase` prints for making the patch anew."""
    command = re.search(r"`(git -C .* > .*)`", printed)
    assert command is not None, printed
    subprocess.run(["bash", "-c", command[1]], check=True, cwd=demo.folder)


@remedy("moetier_stack/patch.py", "does not stand there")
@remedy("moetier_stack/upstream.py", "moetier stack rebase")
@remedy("moetier_stack/cli.py", "git -C")
@remedy("moetier_stack/cli.py", "went on without a conflict")
def test_lines_that_moved(trouble: Trouble, demo: Demo, tmp_path: Path) -> None:
    polite(demo)
    stack(demo, "lock")
    demo.release.add("1.1", shifted(FILES))
    with trouble:
        stack(demo, "lock", "--update", "demo=1.1")
    doc = tmp_path / "upstream.md"
    stack(demo, "status", "--doc", doc)
    trouble.said(doc.read_text())
    trouble.said(printed := stack(demo, "rebase", "polite", "--onto", "1.1", "--dest", tmp_path / "work"))
    _follow(demo, printed)
    stack(demo, "lock", "--update", "demo=1.1")
    stack(demo, "verify")
    assert "pinned" in stack(demo, "status", "--doc", doc)
    trouble.gone()


GONE = {name: text for name, text in FILES.items() if name != "demo/app.py"}
TWO_HUNKS: Edit = lambda files: replacing("demo/app.py", '"Bye " + name', '"Farewell " + name')(POLITE(files))  # noqa: E731
CONFLICTS = [
    pytest.param(
        POLITE,
        replacing("demo/app.py", '"Dear "', '"Sir "')(FILES),
        marks=[
            remedy("moetier_stack/patch.py", "does not stand there"),
            remedy("moetier_stack/upstream.py", "moetier stack rebase"),
            remedy("moetier_stack/cli.py", "resolve the conflict"),
        ],
        id="rewritten",
    ),
    pytest.param(
        POLITE,
        {**GONE, "demo/main.py": FILES["demo/app.py"].replace("Dear", "Sir").replace("total", "sum_of_all")},
        marks=[
            remedy("moetier_stack/patch.py", "is not in {}; see"),
            remedy("moetier_stack/upstream.py", "moetier stack rebase"),
            remedy("moetier_stack/cli.py", "resolve the conflict"),
        ],
        id="file-gone",
    ),
    pytest.param(
        TWO_HUNKS,
        replacing("demo/app.py", '"Dear " + name', '"Dearest " + name')(FILES),
        marks=[
            remedy("moetier_stack/patch.py", "does not stand there"),
            remedy("moetier_stack/upstream.py", "drop what landed"),
        ],
        id="half-landed",
    ),
]


@pytest.mark.parametrize(("edit", "upstream"), CONFLICTS)
def test_a_conflict_is_resolved(
    trouble: Trouble, demo: Demo, tmp_path: Path, edit: Edit, upstream: dict[str, str]
) -> None:
    demo.write(("polite", demo.patch(edit)))
    stack(demo, "lock")
    demo.release.add("1.1", upstream)
    with trouble:
        stack(demo, "lock", "--update", "demo=1.1")
    doc, work = tmp_path / "upstream.md", tmp_path / "work"
    stack(demo, "status", "--doc", doc)
    trouble.said(doc.read_text())
    printed = stack(demo, "rebase", "polite", "--onto", "1.1", "--dest", work)
    if "resolve the conflict" in printed:
        trouble.said(printed)
        assert subprocess.run(["git", "status"], cwd=work, capture_output=True, check=True).stdout
        name = "demo/main.py" if "demo/main.py" in upstream else "demo/app.py"
        subprocess.run(["git", "rm", "-q", "-r", "--cached", "."], cwd=work, check=True)
        for file, text in upstream.items():
            (work / file).write_text(text)
        (work / name).write_text(upstream[name].replace("Sir", "Dearest Sir"))
        if name != "demo/app.py":
            (work / "demo/app.py").unlink(missing_ok=True)
        subprocess.run(["git", "add", "--all", "--force"], cwd=work, check=True)
        subprocess.run(["git", "am", "--continue"], cwd=work, check=True, capture_output=True)
    _follow(demo, printed)
    stack(demo, "lock", "--update", "demo=1.1")
    stack(demo, "verify")
    trouble.gone()
