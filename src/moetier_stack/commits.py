"""Sources that are commits of a git branch: the newest first-parent commit of which a wheel is published."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

from packaging.specifiers import SpecifierSet

from moetier_stack.archive import TEXT_LIMIT, Tree
from moetier_stack.definition import Source
from moetier_stack.errors import StackError
from moetier_stack.git import git
from moetier_stack.index import File, Index, runs_on

LOOKED_AT = 100


def newest_commit(source: Source, wheel: str, python: str, cache: Path) -> tuple[str, File]:
    """(commit, its wheel): the newest of the last `LOOKED_AT` first-parent commits that has a wheel in range."""
    mirror = _mirror(source.git, source.branch, cache, offline=False)
    log = git(mirror, "rev-list", "--first-parent", f"--max-count={LOOKED_AT}", "FETCH_HEAD").stdout.decode().split()
    wanted = SpecifierSet(source.range, prereleases=True)
    for commit in log:
        try:
            files = Index(source.wheel_index.replace("{commit}", commit)).files(wheel)
        except StackError:
            continue  # no page: no wheel was published of this commit
        for file in files:
            if file.tags is not None and file.version in wanted and runs_on(file, python):
                return commit, file
    raise StackError(
        f"{source.git}: none of the last {len(log)} commits of {source.branch} has a wheel of {wheel} in "
        f"{source.range}; correct wheel_index or range in stack.toml"
    )


def commit_tree(source: Source, commit: str, cache: Path, offline: bool) -> Tree:
    """The files of a commit, as git has them."""
    mirror = _mirror(source.git, source.branch, cache, offline)
    done = git(mirror, "archive", "--format=tar", commit, check=False)
    if done.returncode:
        if offline:
            raise StackError(f"{source.git}: commit {commit} is not in the cache {cache}; run once without --offline")
        raise StackError(
            f"{source.git}: commit {commit} is not on {source.branch} any more; "
            f"run `moetier stack lock --update {source.project}`"
        )
    digests, texts = {}, {}
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        for member in archive:
            if file := archive.extractfile(member) if member.isreg() else None:
                content = file.read()
                digests[member.name] = hashlib.sha256(content).hexdigest()
                if len(content) <= TEXT_LIMIT:
                    texts[member.name] = content
    return Tree(f"{source.git}@{commit[:12]}", digests, texts)


def _mirror(repository: str, branch: str, cache: Path, offline: bool) -> Path:
    """A bare repository in the cache with the branch's newest commit as FETCH_HEAD."""
    mirror = cache / "git" / hashlib.sha256(repository.encode()).hexdigest()
    if not (mirror / "HEAD").exists():
        mirror.mkdir(parents=True, exist_ok=True)
        git(mirror, "init", "--quiet", "--bare", "--template=")
    if not offline:
        done = git(
            mirror,
            "fetch",
            "--quiet",
            "--no-tags",
            repository,
            f"+refs/heads/{branch}:refs/heads/{branch}",
            check=False,
        )
        if done.returncode:
            words = done.stderr.decode(errors="replace").strip()[-500:]
            raise StackError(
                f"{repository}: branch {branch} cannot be fetched ({words}); correct git and branch in stack.toml"
            )
    return mirror
