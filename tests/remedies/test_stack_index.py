"""What an index, its files and the cache have wrong, and what the messages tell to do about it, done."""

from __future__ import annotations

import gzip
import hashlib
import io
import resource
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moetier_stack.git import git
from moetier_stack.index import LARGEST_PAGE
from moetier_stack.relock import relock
from tests.remedies.stacks import in_cache, lock_and_verify, shifted, stack
from tests.remedies.trouble import Trouble
from tests.stack.project import FILES, POLITE, Demo, Release, sdist_bytes, serving, wheel_bytes

remedy = pytest.mark.remedy
Step = Callable[[Demo], object]
WHEEL, SDIST = "demo-1.1-py3-none-any.whl", "demo-1.1.tar.gz"


def _wheel(change: Callable[[zipfile.ZipFile], None]) -> bytes:
    """The wheel of 1.1 with members added, in spite of its RECORD."""
    out = io.BytesIO(wheel_bytes("1.1", FILES))
    with zipfile.ZipFile(out, "a") as archive:
        change(archive)
    return out.getvalue()


def _linked() -> bytes:
    """An sdist with a link in it."""
    out = io.BytesIO(gzip.decompress(sdist_bytes("1.1", FILES)))
    with tarfile.open(fileobj=out, mode="a") as archive:
        member = tarfile.TarInfo("demo-1.1/link")
        member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(member)
    return gzip.compress(out.getvalue())


BAD_FILES = {
    "no-archive": (SDIST, b"no archive"),
    "cut-short": (WHEEL, wheel_bytes("1.1", FILES)[:-200]),
    "empty": (SDIST, gzip.compress(b"\0" * 10240)),
    "a-link": (SDIST, _linked()),
    "leads-out": (WHEEL, wheel_bytes("1.1", {**FILES, "../evil.py": "1\n"})),
    "another-version": (WHEEL, wheel_bytes("1.0", FILES)),
    "not-as-recorded": (WHEEL, _wheel(lambda archive: archive.writestr("demo/more.py", "1\n"))),
    "no-metadata": (WHEEL, _wheel(lambda archive: archive.writestr("other-1.dist-info/X", "1\n"))),
}


@pytest.mark.parametrize(("name", "data"), BAD_FILES.values(), ids=BAD_FILES)
@remedy("moetier_stack/archive.py", "choose another version")
def test_a_release_that_cannot_be_used(trouble: Trouble, demo: Demo, name: str, data: bytes) -> None:
    demo.write()
    demo.release.add("1.1", FILES)
    demo.release.files[name] = data
    with trouble:
        lock_and_verify(demo)
    stack(demo, "lock", "--update", "demo=1.0")
    lock_and_verify(demo)
    trouble.gone()


@contextmanager
def _largest_file(size: int) -> Iterator[None]:
    """Let this process write files of `size` bytes at most."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def _at(address: Callable[[Demo], str]) -> Step:
    """Write another index's address into stack.toml."""
    return lambda demo: demo.edit_toml(demo.index, address(demo))


def _corrected(demo: Demo) -> None:
    path = demo.folder / "stack" / "stack.toml"
    lines = [f'index = "{demo.index}"' if x.startswith("index =") else x for x in path.read_text().split("\n")]
    path.write_text("\n".join(lines))


def _page(data: bytes) -> Step:
    """Put a page of the project at another index of the same server."""

    def damage(demo: Demo) -> None:
        demo.release.pages["/other/demo/"] = data
        demo.edit_toml(demo.index, demo.index.replace("/simple/", "/other/"))

    return damage


BAD_INDEXES = {
    "not-html": (_page(b"\0" * (LARGEST_PAGE + 1)), ()),
    "not-there": (
        _at(lambda demo: demo.index.replace("/simple/", "/nothing/")),
        [remedy("moetier_stack/index.py", "the index answers")],
    ),
    "not-reachable": (_at(lambda _: "http://127.0.0.1:9/"), [remedy("moetier_stack/index.py", "cannot be reached")]),
    "no-scheme": (_at(lambda _: "ftp://index/"), ()),
}


@pytest.mark.parametrize(
    ("damage"), [pytest.param(damage, marks=marks, id=name) for name, (damage, marks) in BAD_INDEXES.items()]
)
@remedy("moetier_stack/index.py", "correct the index")
def test_an_index_is_corrected(trouble: Trouble, demo: Demo, damage: Step) -> None:
    demo.write()
    damage(demo)
    with trouble:
        lock_and_verify(demo)
    _corrected(demo)
    lock_and_verify(demo)
    trouble.gone()


@remedy("moetier_stack/index.py", "correct the index")
def test_pips_index_is_corrected(trouble: Trouble, demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    demo.write()
    demo.edit_toml(f'index = "{demo.index}"', "")
    monkeypatch.setenv("PIP_INDEX_URL", "ftp://index/")
    with trouble:
        lock_and_verify(demo)
    monkeypatch.setenv("PIP_INDEX_URL", demo.index)
    lock_and_verify(demo)
    trouble.gone()


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize("suffix", [".whl", ".tar.gz"])
@remedy("moetier_stack/index.py", "delete it, it is fetched again")
def test_a_file_of_the_cache_is_fetched_again(trouble: Trouble, demo: Demo, suffix: str) -> None:
    demo.write()
    stack(demo, "lock")
    _cut(in_cache(demo, suffix))
    with trouble:
        stack(demo, "verify")
    in_cache(demo, suffix).unlink()
    stack(demo, "verify")
    trouble.gone()


@remedy("moetier_stack/index.py", "nothing was kept; try again")
def test_a_download_with_another_hash(trouble: Trouble, demo: Demo) -> None:
    demo.write()
    demo.release.said["demo-1.0-py3-none-any.whl"] = "0" * 64
    with trouble:
        stack(demo, "lock")
    demo.release.said.clear()
    lock_and_verify(demo)
    trouble.gone()


@remedy("moetier_stack/index.py", "the download broke off")
def test_a_download_without_room(trouble: Trouble, demo: Demo) -> None:
    demo.write()
    with _largest_file(100), trouble:
        stack(demo, "lock")
    lock_and_verify(demo)
    trouble.gone()


@remedy("moetier_stack/index.py", "run again without --offline")
def test_a_lock_offline(trouble: Trouble, demo: Demo) -> None:
    demo.write()
    space = demo.space
    space.offline = True
    with trouble:
        relock(space, (), print)
    relock(demo.space, (), print)
    trouble.gone()


@remedy("moetier_stack/workspace.py", "run once without --offline")
def test_an_empty_cache_offline(trouble: Trouble, demo: Demo) -> None:
    demo.write()
    stack(demo, "lock")
    in_cache(demo, ".whl").unlink()
    with trouble:
        stack(demo, "verify", "--offline")
    stack(demo, "verify")
    stack(demo, "verify", "--offline")
    trouble.gone()


@pytest.mark.parametrize("remedied", ["put-there", "moved"])
@remedy("moetier_stack/workspace.py", "the index does not offer it any more")
def test_a_file_that_is_not_offered_any_more(trouble: Trouble, demo: Demo, remedied: str) -> None:
    demo.write()
    stack(demo, "lock")
    path = in_cache(demo, ".tar.gz")
    data = path.read_bytes()
    path.unlink()
    del demo.release.files["demo-1.0.tar.gz"]
    demo.release.add("1.1", shifted(FILES))
    with trouble:
        stack(demo, "verify")
    if remedied == "moved":
        stack(demo, "lock", "--update", "demo")
    else:
        assert f"put the file at {path}," in trouble.text
        path.write_bytes(data)
    stack(demo, "verify")
    trouble.gone()


@remedy("moetier_stack/workspace.py", "find out why")
def test_a_file_that_changed_under_its_name(trouble: Trouble, demo: Demo) -> None:
    demo.write()
    stack(demo, "lock")
    in_cache(demo, ".tar.gz").unlink()
    demo.release.files["demo-1.0.tar.gz"] = sdist_bytes("1.0", shifted(FILES))
    demo.release.files["demo-1.0-py3-none-any.whl"] = wheel_bytes("1.0", shifted(FILES))
    with trouble:
        stack(demo, "verify")
    stack(demo, "lock", "--update", "demo")
    stack(demo, "verify")
    trouble.gone()


@pytest.fixture
def commits(tmp_path: Path) -> Iterator[Demo]:
    """A stack on the branch `stack` of a git repository, and the wheel of its first commit."""
    release = Release()
    Demo(tmp_path, release, "").patch(POLITE, "upstream")
    repository = tmp_path / "repo-upstream"
    with serving(release) as index:
        demo = Demo(tmp_path, release, index)
        demo.write()
        wheels = f"{index.removesuffix('simple/')}wheels/{{commit}}"
        demo.edit_toml(f'index = "{index}"', f'git = "{repository}"\nbranch = "stack"\nwheel_index = "{wheels}"')
        _publish(demo, git(repository, "rev-parse", "HEAD~1").stdout.decode().strip())
        yield demo


def _publish(demo: Demo, commit: str) -> None:
    name = f"demo-1.0+g{commit[:9]}-py3-none-any.whl"
    demo.release.pages[f"/wheels/{commit}/demo/"] = (
        f'<a href="../../../files/{name.replace("+", "%2B")}#sha256={_sha256(demo, name, commit)}">{name}</a>'.encode()
    )


def _sha256(demo: Demo, name: str, commit: str) -> str:
    data = wheel_bytes(f"1.0+g{commit[:9]}", FILES)
    demo.release.pages[f"/files/{name.replace('+', '%2B')}"] = data
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        pytest.param(
            "/wheels/", "/weels/", marks=remedy("moetier_stack/commits.py", "none of the last"), id="wheel-index"
        ),
        pytest.param(">=1,<2", ">=2,<3", marks=remedy("moetier_stack/commits.py", "none of the last"), id="range"),
        pytest.param(
            "repo-upstream", "repo-x", marks=remedy("moetier_stack/commits.py", "cannot be fetched"), id="git"
        ),
        pytest.param(
            'h = "stack"', 'h = "main"', marks=remedy("moetier_stack/commits.py", "cannot be fetched"), id="branch"
        ),
    ],
)
def test_a_git_source_is_corrected(trouble: Trouble, commits: Demo, right: str, wrong: str) -> None:
    commits.edit_toml(right, wrong)
    with trouble:
        stack(commits, "lock")
    commits.edit_toml(wrong, right)
    lock_and_verify(commits)
    trouble.gone()


def _forget(demo: Demo) -> None:
    """Take the cache of commits away."""
    (demo.folder / "cache" / "git").rename(demo.folder / "old-git")


@remedy("moetier_stack/commits.py", "run once without --offline")
def test_a_commit_that_is_not_in_the_cache(trouble: Trouble, commits: Demo) -> None:
    stack(commits, "lock")
    _forget(commits)
    with trouble:
        stack(commits, "verify", "--offline")
    stack(commits, "verify")
    stack(commits, "verify", "--offline")
    trouble.gone()


@remedy("moetier_stack/commits.py", "is not on {} any more")
def test_a_commit_that_is_gone(trouble: Trouble, commits: Demo) -> None:
    stack(commits, "lock")
    repository = commits.folder / "repo-upstream"
    git(repository, "checkout", "--quiet", "--orphan", "anew")
    git(repository, "commit", "--quiet", "-m", "written anew")
    git(repository, "branch", "--quiet", "-M", "anew", "stack")
    git(repository, "reflog", "expire", "--expire=now", "--all")
    git(repository, "gc", "--quiet", "--prune=now")
    _publish(commits, git(repository, "rev-parse", "HEAD").stdout.decode().strip())
    _forget(commits)
    with trouble:
        stack(commits, "verify")
    stack(commits, "lock", "--update", "demo")
    stack(commits, "verify")
    trouble.gone()
