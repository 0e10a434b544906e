"""Bad carries, wheels, locks, indexes and definitions: one clear error each, and nothing half-written."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from moetier_stack.build import build_patched_wheel
from moetier_stack.errors import CollectedError, StackError
from moetier_stack.lock import only_writer
from moetier_stack.verify import verify
from tests.stack.project import FILES, POLITE, Demo, patch_bytes, replacing, wheel_bytes

Damage = Callable[[Demo], None]


def _snapshot(demo: Demo) -> dict[str, bytes]:
    """Every file that must not change: the stack's own, and what the cache holds under its name."""
    return {str(p): p.read_bytes() for p in sorted((demo.folder / "stack").rglob("*")) if p.is_file()}


def _refused(demo: Demo, words: str, act: Callable[[], object]) -> None:
    before = _snapshot(demo)
    with pytest.raises(StackError) as caught:
        act()
    problems = caught.value.problems if isinstance(caught.value, CollectedError) else (str(caught.value),)
    assert len(problems) == 1, problems
    assert words in problems[0], problems[0]
    assert _snapshot(demo) == before
    assert not [path for path in demo.folder.rglob("*") if path.name.endswith((".part", ".tmp"))]


def _carry(change: Callable[[bytes], bytes]) -> Callable[[Demo], None]:
    return lambda demo: demo.write(("polite", change(demo.patch(POLITE))))


def _swap(old: str, new: str) -> Callable[[Demo], None]:
    def changed(data: bytes) -> bytes:
        assert old.encode() in data
        return data.replace(old.encode(), new.encode())

    return _carry(changed)


def _made(edit: Callable[[dict[str, str]], dict[str, str]]) -> Callable[[Demo], None]:
    return lambda demo: demo.write(("polite", demo.patch(edit)))


def _two_on_one_hunk(demo: Demo) -> None:
    other = replacing("demo/app.py", '"Dear " + name', '"Esteemed " + name')
    demo.write(("polite", demo.patch(POLITE)), ("esteemed", demo.patch(other, "q")))


def _renamed(demo: Demo) -> None:
    data = demo.patch(POLITE)
    rename = b"diff --git a/demo/data.txt b/demo/words.txt\nsimilarity index 100%\nrename from demo/data.txt\n"
    head, mark, rest = data.partition(b"diff --git")
    demo.write(("polite", head + rename + b"rename to demo/words.txt\n" + mark + rest))


def _twice_in_one(demo: Demo) -> None:
    data = demo.patch(POLITE)
    demo.write(("polite", data + data[data.index(b"diff --git") :]))


BAD_CARRIES: dict[str, tuple[Damage, str]] = {
    "context-that-is-not-there": (_swap("     if polite:", "     if politely:"), "without fuzz"),
    "offset": (_swap("@@ -6,7 +6,7 @@", "@@ -7,7 +7,7 @@"), "without fuzz"),
    "wrong-count": (_swap("@@ -6,7 +6,7 @@", "@@ -6,9 +6,9 @@"), "polite"),
    "carriage-returns": (_carry(lambda data: data.replace(b"\n", b"\r\n")), "CRLF"),
    "path-outside": (_carry(lambda data: data.replace(b"demo/app.py", b"../etc/app.py")), "leads out"),
    "absolute-path": (_carry(lambda data: data.replace(b"a/demo/app.py", b"/demo/app.py")), "leads out"),
    "git-folder": (_carry(lambda data: data.replace(b"demo/app.py", b"demo/.git/app.py")), "leads out"),
    "renamed-file": (_renamed, "renames"),
    "two-carries-on-one-hunk": (_two_on_one_hunk, "make them one carry"),
    "one-file-twice": (_twice_in_one, "twice"),
    "empty": (_carry(lambda _: b""), "git format-patch"),
    "no-change": (_carry(lambda data: data[: data.index(b"diff --git")]), "changes nothing"),
    "plain-diff": (_carry(lambda data: data[data.index(b"diff --git") :]), "git format-patch"),
    "not-utf-8": (_carry(lambda data: data.replace(b"Dearest", b"D\xe9arest")), "UTF-8"),
    "binary": (_carry(lambda data: data + b"GIT binary patch\nliteral 0\n"), "binary"),
    "mode-change": (_swap("index ", "old mode 100644\nnew mode 100755\nindex "), "mode"),
    "symlink": (_swap(" 100644\n", " 120000\n"), "mode"),
    "creates-what-is-there": (
        lambda demo: demo.write(("polite", patch_bytes(demo.folder / "r", {}, {"demo/app.py": "x\n"}))),
        "in demo-1.0",
    ),
    "file-that-is-not-there": (
        lambda demo: demo.write(
            ("polite", patch_bytes(demo.folder / "r", {"demo/no.py": "x\n"}, {"demo/no.py": "y\n"}))
        ),
        "is not in demo-1.0",
    ),
}


@pytest.mark.parametrize(("damage", "words"), BAD_CARRIES.values(), ids=BAD_CARRIES)
def test_a_bad_carry_is_refused_when_it_is_locked(demo: Demo, damage: Damage, words: str) -> None:
    damage(demo)
    before = _snapshot(demo)
    with pytest.raises(StackError, match=words):
        demo.lock()
    assert _snapshot(demo) == before


BAD_SCOPES: dict[str, tuple[Damage, str]] = {
    "native-build-input": (_made(replacing("demo/native.cpp", "1", "2")), "compiled parts"),
    "does-not-compile": (_made(replacing("demo/app.py", "    total = 0\n", "    total = (\n")), "does not compile"),
    "does-not-import": (_made(replacing("demo/app.py", "import os\n", "import no_such_module\n")), "does not import"),
}


@pytest.mark.parametrize(("damage", "words"), BAD_SCOPES.values(), ids=BAD_SCOPES)
def test_what_applies_and_must_not_be_carried_fails_verify(demo: Demo, damage: Damage, words: str) -> None:
    damage(demo)
    demo.lock()
    _refused(demo, words, lambda: verify(demo.space))


def _lock_edited(demo: Demo, change: Callable[[str], str]) -> None:
    path = demo.space.lock_path
    text = path.read_text()
    assert change(text) != text
    path.write_text(change(text))


def _lose_a_hunk(demo: Demo) -> None:
    """Carry and lock agree on the patch's hash; the tree does not."""
    values = json.loads(demo.space.lock_path.read_text())
    old = values["carries"]["polite"]
    demo.write(("polite", demo.patch(replacing("demo/app.py", "Bye", "Ciao"), "q")))
    _relocked(demo, old)


def _relocked(demo: Demo, old: str) -> None:
    from moetier_stack.lock import Lock, save_lock
    from moetier_stack.workspace import patch_hash

    values = json.loads(demo.space.lock_path.read_text())
    values.pop("checksum")
    values["carries"]["polite"] = patch_hash(demo.space.patch_bytes("polite"))
    assert values["carries"]["polite"] != old
    save_lock(demo.space.lock_path, Lock.model_validate(values))


def _in_cache(demo: Demo, suffix: str) -> Path:
    return next(path for path in demo.space.cache.rglob("*") if path.name.endswith(suffix))


DAMAGED: dict[str, tuple[Damage, str]] = {
    "lock-edited-by-hand": (lambda d: _lock_edited(d, lambda t: t.replace('"1.0"', '"1.1"')), "edited by hand"),
    "lock-reformatted": (lambda d: _lock_edited(d, lambda t: t.replace("\n", "\n\n")), "edited by hand"),
    "lock-with-unknown-key": (lambda d: _lock_edited(d, lambda t: t.replace('"carries"', '"carry"', 1)), "carr"),
    "lock-cut-short": (lambda d: _lock_edited(d, lambda t: t[:300]), "expected JSON"),
    "no-lock": (lambda d: d.space.lock_path.unlink(), "run `moetier stack lock`"),
    "definition-changed": (lambda d: d.edit_toml('why = "a reason"', 'why = "another"'), "changed since"),
    "stray-patch": (lambda d: (d.folder / "stack/carries/demo/x.patch").write_text("x"), "no carry of stack.toml"),
    "lost-hunk": (_lose_a_hunk, "a hunk was lost"),
    "wheel-with-another-hash": (
        lambda d: _in_cache(d, ".whl").write_bytes(wheel_bytes("1.0", {**FILES, "demo/x.py": "1\n"})),
        "expected sha256",
    ),
    "truncated-wheel": (lambda d: _cut(_in_cache(d, ".whl")), "expected sha256"),
    "truncated-sdist": (lambda d: _cut(_in_cache(d, ".tar.gz")), "expected sha256"),
}


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(("damage", "words"), DAMAGED.values(), ids=DAMAGED)
def test_damage_is_found_by_verify(demo: Demo, damage: Damage, words: str) -> None:
    demo.write(("polite", demo.patch(POLITE)))
    demo.lock()
    damage(demo)
    before = _snapshot(demo)
    with pytest.raises(StackError, match=words):
        verify(demo.space)
    assert _snapshot(demo) == before


def test_verify_says_all_that_is_wrong_at_once(demo: Demo) -> None:
    demo.write(("polite", demo.patch(POLITE)))
    demo.lock()
    demo.edit_toml('why = "a reason"', 'why = "another"')
    (demo.folder / "stack/carries/demo/x.patch").write_text("x")
    _cut(_in_cache(demo, ".whl"))
    with pytest.raises(CollectedError) as caught:
        verify(demo.space)
    assert len(caught.value.problems) == 3


BAD_DEFINITIONS: dict[str, tuple[tuple[str, str], str]] = {
    "base-image-by-tag": (("@sha256:" + "a" * 64, ""), "a tag alone can move"),
    "unknown-key": (('python = "3.11"', 'python = "3.11"\nsumary = "x"'), "did you mean 'summary'"),
    "unknown-carry": (('carries = ["polite"]', 'carries = ["polit"]'), "did you mean 'polite'"),
    "carry-twice": (('carries = ["polite"]', 'carries = ["polite", "polite"]'), "twice"),
    "unknown-source": (('source = "demo"', 'source = "dmo"'), "did you mean 'demo'"),
    "no-drop-condition": (('drop_when = "it is gone"\n', ""), "drop_when"),
    "range-that-is-none": (('range = ">=1,<2"', 'range = "one"'), "version range"),
    "no-toml": (("[sources.demo]", "[sources.demo"), "expected TOML"),
}


@pytest.mark.parametrize(("edit", "words"), BAD_DEFINITIONS.values(), ids=BAD_DEFINITIONS)
def test_a_bad_definition_is_refused(demo: Demo, edit: tuple[str, str], words: str) -> None:
    demo.write(("polite", demo.patch(POLITE)))
    demo.edit_toml(*edit)
    before = _snapshot(demo)
    with pytest.raises(StackError, match=words):
        demo.lock()
    assert _snapshot(demo) == before


def test_a_duplicate_id_is_refused(demo: Demo) -> None:
    demo.write(("polite", demo.patch(POLITE)))
    path = demo.folder / "stack/stack.toml"
    path.write_text(path.read_text() + path.read_text()[path.read_text().index("\n[[carries]]") :])
    _refused(demo, "the id is there twice", demo.lock)


def _lie(demo: Demo) -> None:
    demo.release.said["demo-1.0-py3-none-any.whl"] = "0" * 64


def _wheel_of_another_version(demo: Demo) -> None:
    demo.release.files["demo-1.0-py3-none-any.whl"] = wheel_bytes("1.1", FILES)


def _evil_member(demo: Demo) -> None:
    demo.release.files["demo-1.0-py3-none-any.whl"] = wheel_bytes("1.0", {**FILES, "../evil.py": "1\n"})


BAD_INDEXES: dict[str, tuple[Damage, str]] = {
    "another-hash": (_lie, "nothing was kept"),
    "nothing-in-range": (lambda demo: demo.release.files.clear(), "no version in"),
    "wheel-of-another-version": (_wheel_of_another_version, "do not use it|METADATA"),
    "member-outside": (_evil_member, "leads out"),
    "bytes-that-are-no-wheel": (
        lambda demo: demo.release.files.update({"demo-1.0-py3-none-any.whl": b"no zip"}),
        "damaged",
    ),
    "not-reachable": (lambda demo: demo.edit_toml(demo.index, "http://127.0.0.1:9/"), "cannot be reached"),
    "no-scheme": (lambda demo: demo.edit_toml(demo.index, "ftp://index/"), "https, http or file"),
}


@pytest.mark.parametrize(("damage", "words"), BAD_INDEXES.values(), ids=BAD_INDEXES)
def test_an_index_that_lies_is_not_believed(demo: Demo, damage: Damage, words: str) -> None:
    demo.write(("polite", demo.patch(POLITE)))
    damage(demo)
    before = _snapshot(demo)
    with pytest.raises(StackError, match=words):
        _lock_and_verify(demo)
    if damage is not _wheel_of_another_version:
        assert _snapshot(demo) == before
    assert not list(demo.folder.rglob("*.part"))


def _lock_and_verify(demo: Demo) -> None:
    demo.lock()
    verify(demo.space)


def test_a_file_that_changed_under_its_name_is_refused(demo: Demo) -> None:
    demo.write()
    demo.lock()
    demo.release.files["demo-1.0.tar.gz"] += b"\0"
    _in_cache(demo, ".tar.gz").unlink()
    _refused(demo, "find out why", lambda: verify(demo.space))


def test_one_writer(demo: Demo) -> None:
    demo.write()
    with only_writer(demo.folder / "stack"):
        _refused(demo, "another process", demo.lock)


def test_offline_without_a_cache(demo: Demo) -> None:
    demo.write()
    demo.lock()
    _in_cache(demo, ".whl").unlink()
    space = demo.space
    space.offline = True
    with pytest.raises(StackError, match="not in the cache"):
        verify(space)


def test_a_wheel_is_not_left_half_written_where_the_disk_is_full(
    demo: Demo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    demo.write(("polite", demo.patch(POLITE)))
    demo.lock()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("moetier_stack.wheel.os.fsync", full)
    with pytest.raises(StackError, match="No space left"):
        build_patched_wheel(demo.space, "patched", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
