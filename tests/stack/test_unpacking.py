"""What an archive brings runs nothing and leads nowhere: git's own folder, links, devices, names, bombs."""

from __future__ import annotations

import gzip
import io
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.version import Version

from moetier_stack import archive
from moetier_stack.archive import read_tree
from moetier_stack.errors import StackError
from moetier_stack.git import git, init, write_files
from moetier_stack.rebase import prepare_rebase, unpack_sdist
from tests.stack.project import FILES, POLITE, Demo

HOOK = "#!/bin/sh\ntouch {mark}\n"


def sdist(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    """An sdist with one good file and these members."""
    good = tarfile.TarInfo("demo-1.0/demo/__init__.py")
    with tarfile.open(path, "w:gz") as out:
        for info, data in ((good, b"x = 1\n"), *members):
            info.size = len(data)
            out.addfile(info, io.BytesIO(data))
    return path


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o755) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, link, mode
    return info


@pytest.mark.parametrize(
    "name",
    [".git/hooks/pre-commit", ".git", ".GIT/config", "demo/.git/config", "vendored/.Git", ".git ./config",
     "git~1/config", ".g\u200cit/hooks/pre-commit", ".git::$INDEX_ALLOCATION/config",
     "../x", "a/../../x", "/etc/x", "a/./b"],
)  # fmt: skip
def test_a_name_that_leads_elsewhere_or_into_git_is_refused(name: str, tmp_path: Path) -> None:
    path = sdist(tmp_path / "demo-1.0.tar.gz", (member(f"demo-1.0/{name}"), b"x"))
    wheel = tmp_path / "demo-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as out:
        out.writestr(name, b"x")
    (tmp_path / "work").mkdir()
    for act in (
        lambda: read_tree(path), lambda: unpack_sdist(path, tmp_path / "work"), lambda: read_tree(wheel),
        lambda: write_files(tmp_path / "work", {name: b"x"}),
    ):  # fmt: skip
        with pytest.raises(
            StackError, match=r"leads out of the tree or is odd; |git would run; (the index offers it so|do not use)"
        ):
            act()
    assert {file.name for file in (tmp_path / "work").rglob("*") if file.is_file()} <= {"__init__.py"}


@pytest.mark.parametrize(
    "name", [".gitignore", ".gitattributes", ".github/workflows/x.yml", "demo/git.py", "gitlike/.git.md"]
)
def test_a_name_that_only_looks_like_it_is_unpacked(name: str, tmp_path: Path) -> None:
    path = sdist(tmp_path / "demo-1.0.tar.gz", (member(f"demo-1.0/{name}"), b"x"))
    unpack_sdist(path, tmp_path / "work")
    assert (tmp_path / "work" / name).read_bytes() == b"x"
    assert name in read_tree(path).digests


@pytest.mark.parametrize(
    ("kind", "link"),
    [(tarfile.SYMTYPE, "/etc/passwd"), (tarfile.LNKTYPE, "demo-1.0/demo/__init__.py"), (tarfile.FIFOTYPE, ""),
     (tarfile.CHRTYPE, ""), (tarfile.BLKTYPE, "")],
    ids=["symlink", "hardlink", "fifo", "character-device", "block-device"],
)  # fmt: skip
def test_what_is_no_file_is_refused(kind: bytes, link: str, tmp_path: Path) -> None:
    path = sdist(tmp_path / "demo-1.0.tar.gz", (member("demo-1.0/demo/odd", kind, link), b""))
    for act in (lambda: read_tree(path), lambda: unpack_sdist(path, tmp_path / "work")):
        with pytest.raises(StackError, match="demo/odd is no regular file"):
            act()
    assert not (tmp_path / "work/demo/odd").exists()


def test_a_link_in_a_wheel_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "demo-1.0-py3-none-any.whl"
    link = zipfile.ZipInfo("demo/odd")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(wheel, "w") as out:
        out.writestr(link, b"/etc/passwd")
    with pytest.raises(StackError, match="demo/odd is no regular file"):
        read_tree(wheel)


def test_an_archive_that_grows_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "LARGEST_SDIST", 1 << 20)
    monkeypatch.setattr(archive, "LARGEST_WHEEL", 1 << 20)
    long = sdist(tmp_path / "long-1.0.tar.gz", (member("demo-1.0/zeros"), bytes(2 << 20)))
    header = tarfile.TarInfo("demo-1.0/x")
    header.type, header.size = tarfile.XHDTYPE, 2 << 20  # a header that is the bomb: tarfile holds it in memory
    (tmp_path / "header-1.0.tar.gz").write_bytes(gzip.compress(header.tobuf() + bytes(2 << 20)))
    wheel = tmp_path / "demo-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as out:
        out.writestr("demo/zeros", bytes(2 << 20))
    for path in (long, tmp_path / "header-1.0.tar.gz", wheel):
        with pytest.raises(StackError, match="unpacked, found more"):
            read_tree(path)


def test_one_name_twice_is_refused(tmp_path: Path) -> None:
    path = sdist(tmp_path / "demo-1.0.tar.gz", (member("demo-1.0/demo/__init__.py"), b"other"))
    with pytest.raises(StackError, match="is in it twice; the index offers it so"):
        unpack_sdist(path, tmp_path / "work")


def test_a_rebase_onto_such_a_release_runs_nothing_and_leaves_nothing(demo: Demo, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    demo.write(("polite", demo.patch(POLITE)))
    demo.lock()
    demo.release.add("1.1", {**FILES, ".git/hooks/pre-commit": HOOK.format(mark=mark)})
    with pytest.raises(StackError, match="part of a git repository"):
        prepare_rebase(demo.space, "polite", Version("1.1"), tmp_path / "work")
    assert not (tmp_path / "work").exists()
    assert not mark.exists()


@pytest.mark.parametrize("where", ["repository", "template", "global", "environment"])
def test_git_runs_no_program_that_anything_names(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks, a file system monitor, a filter, a signing program: of the repository, of templates, of the user."""
    mark, program = tmp_path / "ran", tmp_path / "program"
    program.write_text(HOOK.format(mark=mark))
    program.chmod(0o755)
    hooks = tmp_path / "template" / "hooks"
    hooks.mkdir(parents=True)
    for name in (
        "pre-commit",
        "post-commit",
        "prepare-commit-msg",
        "commit-msg",
        "post-index-change",
        "applypatch-msg",
    ):
        (hooks / name).write_text(HOOK.format(mark=mark))
        (hooks / name).chmod(0o755)
    settings = (
        f"[core]\n\tfsmonitor = {program}\n\thooksPath = {hooks}\n\teditor = {program}\n\tpager = {program}\n"
        f"[commit]\n\tgpgSign = true\n[gpg]\n\tprogram = {program}\n[log]\n\tshowSignature = true\n"
        f'[init]\n\ttemplateDir = {tmp_path / "template"}\n[filter "x"]\n\tclean = {program}\n\tsmudge = {program}\n'
    )
    if where == "template":
        monkeypatch.setenv("GIT_TEMPLATE_DIR", str(tmp_path / "template"))
    if where == "environment":
        other = tmp_path / "other"
        git(tmp_path, "init", "--quiet", "--template=", str(other))
        (other / ".git" / "config").write_text(settings)
        monkeypatch.setenv("GIT_DIR", str(other / ".git"))
        monkeypatch.setenv("GIT_EXTERNAL_DIFF", str(program))
        monkeypatch.setenv("GIT_EDITOR", str(program))
    if where == "global":
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
        (tmp_path / ".gitconfig").write_text(settings)
    work = tmp_path / "work"
    init(work)
    if where == "repository":
        with (work / ".git" / "config").open("a") as file:
            file.write(settings)
    write_files(work, {"a": b"1\n", ".gitattributes": b"* filter=x\n"})
    git(work, "add", "--all", "--force")
    git(work, "commit", "--quiet", "-m", "one")
    git(work, "log", "-p")
    git(work, "status")
    assert git(work, "rev-list", "--count", "HEAD").stdout == b"1\n"
    assert not mark.exists()
