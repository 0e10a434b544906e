"""`stack lock`: choose versions, fetch and open what they are, apply the carries, and write down what came out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from moetier_stack.archive import Tree
from moetier_stack.commits import newest_commit
from moetier_stack.definition import Profile, Source
from moetier_stack.errors import Problems, StackError
from moetier_stack.index import File, fetch, runs_on, versions
from moetier_stack.lock import (
    Lock,
    Pinned,
    PinnedProfile,
    PinnedSource,
    definition_hash,
    load_lock,
    only_writer,
    save_lock,
)
from moetier_stack.resolve import pins, requirements_of, resolve
from moetier_stack.wheel import wheel_metadata
from moetier_stack.workspace import Workspace, patch_hash, profile_tags, wheel_index

Say = Callable[[str], None]


@dataclass(frozen=True)
class Update:
    """Update of one project: the newest version in range, or this one."""

    project: str
    version: Version | None = None

    @classmethod
    def parse(cls, text: str) -> Update:
        name, equals, version = text.partition("=")
        try:
            return cls(canonicalize_name(name), Version(version.lstrip("=")) if equals else None)
        except InvalidVersion:
            raise StackError(f"--update {text}: expected PROJECT or PROJECT=VERSION, such as vllm=0.32.0") from None


def relock(space: Workspace, updates: tuple[Update, ...], say: Say) -> Lock:
    """Write stack.lock anew and return it; nothing is written unless everything worked out.

    What is locked stays as it is, except where an update or a changed stack.toml asks for another. `say` gets a line
    for every change, and for what became invalid by it.
    """
    with only_writer(space.folder):
        old = load_lock(space.lock_path) if space.lock_path.exists() else None
        for update in updates:
            if update.project not in {source.project for source in space.definition.sources.values()}:
                known = ", ".join(sorted(source.project for source in space.definition.sources.values()))
                raise StackError(f"--update {update.project}: no source is of that project; known: {known}")
        new = _locked(space, {update.project: update for update in updates}, old, say)
        if old != new:
            _say_changes(old, new, say)
            save_lock(space.lock_path, new)
    return new


def record_image(space: Workspace, profile: str, digest: str) -> Lock:
    """Note the digest of the image that was published of the lock as it is."""
    with only_writer(space.folder):
        lock = load_lock(space.lock_path)
        space.definition.profile(profile)
        lock.profile(profile)
        values = lock.model_dump(mode="json")
        values["profiles"][profile]["image"] = digest
        new = Lock.model_validate(values)
        save_lock(space.lock_path, new)
    return new


def _locked(space: Workspace, updates: Mapping[str, Update], old: Lock | None, say: Say) -> Lock:
    definition, problems = space.definition, Problems()
    sources: dict[str, PinnedSource] = {}
    trees: dict[str, Tree] = {}
    for name, source in definition.sources.items():
        with problems.collecting():
            before = old.sources.get(name) if old else None
            sources[name] = _source(space, name, source, updates.get(source.project), before, say)
            trees[name] = space.source_tree(source, sources[name])
    profiles: dict[str, PinnedProfile] = {}
    for name, profile in definition.profiles.items():
        if profile.source in trees:
            with problems.collecting():
                known = old.profiles.get(name) if old else None
                profiles[name] = _profile(space, name, sources[profile.source], trees[profile.source], known, say)
    carries = {}
    for carry in definition.carries:
        with problems.collecting():
            space.patch(carry.id)
            carries[carry.id] = patch_hash(space.patch_bytes(carry.id))
    problems.raise_any()
    lock = Lock(definition=definition_hash(definition), sources=sources, carries=carries, profiles=profiles)
    return _with_images(lock, old)


def _with_images(lock: Lock, old: Lock | None) -> Lock:
    """Digests of images hold for one lock only: kept if nothing else changed."""
    if old is None or old.hash() != lock.hash():
        return lock
    return old


def _source(
    space: Workspace, name: str, source: Source, update: Update | None, before: PinnedSource | None, say: Say
) -> PinnedSource:
    wheels = {p.wheel for p in space.definition.profiles.values() if p.source == name} or {source.project}
    same_kind = before is not None and (before.commit is None) == (not source.git)
    if before is not None and same_kind and update is None and Version(before.version) in _range(source.range):
        return before
    if source.git:
        python = next((p.python for p in space.definition.profiles.values() if p.source == name), "3.11")
        commit, file = newest_commit(source, min(wheels), python, space.cache)
        unpinned = PinnedSource(version=str(file.version), commit=commit, tree="0" * 64)
        tree = space.source_tree(source, unpinned)
        return unpinned.model_copy(update={"tree": tree.hash()})
    version = _choose(space, name, source, update, wheels)
    file = space.sdist_file(source, version)
    say(f"{source.project}: {version}")
    tree = space.tree(fetch(file, space.cache))
    return PinnedSource(version=str(version), sdist=_pinned(file), tree=tree.hash())


def _choose(space: Workspace, name: str, source: Source, update: Update | None, wheels: set[str]) -> Version:
    """The newest version in range of which there is an sdist and every profile's wheel."""
    index = space.index(source.index)
    wanted = _range(source.range)
    found = set(versions(index.files(source.project), lambda file: file.tags is None, wanted))
    for profile in (p for p in space.definition.profiles.values() if p.source == name):
        fits = [file for file in index.files(profile.wheel) if file.tags is not None and _fits(file, profile)]
        found &= set(versions(fits, lambda _: True, wanted))
    if update and update.version:
        if update.version not in found:
            raise StackError(
                f"{source.project}: {update.version} is not in {source.range}, or has no sdist or no wheel of "
                f"{', '.join(sorted(wheels))}; there are {', '.join(map(str, sorted(found))) or 'none'}"
            )
        return update.version
    if not found:
        raise StackError(
            f"{source.project}: no version in {source.range} has an sdist and a wheel of {', '.join(sorted(wheels))}"
        )
    return max(found)


def _profile(
    space: Workspace, name: str, source: PinnedSource, tree: Tree, before: PinnedProfile | None, say: Say
) -> PinnedProfile:
    profile = space.definition.profiles[name]
    where = space.definition.sources[profile.source]
    address = wheel_index(where, source.commit)
    version = Version(source.version)
    if before and before.wheel.project == profile.wheel and Version(before.wheel.version) == version:
        pinned = before.wheel
    else:
        fits = [f for f in space.index(address).files(profile.wheel) if f.version == version and _fits(f, profile)]
        if not fits:
            raise StackError(f"profile {name}: no wheel of {profile.wheel} {version} for {profile.platform}")
        pinned = _pinned(fits[0])
    path = space.archive(pinned, address)
    wheel = space.tree(path)
    problems = Problems()
    source_tree = wheel_tree = ""
    with problems.collecting():
        source_tree = tree.replaced(space.patched_source(name, tree)).hash()
    with problems.collecting():
        wheel_tree = wheel.replaced(space.patched_wheel(name, wheel)).hash()
    problems.raise_any()
    asked = requirements_of(wheel_metadata(path), profile)
    kept = {**pins(before.requirements if before else ()), **space.constraints(profile)}
    say(f"{name}: {len(asked)} requirements are resolved for Python {profile.python} on {profile.platform}")
    return PinnedProfile(
        wheel=pinned,
        base=profile.base,
        requirements=tuple(resolve(asked, profile, where.index, kept)),
        source_tree=source_tree,
        wheel_tree=wheel_tree,
    )


def _fits(file: File, profile: Profile) -> bool:
    """Whether a wheel installs on the profile's Python and platform."""
    minor, machine = profile_tags(profile)
    number = profile.python.replace(".", "")
    for tag in file.tags or ():
        python = tag.interpreter in {f"cp{number}", "py3"} or (tag.abi == "abi3" and tag.interpreter.startswith("cp3"))
        platform = tag.platform.removeprefix("manylinux_2_").partition("_")
        here = platform[2] == machine and platform[0].isdecimal() and int(platform[0]) <= int(minor)
        if python and (here or tag.platform == "any"):
            return runs_on(file, profile.python)
    return False


def _range(text: str) -> SpecifierSet:
    return SpecifierSet(text)


def _pinned(file: File) -> Pinned:
    return Pinned(project=file.project, version=str(file.version), filename=file.filename, sha256=file.sha256)


def _say_changes(old: Lock | None, new: Lock, say: Say) -> None:
    """Say what moved, and what depends on it and is therefore not valid any more."""
    if old is None:
        return
    for name, source in new.sources.items():
        before = old.sources.get(name)
        if before != source:
            say(f"source {name}: {before.version if before else 'new'} -> {source.version}")
    for name, profile in new.profiles.items():
        was = old.profiles.get(name)
        if was is None:
            continue
        changed = [
            what
            for what in ("wheel", "base", "requirements", "source_tree", "wheel_tree")
            if getattr(was, what) != getattr(profile, what)
        ]
        if changed:
            say(f"profile {name}: {', '.join(changed)} changed")
    stale = [name for name, was in old.profiles.items() if was.image]
    if stale:
        say(f"invalid now, to be published anew: images of {', '.join(stale)}")
    if old.hash() != new.hash():
        say(f"invalid now: wheels and caches of lock {old.hash()[:16]}, of every profile; it is {new.hash()[:16]} now")
