"""The folder of a stack: its files read once, its archives fetched into the cache and opened."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import Version

from moetier.folders import cache_home
from moetier_stack.archive import Tree, read_tree
from moetier_stack.commits import commit_tree
from moetier_stack.definition import Definition, Profile, Source, load_definition
from moetier_stack.errors import Problems, StackError
from moetier_stack.index import File, Index, checked, fetch
from moetier_stack.lock import Lock, Pinned, PinnedSource, load_lock
from moetier_stack.patch import Patch, apply_patches, read_patch

LARGEST_PATCH = 4 << 20


def default_cache() -> Path:
    """Where fetched archives are kept, by the XDG convention."""
    return cache_home() / "moetier" / "stack"


@dataclass
class Workspace:
    """A stack's folder (with stack.toml, stack.lock and carries/), the cache, and whether the network may be used."""

    folder: Path
    cache: Path = field(default_factory=default_cache)
    offline: bool = False
    _indexes: dict[str, Index] = field(default_factory=dict)
    _trees: dict[str, Tree] = field(default_factory=dict)

    @cached_property
    def definition(self) -> Definition:
        return load_definition(self.folder / "stack.toml")

    @cached_property
    def lock(self) -> Lock:
        return load_lock(self.lock_path)

    @property
    def lock_path(self) -> Path:
        return self.folder / "stack.lock"

    def index(self, address: str) -> Index:
        return self._indexes.setdefault(address, Index(address, self.offline))

    def patch_bytes(self, carry: str) -> bytes:
        """The bytes of a carry's patch."""
        path = self.folder / "carries" / self.definition.carry(carry).target / f"{carry}.patch"
        try:
            with path.open("rb") as file:
                data = file.read(LARGEST_PATCH + 1)
        except OSError as error:
            raise StackError(f"carry {carry}: {path} cannot be read ({error.strerror}); put its patch there") from None
        if len(data) > LARGEST_PATCH:
            raise StackError(f"carry {carry}: {path} has more than {LARGEST_PATCH:,} bytes; make several carries of it")
        return data

    def patch(self, carry: str) -> Patch:
        return read_patch(carry, self.patch_bytes(carry))

    def patches(self, profile: str, scope: str | None = None) -> list[Patch]:
        """A profile's patches in order; CollectedError with the faults of all of them."""
        problems, found = Problems(), []
        for carry in self.definition.carries_of(profile, scope):
            with problems.collecting():
                found.append(self.patch(carry.id))
        problems.raise_any()
        return found

    def stray_patches(self) -> list[Path]:
        """Patches that no carry of stack.toml names."""
        known = {self.folder / "carries" / c.target / f"{c.id}.patch" for c in self.definition.carries}
        return sorted(set((self.folder / "carries").rglob("*")) - known - set((self.folder / "carries").glob("*")))

    def archive(self, pinned: Pinned, index: str) -> Path:
        """A locked file from the cache, else from the index; StackError unless its bytes are the locked ones."""
        path = self.cache / pinned.sha256 / pinned.filename
        if path.is_file():
            return checked(path, pinned.sha256)
        if self.offline:
            raise StackError(f"{pinned.filename} is not in the cache {self.cache}; run once without --offline")
        offered = self.index(index).named(pinned.project, pinned.filename)
        if offered is None:
            raise StackError(
                f"{pinned.filename}: the index does not offer it any more; put the file at {path}, or let its project "
                "move: `moetier stack lock --update PROJECT`"
            )
        if offered.sha256 != pinned.sha256:
            raise StackError(
                f"{pinned.filename}: locked with sha256 {pinned.sha256}, the index now offers {offered.sha256} under "
                "that name; find out why, then run `moetier stack lock --update PROJECT`"
            )
        return fetch(offered, self.cache)

    def tree(self, path: Path) -> Tree:
        """The files of an archive of the cache, read once."""
        key = str(path)
        if key not in self._trees:
            self._trees[key] = read_tree(path)
        return self._trees[key]

    def source_tree(self, source: Source, pinned: PinnedSource) -> Tree:
        """The unpatched sources that the lock pins."""
        if pinned.commit is not None:
            key = f"{source.git}@{pinned.commit}"
            if key not in self._trees:
                self._trees[key] = commit_tree(source, pinned.commit, self.cache, self.offline)
            return self._trees[key]
        assert pinned.sdist is not None, "a source is an sdist or a commit"
        return self.tree(self.archive(pinned.sdist, source.index))

    def pinned_tree(self, source: str) -> Tree:
        if source not in self.lock.sources:
            raise StackError(f"source {source} is not locked; run `moetier stack lock`")
        return self.source_tree(self.definition.sources[source], self.lock.sources[source])

    def wheel(self, profile: str) -> Path:
        """The unpatched wheel of a profile."""
        wheel = self.lock.profile(profile).wheel
        source, pinned = self.source_of(profile), self.lock.sources.get(self.definition.profile(profile).source)
        return self.archive(wheel, wheel_index(source, pinned.commit if pinned else None))

    def constraints(self, profile: Profile) -> dict[str, str]:
        """Versions that the locked requirements files of a profile pin."""
        found: dict[str, str] = {}
        for name in profile.constraints:
            path = self.folder / name
            if not path.is_file():
                raise StackError(f"constraints {name}: there is no {path}; correct it in stack.toml")
            lines = re.findall(r"^([A-Za-z0-9._-]+)==([^ ;\\\n]+)", path.read_text(), re.MULTILINE)
            found |= {canonicalize_name(project): version for project, version in lines}
        return found

    def source_of(self, profile: str) -> Source:
        return self.definition.sources[self.definition.profile(profile).source]

    def patched_source(self, profile: str, pinned: Tree) -> dict[str, bytes | None]:
        """Files that a profile's carries change in the source tree."""
        return apply_patches(self.patches(profile), pinned.texts, pinned.name)

    def patched_wheel(self, profile: str, wheel: Tree) -> dict[str, bytes | None]:
        """Files that a profile's runtime carries change in the wheel: none where it is built from source instead."""
        if self.definition.profile(profile).build == "source":
            return {}
        return apply_patches(self.patches(profile, "runtime"), wheel.texts, wheel.name)

    def release_tree(self, source: Source, version: Version) -> Tree:
        """The sdist of another version."""
        return read_tree(fetch(self.sdist_file(source, version), self.cache))

    def sdist_file(self, source: Source, version: Version) -> File:
        files = self.index(source.index).files(source.project)
        for file in files:
            if file.tags is None and file.version == version:
                return file
        known = sorted({file.version for file in files if file.tags is None})[-6:]
        raise StackError(
            f"{source.project}: the index has no sdist of {version}; the last ones are {', '.join(map(str, known))}"
        )


def wheel_index(source: Source, commit: str | None) -> str:
    """The index that has a source's wheels."""
    return source.wheel_index.replace("{commit}", commit) if commit else source.index


def patch_hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def profile_tags(profile: Profile) -> tuple[str, str]:
    """(glibc minor, machine) of a profile's platform."""
    _, _, minor, machine = profile.platform.split("_", 3)
    return minor, machine
