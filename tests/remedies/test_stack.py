"""What `moetier stack` says of the stack's own files, of its command line and of what it writes; done as it says."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moetier.errors import MoetierError
from moetier_stack.lock import Lock, only_writer, save_lock
from moetier_stack.workspace import patch_hash
from tests.remedies.commands import moetier
from tests.remedies.stacks import carry_path, lock_and_verify, stack
from tests.remedies.trouble import Trouble
from tests.stack.project import FILES, Demo, replacing, wheel_bytes
from tests.stack.test_unpacking import member, sdist

remedy = pytest.mark.remedy
Step = Callable[[Demo], object]
DIGEST = "sha256:" + "b" * 64


def _rewritten(demo: Demo, old: str, new: str) -> None:
    path = demo.space.lock_path
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


BAD_LOCKS: dict[str, Step] = {
    "edited": lambda demo: _rewritten(demo, '"1.0"', '"1.1"'),
    "reformatted": lambda demo: _rewritten(demo, "\n", "\n\n"),
    "cut-short": lambda demo: demo.space.lock_path.write_text(demo.space.lock_path.read_text()[:300]),
}


@pytest.mark.parametrize("restored", [True, False], ids=["restored", "chosen-anew"])
@pytest.mark.parametrize("damage", BAD_LOCKS.values(), ids=BAD_LOCKS)
@remedy("moetier_stack/lock.py", "restore it from the history")
def test_a_lock_that_is_not_as_it_was_written(trouble: Trouble, locked: Demo, damage: Step, restored: bool) -> None:
    path = locked.space.lock_path
    before = path.read_bytes()
    damage(locked)
    with trouble:
        stack(locked, "lock")
    if restored:
        path.write_bytes(before)
    else:
        path.unlink()
        stack(locked, "lock")
    stack(locked, "verify")
    trouble.gone()


def _other_carry(demo: Demo) -> None:
    edit = replacing("demo/app.py", '"Dear " + name', '"Cherished " + name')
    carry_path(demo, "polite").write_bytes(demo.patch(edit, "other"))


def _new_profile(demo: Demo) -> None:
    text = (demo.folder / "stack" / "stack.toml").read_text()
    start = text.index("[profiles.plain]")
    more = text[start : text.index("[profiles.patched]")].replace("plain", "third")
    demo.edit_toml("[profiles.plain]", more + "[profiles.plain]")


def _renamed_source(demo: Demo) -> None:
    path = demo.folder / "stack" / "stack.toml"
    text = path.read_text().replace("[sources.demo]", "[sources.next]").replace('source = "demo"', 'source = "next"')
    path.write_text(text.replace('target = "demo"', 'target = "next"'))
    carry_path(demo, "polite").parent.rename(demo.folder / "stack" / "carries" / "next")


def _record(demo: Demo) -> object:
    return stack(demo, "lock", "--image", f"third={DIGEST}")


def _tree(demo: Demo, profile: str) -> object:
    shutil.rmtree(demo.folder / "tree", ignore_errors=True)
    return stack(demo, "apply", "-p", profile, demo.folder / "tree")


def _verify(demo: Demo) -> object:
    return stack(demo, "verify")


RELOCK = [
    pytest.param(lambda demo: demo.space.lock_path.unlink(), _verify, id="no-lock"),
    pytest.param(lambda demo: demo.edit_toml('"a reason"', '"another"'), _verify, id="definition"),
    pytest.param(_other_carry, _verify, id="carry"),
    pytest.param(_new_profile, _verify, id="profile"),
    pytest.param(_new_profile, lambda demo: stack(demo, "wheel", "-p", "third", "--out", demo.folder), id="wheel"),
    pytest.param(_new_profile, lambda demo: stack(demo, "image", "-p", "third", "--print"), id="image"),
    pytest.param(_new_profile, _record, id="record"),
    pytest.param(
        _renamed_source,
        lambda demo: _tree(demo, "plain"),
        marks=remedy("moetier_stack/workspace.py", "source {} is not locked"),
        id="source",
    ),
]


@pytest.mark.parametrize(("damage", "act"), RELOCK)
@remedy("moetier_stack/lock.py", "run `moetier stack lock`")
def test_locked_anew(trouble: Trouble, locked: Demo, damage: Step, act: Step) -> None:
    damage(locked)
    with trouble:
        act(locked)
    stack(locked, "lock")
    act(locked)
    stack(locked, "verify")
    trouble.gone()


def _locked_as(demo: Demo, change: Callable[[dict[str, Any]], None]) -> None:
    """Save the lock with other values, and the checksum of those."""
    values = json.loads(demo.space.lock_path.read_text())
    del values["checksum"]
    change(values)
    save_lock(demo.space.lock_path, Lock.model_validate(values))


@remedy("moetier_stack/verify.py", "run `moetier stack lock --update")
def test_a_tree_that_is_not_the_locked_one(trouble: Trouble, locked: Demo) -> None:
    _locked_as(locked, lambda values: values["sources"]["demo"].update(tree="0" * 64))
    with trouble:
        stack(locked, "verify")
    assert "moetier stack lock --update demo" in trouble.text
    stack(locked, "lock", "--update", "demo")
    stack(locked, "verify")
    trouble.gone()


@pytest.mark.parametrize("restored", [True, False])
@remedy("moetier_stack/verify.py", "a hunk was lost, or a carry changed")
def test_a_lost_hunk(trouble: Trouble, locked: Demo, restored: bool) -> None:
    path, lock = carry_path(locked, "polite"), locked.space.lock_path
    before, written = path.read_bytes(), lock.read_bytes()
    _other_carry(locked)
    changed = patch_hash(path.read_bytes())
    _locked_as(locked, lambda values: values["carries"].update(polite=changed))
    with trouble:
        stack(locked, "verify")
    if restored:  # from the history, with the lock that was written of it
        path.write_bytes(before)
        lock.write_bytes(written)
    else:
        stack(locked, "lock")
    stack(locked, "verify")
    trouble.gone()


@pytest.mark.parametrize("kept", [True, False], ids=["not-excluded", "another-wheel"])
@remedy("moetier_stack/verify.py", "take another wheel, or do not exclude it")
def test_a_file_that_is_excluded(trouble: Trouble, demo: Demo, kept: bool) -> None:
    demo.write(more='[profiles.patched.exclude]\nfiles = ["demo/data.*"]\n')
    stack(demo, "lock")
    with trouble:
        stack(demo, "verify")
    if kept:
        demo.edit_toml('files = ["demo/data.*"]', "")
    else:
        demo.release.add("1.1", {name: text for name, text in FILES.items() if name != "demo/data.txt"})
    stack(demo, "lock", *(() if kept else ("--update", "demo")))
    stack(demo, "verify")
    trouble.gone()


@remedy("moetier_stack/cli.py", "install it: pip install")
def test_a_wheel_is_installed(trouble: Trouble, locked: Demo) -> None:
    trouble.said(stack(locked, "wheel", "-p", "patched", "--out", locked.folder / "dist"))
    pip, *install = trouble.text.partition("install it: ")[2].split()
    apart = ["--no-index", "--no-deps", "--quiet", "--target", str(locked.folder / "site")]
    subprocess.run([sys.executable, "-m", pip, *install, *apart], check=True, capture_output=True)
    assert "Dearest" in (locked.folder / "site/demo/app.py").read_text()
    trouble.gone()


@pytest.mark.parametrize(
    "act",
    [
        pytest.param(
            lambda demo: stack(demo, "wheel", "-p", "patched", "--out", demo.folder / "dist"),
            marks=remedy("moetier_stack/build.py", "see `moetier stack verify`"),
        ),
        pytest.param(
            lambda demo: _tree(demo, "patched"), marks=remedy("moetier_stack/rebase.py", "see `moetier stack verify`")
        ),
    ],
)
def test_verify_says_why_it_is_not_the_locked_one(trouble: Trouble, locked: Demo, act: Step) -> None:
    _other_carry(locked)
    with trouble:
        act(locked)
    with pytest.raises(MoetierError, match="carry polite: its patch is not the locked one; run `moetier stack lock`"):
        stack(locked, "verify")
    stack(locked, "lock")
    act(locked)
    trouble.gone()


@remedy("moetier_stack/lock.py", "is being locked by another process")
def test_another_process_locks(trouble: Trouble, locked: Demo) -> None:
    with only_writer(locked.folder / "stack"), trouble:
        stack(locked, "lock")
    stack(locked, "lock")
    trouble.gone()


@remedy("moetier_stack/definition.py", "name the folder of stack.toml with --stack")
def test_no_definition_here(trouble: Trouble, locked: Demo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path / "stack")
    cache = ("--cache", tmp_path / "cache")
    with trouble:
        moetier("stack", "verify", *cache)
    moetier("stack", "verify", *cache, "--stack", ".")
    trouble.gone()


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        pytest.param(
            ("lock", "--update", "demo=one"),
            ("lock", "--update", "demo=1.0"),
            marks=remedy("moetier_stack/relock.py", "expected PROJECT or PROJECT=VERSION"),
        ),
        pytest.param(
            ("lock", "--update", "deno"),
            ("lock", "--update", "demo"),
            marks=remedy("moetier_stack/relock.py", "no source is of that project"),
        ),
        pytest.param(
            ("lock", "--image", "plain"),
            ("lock", "--image", f"plain={DIGEST}"),
            marks=remedy("moetier_stack/cli.py", "expected PROFILE=sha256"),
        ),
        pytest.param(
            ("lock", "--image", f"plain={DIGEST}", "--update", "demo"),
            ("lock", "--image", f"plain={DIGEST}"),
            marks=remedy("moetier_stack/cli.py", "no --update with it"),
        ),
    ],
)
def test_the_command_line_put_right(
    trouble: Trouble, locked: Demo, wrong: tuple[str, ...], right: tuple[str, ...]
) -> None:
    with trouble:
        stack(locked, *wrong)
    stack(locked, *right)
    trouble.gone()


@remedy("moetier_stack/rebase.py", "name a new folder")
def test_a_tree_is_written_to_a_new_folder(trouble: Trouble, locked: Demo) -> None:
    (locked.folder / "mine").mkdir()
    (locked.folder / "mine" / "file").write_text("mine")
    with trouble:
        stack(locked, "apply", "-p", "patched", locked.folder / "mine")
    stack(locked, "apply", "-p", "patched", locked.folder / "new")
    trouble.gone()


@pytest.mark.parametrize("way", ["twice", "cut"])
@remedy("moetier_stack/archive.py", "the index offers it so; choose another version")
def test_a_release_that_cannot_be_unpacked(trouble: Trouble, locked: Demo, way: str) -> None:
    """As its project published it: the index names these very bytes."""
    for version in ("1.1", "1.2"):
        locked.release.add(version, FILES)
    name = "demo-1.1.tar.gz"
    twice = sdist(locked.folder / name, (member("demo-1.0/demo/__init__.py"), b"other")).read_bytes()
    locked.release.files[name] = twice if way == "twice" else twice[: len(twice) // 2]
    work = locked.folder / "work"
    with trouble:
        stack(locked, "rebase", "polite", "--onto", "1.1", "--dest", work)
    stack(locked, "rebase", "polite", "--onto", "1.2", "--dest", work)
    trouble.gone()


@remedy("moetier_stack/wheel.py", "make room there, or name another folder")
def test_a_wheel_is_written_to_another_folder(trouble: Trouble, locked: Demo) -> None:
    (locked.folder / "dist").write_text("a file")
    with trouble:
        stack(locked, "wheel", "-p", "patched", "--out", locked.folder / "dist")
    stack(locked, "wheel", "-p", "patched", "--out", locked.folder / "other")
    trouble.gone()


@remedy("moetier_stack/workspace.py", "constraints {}: there is no {}")
def test_constraints_corrected(trouble: Trouble, demo: Demo) -> None:
    demo.write(more='constraints = ["pins.txt"]')
    (demo.folder / "stack" / "pinned.txt").write_text("extra==1.0\n")
    with trouble:
        stack(demo, "lock")
    demo.edit_toml("pins.txt", "pinned.txt")
    lock_and_verify(demo)
    trouble.gone()


@remedy("moetier_stack/verify.py", "is excluded and locked")
def test_what_is_excluded_is_left_out(trouble: Trouble, demo: Demo) -> None:
    demo.release.files["demo-1.0-py3-none-any.whl"] = wheel_bytes("1.0", FILES, requires="extra")
    demo.release.files["extra-1.0-py3-none-any.whl"] = wheel_bytes("1.0", {"extra.py": ""}, "extra")
    link = '<a href="../../files/extra-1.0-py3-none-any.whl">extra-1.0-py3-none-any.whl</a>'
    demo.release.pages["/simple/extra/"] = link.encode()
    demo.write(more='[profiles.patched.exclude]\ndistributions = ["extra"]\n')
    demo.edit_toml('wheel = "demo"\ncarries = []', 'wheel = "demo"\nleave_out = ["extra"]\ncarries = []')
    stack(demo, "lock")
    with trouble:
        stack(demo, "verify")
    demo.edit_toml("[profiles.patched.exclude]", 'leave_out = ["extra"]\n[profiles.patched.exclude]')
    lock_and_verify(demo)
    trouble.gone()
