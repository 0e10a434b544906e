"""`stack rebase` and `stack apply`: trees on disk to work in."""

from __future__ import annotations

import gzip
import shutil
import tarfile
import zlib
from pathlib import Path

from packaging.version import Version

from moetier_stack.archive import LOCK_ANOTHER, sdist_members
from moetier_stack.errors import StackError
from moetier_stack.git import git, init, write_files
from moetier_stack.index import fetch
from moetier_stack.workspace import Workspace


def prepare_rebase(space: Workspace, carry: str, version: Version, folder: Path) -> bool:
    """A repository in the new `folder`: pinned sources, then upstream's, then the carry on top as far as it goes.

    Returns whether it went on without a conflict; else the conflict is left as `git am` leaves it, to be resolved.
    """
    target = space.definition.carry(carry).target
    source = space.definition.sources[target]
    pinned = space.pinned_tree(target)
    patch, data = space.patch(carry), space.patch_bytes(carry)
    upstream = fetch(space.sdist_file(source, version), space.cache)
    with _new_folder(folder) as work:
        init(work)
        write_files(work, {f.path: pinned.texts[f.path] for f in patch.files if f.path in pinned.texts})
        _commit(work, f"{source.project} {space.lock.sources[target].version}: the files that {carry} patches")
        for path in sorted(work.iterdir()):
            if path.name != ".git":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        unpack_sdist(upstream, work)
        _commit(work, f"{source.project} {version}")
        git(work, "config", "user.name", "moetier stack")
        git(work, "config", "user.email", "stack@moetier.invalid")
        return git(work, "am", "--3way", "--quiet", check=False, data=data).returncode == 0


def apply_profile(space: Workspace, profile: str, folder: Path) -> None:
    """The sources of a profile with its carries, in the new `folder`."""
    source = space.definition.profile(profile).source
    pinned = space.lock.sources.get(source)
    tree = space.pinned_tree(source)
    changed = space.patched_source(profile, tree)
    locked = space.lock.profiles.get(profile)
    if locked is None or tree.replaced(changed).hash() != locked.source_tree:
        raise StackError(f"profile {profile}: the patched tree is not the locked one; see `moetier stack verify`")
    with _new_folder(folder) as work:
        if pinned is not None and pinned.sdist is not None:
            unpack_sdist(space.archive(pinned.sdist, space.definition.sources[source].index), work)
        else:
            write_files(work, tree.texts)
        for path, content in changed.items():
            if content is None:
                (work / path).unlink()
            else:
                write_files(work, {path: content})


def unpack_sdist(path: Path, folder: Path) -> None:
    """Unpack an sdist without its top folder, executable what is executable there; StackError as `sdist_members`."""
    try:
        for name, file, executable in sdist_members(path):
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("xb") as out:
                shutil.copyfileobj(file, out)
            target.chmod(0o755 if executable else 0o644)
    except FileExistsError as error:
        raise StackError(f"{path}: {Path(error.filename).relative_to(folder)} is in it twice; {LOCK_ANOTHER}") from None
    except (tarfile.TarError, zlib.error, EOFError, gzip.BadGzipFile) as error:
        raise StackError(f"{path}: damaged or cut short ({error}); {LOCK_ANOTHER}") from None


def _commit(folder: Path, subject: str) -> None:
    git(folder, "add", "--all", "--force")
    git(folder, "commit", "--quiet", "--allow-empty", "-m", subject)


class _new_folder:  # noqa: N801 (a context manager)
    """A folder that must not exist yet, and that is not left half made."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> Path:
        if self._folder.exists() and (not self._folder.is_dir() or any(self._folder.iterdir())):
            raise StackError(f"{self._folder} is there already; name a new folder")
        self._folder.mkdir(parents=True, exist_ok=True)
        return self._folder

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
