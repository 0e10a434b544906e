"""Lock, verify, apply, wheel, image, status and rebase on a small project."""

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.version import Version

from moetier_stack.build import build_patched_wheel
from moetier_stack.errors import StackError
from moetier_stack.git import git
from moetier_stack.image import containerfile, self_test, write_context
from moetier_stack.index import fetch
from moetier_stack.lock import load_lock
from moetier_stack.rebase import apply_profile, prepare_rebase
from moetier_stack.relock import Update, record_image, relock
from moetier_stack.selftest import problems
from moetier_stack.status import State
from moetier_stack.upstream import document, statuses
from moetier_stack.verify import verify
from tests.stack.project import FILES, POLITE, Demo, Release, replacing, serving, wheel_bytes

FAREWELL = replacing("demo/app.py", '"Bye " + name', '"Farewell " + name')


@pytest.fixture
def locked(demo: Demo) -> Demo:
    demo.write(("polite", demo.patch(POLITE)), ("farewell", demo.patch(FAREWELL, "q")))
    demo.lock()
    return demo


def test_what_is_locked_verifies_offline_and_locks_to_the_same_bytes(locked: Demo) -> None:
    before = locked.space.lock_path.read_bytes()
    locked.release.files.clear()
    space = locked.space
    space.offline = True
    assert verify(space) == []
    locked.lock()
    assert locked.space.lock_path.read_bytes() == before


def test_two_carries_on_one_file_apply_as_git_applies_them_one_after_the_other(locked: Demo, tmp_path: Path) -> None:
    apply_profile(locked.space, "patched", tmp_path / "tree")
    text = (tmp_path / "tree/demo/app.py").read_text()
    assert text == FAREWELL(POLITE(FILES))["demo/app.py"]
    with pytest.raises(StackError, match="already"):
        apply_profile(locked.space, "patched", tmp_path / "tree")


def test_a_patched_wheel_is_the_same_bytes_twice_and_installs(locked: Demo, tmp_path: Path) -> None:
    one, two = (build_patched_wheel(locked.space, "patched", tmp_path / name) for name in "ab")
    assert one.name == "demo-1.0+moetier.patched-py3-none-any.whl"
    assert one.read_bytes() == two.read_bytes()
    with zipfile.ZipFile(one) as archive:
        assert archive.testzip() is None
    target = tmp_path / "site"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(target),
        str(one),
    ]
    subprocess.run(pip, check=True)
    code = "import demo.app, importlib.metadata as m; print(demo.app.greet('you', True), m.version('demo'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=target, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "Dearest you 1.0+moetier.patched"


def test_a_plain_wheel_differs_in_its_version_only(locked: Demo, tmp_path: Path) -> None:
    made = build_patched_wheel(locked.space, "plain", tmp_path)
    with zipfile.ZipFile(made) as ours, zipfile.ZipFile(locked.space.wheel("plain")) as theirs:
        for name in theirs.namelist():
            if ".dist-info/" not in name:
                assert ours.read(name) == theirs.read(name)


def test_an_update_moves_to_the_newest_in_range_and_says_what_is_invalid(locked: Demo) -> None:
    record_image(locked.space, "patched", "sha256:" + "b" * 64)
    old = load_lock(locked.space.lock_path)
    for version in ("1.1", "1.2rc1", "2.0"):
        locked.release.add(version, FILES)
    said: list[str] = []
    relock(locked.space, (), said.append)
    assert load_lock(locked.space.lock_path) == old, "nothing moves unasked"
    new = relock(locked.space, (Update.parse("demo"),), said.append)
    assert new.sources["demo"].version == "1.1"
    assert new.profiles["patched"].image is None
    text = "\n".join(said)
    assert "1.0 -> 1.1" in text
    assert "images of patched" in text
    assert old.hash()[:16] in text
    assert relock(locked.space, (Update.parse("demo=1.0"),), said.append).sources["demo"].version == "1.0"


def test_cache_keys_differ_by_profile_and_lock_and_not_by_image_digest(locked: Demo) -> None:
    old = load_lock(locked.space.lock_path)
    assert record_image(locked.space, "plain", "sha256:" + "c" * 64).hash() == old.hash()
    locked.release.add("1.1", FILES)
    new = relock(locked.space, (Update.parse("demo"),), lambda _: None)
    assert len({lock.cache_key(name) for lock in (old, new) for name in ("plain", "patched")}) == 4


def test_the_index_may_be_html(tmp_path: Path) -> None:
    release = Release()
    release.add("1.0", FILES)
    with serving(release, html=True) as index:
        demo = Demo(tmp_path, release, index)
        demo.write()
        demo.lock()
        assert verify(demo.space) == []


def test_a_git_source_takes_the_newest_first_parent_commit_that_has_a_wheel(tmp_path: Path) -> None:
    repository = tmp_path / "upstream"
    data = Demo(tmp_path, Release(), "").patch(POLITE, "seed")
    subprocess.run(["cp", "-r", str(tmp_path / "repo-seed"), str(repository)], check=True)
    first = git(repository, "rev-parse", "HEAD~1").stdout.decode().strip()
    release = Release()
    name = f"demo-1.0+g{first[:9]}-py3-none-any.whl"
    release.files[name] = wheel_bytes(f"1.0+g{first[:9]}", FILES)
    with serving(release) as index:
        demo = Demo(tmp_path, release, index)
        demo.write(("polite", data))
        wheels = f"{index.removesuffix('simple/')}wheels/{{commit}}"
        demo.edit_toml(f'index = "{index}"', f'git = "{repository}"\nbranch = "stack"\nwheel_index = "{wheels}"')
        with pytest.raises(StackError, match="none of the last 2 commits"):
            demo.lock()
        digest = hashlib.sha256(release.files[name]).hexdigest()
        link = f'<a href="../../../files/{name.replace("+", "%2B")}#sha256={digest}">{name}</a>'
        release.pages[f"/wheels/{first}/demo/"] = link.encode()
        release.pages[f"/files/{name.replace('+', '%2B')}"] = release.files[name]
        demo.lock()
        assert demo.space.lock.sources["demo"].commit == first
        assert verify(demo.space) == []


def test_status_of_four_fates(locked: Demo) -> None:
    polite, farewell = POLITE(FILES), FAREWELL(FILES)
    locked.release.add("1.1", polite)
    locked.release.add("1.2", replacing("demo/app.py", "    if polite:\n", "    if polite and name:\n")(farewell))
    found = {(one.carry, one.version): one for one in statuses(locked.space, None, lambda _: None)}
    assert found["polite", "1.0"].state is State.APPLIES
    assert found["polite", "1.1"].state is State.LANDED
    assert found["farewell", "1.1"].state is State.APPLIES
    assert found["polite", "1.2"].state is State.REBASE
    assert "+    if polite and name:" in found["polite", "1.2"].hunks[0].change
    text = document(locked.space, list(found.values()))
    assert "| 1.1 | landed | drop the carry when you move there |" in text
    assert "+    if polite and name:" in text


def test_a_rebase_leaves_the_conflict_to_be_resolved(locked: Demo, tmp_path: Path) -> None:
    locked.release.add("1.1", replacing("demo/app.py", '"Dear "', '"Sir "')(FILES))
    locked.release.add("1.2", replacing("demo/app.py", "import os\n", "import os\nimport re\n\n\nX = 1\n")(FILES))
    assert prepare_rebase(locked.space, "polite", Version("1.2"), tmp_path / "clean")
    assert "Dearest" in (tmp_path / "clean/demo/app.py").read_text()
    assert not prepare_rebase(locked.space, "polite", Version("1.1"), tmp_path / "conflict")
    assert "<<<<<<<" in (tmp_path / "conflict/demo/app.py").read_text()
    assert b"both modified" in git(tmp_path / "conflict", "status").stdout


def test_an_image_is_pinned_offline_and_not_root(locked: Demo, tmp_path: Path) -> None:
    text = containerfile(locked.space, "patched")
    lock = locked.space.lock
    froms = [line for line in text.splitlines() if line.startswith("FROM ")]
    assert froms
    assert all("@sha256:" in line for line in froms)
    assert text.count("--require-hashes") == 2
    assert f'io.moetier.stack.lock="{lock.hash()}"' in text
    assert f"VLLM_CACHE_ROOT=/var/cache/moetier/{lock.cache_key('patched')}/vllm" in text
    users = [line for line in text.splitlines() if line.startswith("USER ")]
    assert users[-1] == "USER 10001:10001"
    ours = tmp_path / "moetier-0.1.0-py3-none-any.whl"
    ours.write_bytes(wheel_bytes("0.1.0", {}, "moetier"))
    context = write_context(locked.space, "patched", ours, tmp_path / "context")
    assert sorted(path.name for path in context.iterdir()) == [
        "Containerfile",
        "requirements.txt",
        "stack.json",
        "wheels",
        "wheels.txt",
    ]
    check = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--no-index", "--require-hashes"]
    subprocess.run([*check, "--quiet", "-r", "wheels.txt"], cwd=context, check=True)


def test_the_self_test_finds_what_is_not_as_locked(locked: Demo) -> None:
    expected = self_test(locked.space, "patched")
    expected |= {"imports": ["json", "no_such_module"], "absent_modules": ["csv"], "python": "2.7"}
    found = "\n".join(problems(json.loads(json.dumps(expected))))
    for words in ("Python is", "demo is None", "module csv is there", "no_such_module does not import"):
        assert words.removeprefix("module ") in found


def test_a_release_is_fetched_once(locked: Demo) -> None:
    file = locked.space.index(locked.index).named("demo", "demo-1.0.tar.gz")
    first = fetch(file, locked.space.cache)
    locked.release.files.clear()
    assert fetch(file, locked.space.cache) == first
