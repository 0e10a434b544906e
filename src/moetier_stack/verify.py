"""`stack verify`: everything that can be wrong with a stack, all of it in one run."""

from __future__ import annotations

import fnmatch
import importlib.metadata
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from moetier_stack.archive import LOCK_ANOTHER, Tree
from moetier_stack.errors import Problems, StackError
from moetier_stack.git import applies, write_files
from moetier_stack.lock import RELOCK, PinnedProfile, definition_hash
from moetier_stack.patch import scope_problems
from moetier_stack.wheel import check_wheel, extract
from moetier_stack.workspace import Workspace, patch_hash

IMPORT_SECONDS = 300


@dataclass(frozen=True)
class Skipped:
    """A check that could not run here, and why."""

    check: str
    reason: str


def verify(space: Workspace, say: Callable[[str], None] = lambda _: None) -> list[Skipped]:
    """CollectedError with all that is wrong; else the checks that could not run here."""
    problems = Problems()
    for part in (lambda: space.definition, lambda: space.lock):
        with problems.collecting():
            part()
    problems.raise_any()
    if space.lock.definition != definition_hash(space.definition):
        problems.add(f"{space.folder / 'stack.toml'} was changed since it was locked; {RELOCK}")
    say("carries")
    _check_carries(space, problems)
    trees: dict[str, Tree] = {}
    for name in space.definition.sources:
        say(f"source {name}")
        with problems.collecting():
            trees[name] = _check_source(space, name)
    skipped: list[Skipped] = []
    for name, profile in space.definition.profiles.items():
        say(f"profile {name}")
        pinned = space.lock.profiles.get(name)
        if pinned is None:
            problems.add(f"profile {name} is not locked; {RELOCK}")
        elif profile.source in trees:
            with problems.collecting():
                skipped += _check_profile(space, name, pinned, trees[profile.source], problems)
    for name in sorted(set(space.lock.profiles) - set(space.definition.profiles)):
        problems.add(f"profile {name} is locked and not in stack.toml; {RELOCK}")
    problems.raise_any()
    return skipped


def _check_carries(space: Workspace, problems: Problems) -> None:
    for path in space.stray_patches():
        problems.add(f"{path}: no carry of stack.toml names it; add the carry, or remove the file")
    for carry in space.definition.carries:
        with problems.collecting():
            data = space.patch_bytes(carry.id)
            if space.lock.carries.get(carry.id) != patch_hash(data):
                problems.add(f"carry {carry.id}: its patch is not the locked one; {RELOCK}")
            patch = space.patch(carry.id)
            profiles = [p for p in space.definition.profiles.values() if carry.id in p.carries]
            from_source = bool(profiles) and all(profile.build == "source" for profile in profiles)
            package = space.definition.sources[carry.target].package
            for text in scope_problems(patch, carry.scope, package, from_source):
                problems.add(text)


def _check_source(space: Workspace, name: str) -> Tree:
    source, pinned = space.definition.sources[name], space.lock.sources.get(name)
    if pinned is None:
        raise StackError(f"source {name} is not locked; {RELOCK}")
    if Version(pinned.version) not in SpecifierSet(source.range, prereleases=True):
        raise StackError(f"source {name}: {pinned.version} is locked, the range is {source.range}; {RELOCK}")
    tree = space.source_tree(source, pinned)
    if tree.hash() != pinned.tree:
        raise StackError(
            f"source {name}: its tree is {tree.hash()}, the lock says {pinned.tree}; "
            f"run `moetier stack lock --update {source.project}`"
        )
    metadata = tree.texts.get("PKG-INFO", b"").decode(errors="replace")
    said = next((line.split()[1] for line in metadata.split("\n") if line.startswith("Version: ")), pinned.version)
    if Version(said) != Version(pinned.version):
        raise StackError(f"source {name}: {tree.name} says it is version {said}; {LOCK_ANOTHER}")
    return tree


def _check_profile(
    space: Workspace, name: str, pinned: PinnedProfile, source: Tree, problems: Problems
) -> list[Skipped]:
    profile = space.definition.profiles[name]
    version = space.lock.sources[profile.source].version
    if Version(pinned.wheel.version).public != Version(version).public or pinned.wheel.project != profile.wheel:
        problems.add(f"profile {name}: the wheel is {pinned.wheel.filename}, the source {version}; {RELOCK}")
    if pinned.base != profile.base:
        problems.add(f"profile {name}: the base image is not the locked one; {RELOCK}")
    _check_requirements(name, space, pinned, problems)
    path = space.wheel(name)
    wheel = space.tree(path)
    with problems.collecting():
        check_wheel(path, wheel)
    _check_absent(name, space, pinned, wheel, problems)
    with problems.collecting():
        changed = space.patched_source(name, source)
        found = source.replaced(changed).hash()
        _check_tree(f"profile {name}: the patched source", found, pinned.source_tree, problems)
        _git_agrees(space, name, source, problems)
        if profile.build == "source" and _check_compiles(name, changed, problems):
            return [
                Skipped(f"import of the patched package, profile {name}", "it is built from source, by `stack wheel`")
            ]
    with problems.collecting():
        changed = space.patched_wheel(name, wheel)
        found = wheel.replaced(changed).hash()
        _check_tree(f"profile {name}: the patched wheel", found, pinned.wheel_tree, problems)
        for file in changed:
            if source.digests.get(file) != wheel.digests.get(file):
                problems.add(f"profile {name}: {file} differs between {source.name} and {wheel.name}; not one version")
        if not _check_compiles(name, changed, problems):
            return []
        return _check_imports(name, path, changed, pinned, problems)
    return []


def _check_tree(what: str, found: str, locked: str, problems: Problems) -> None:
    if found != locked:
        problems.add(
            f"{what}: its tree is {found}, the lock says {locked}; a hunk was lost, or a carry changed: restore it, "
            f"or {RELOCK}"
        )


def _check_requirements(name: str, space: Workspace, pinned: PinnedProfile, problems: Problems) -> None:
    profile = space.definition.profiles[name]
    have = {pin.project: pin.version for pin in pinned.requirements}
    for text in profile.requirements:
        asked = Requirement(text)
        version = have.get(canonicalize_name(asked.name))
        if version is None or not asked.specifier.contains(version, prereleases=True):
            problems.add(f"profile {name}: {text} is asked for, {version or 'nothing'} is locked; {RELOCK}")
    with problems.collecting():
        for project, version in space.constraints(profile).items():
            if have.get(project, version) != version:
                problems.add(
                    f"profile {name}: {project} {have[project]} is locked, the constraints say {version}; {RELOCK}"
                )


def _check_absent(name: str, space: Workspace, pinned: PinnedProfile, wheel: Tree, problems: Problems) -> None:
    exclude = space.definition.profiles[name].exclude
    for pin in pinned.requirements:
        if pin.project in exclude.distributions:
            problems.add(f"profile {name}: {pin.project} is excluded and locked; leave it out, or do not exclude it")
    for pattern in exclude.files:
        found = fnmatch.filter(wheel.digests, pattern)
        if found:
            problems.add(
                f"profile {name}: {pattern} is excluded, and the wheel has {found[0]}; take another wheel, or do not "
                "exclude it"
            )


def _git_agrees(space: Workspace, profile: str, source: Tree, problems: Problems) -> None:
    """A second opinion on each carry alone: git's own, on the pinned files."""
    for patch in space.patches(profile):
        files = {file.path: source.texts[file.path] for file in patch.files if file.path in source.texts}
        with tempfile.TemporaryDirectory(prefix="moetier-stack-") as folder:
            objection = applies(Path(folder) / "tree", space.patch_bytes(patch.id), files)
        if objection:
            problems.add(f"carry {patch.id}: git does not apply it: {objection}")


def _check_compiles(name: str, changed: Mapping[str, bytes | None], problems: Problems) -> bool:
    """Whether every patched Python file compiles."""
    fine = True
    for path, content in changed.items():
        if path.endswith(".py") and content is not None:
            try:
                compile(content, path, "exec", dont_inherit=True)
            except (SyntaxError, ValueError) as error:
                problems.add(f"profile {name}: {path} does not compile once patched: {error}")
                fine = False
    return fine


def _check_imports(
    name: str, path: Path, changed: Mapping[str, bytes | None], pinned: PinnedProfile, problems: Problems
) -> list[Skipped]:
    """Import every patched module of the wheel, where this environment has the profile's torch."""
    modules = [_module(file) for file, content in changed.items() if file.endswith(".py") and content is not None]
    wanted = {pin.project: pin.version for pin in pinned.requirements}.get("torch")
    if not modules:
        return []
    if wanted is not None and (have := _installed("torch")) != wanted:
        return [Skipped(f"import of the patched package, profile {name}", f"it wants torch {wanted}, here is {have}")]
    with tempfile.TemporaryDirectory(prefix="moetier-stack-") as folder:
        extract(path, Path(folder))
        write_files(Path(folder), {file: content for file, content in changed.items() if content is not None})
        code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)"
        environment = {**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1", "VLLM_NO_USAGE_STATS": "1"}
        try:
            done = subprocess.run(
                [sys.executable, "-c", code, *modules],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=IMPORT_SECONDS,
                check=False,
            )
            words = done.stderr.strip().split("\n")[-1] if done.returncode else ""
        except subprocess.TimeoutExpired:
            words = f"no end after {IMPORT_SECONDS} s"
    if words:
        problems.add(f"profile {name}: the patched package does not import: {words}")
    return []


def _module(path: str) -> str:
    parts = PurePosixPath(path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
