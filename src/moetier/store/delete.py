"""Delete the weights of a checkpoint once all that they hold lies elsewhere: in a store and a trimmed checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moetier.errors import CheckpointError, StoreError
from moetier.files import store_errors, sync_folder
from moetier.store.checkpoint import Checkpoint
from moetier.store.match import compare_all, open_store
from moetier.store.trim import is_there
from moetier.store.verify import verify_store
from moetier.store.work import Report


@dataclass(frozen=True)
class Deleted:
    """Report of a deletion. bytes became free; stayed names each file whose bytes did not, and why."""

    bytes: int
    stayed: tuple[str, ...] = ()


def delete_source_of(path: Path, store: Path, trimmed: Path, progress: Report | None = None) -> Deleted:
    """Delete the weights of the whole checkpoint at `path`.

    First every tensor that is no expert's is compared with the trimmed copy, every record of the store is read and
    verified, and every expert is compared with its record. One that differs is an error, and nothing is deleted.
    """
    checkpoint = Checkpoint.open(path)
    checkpoint.require_experts()
    if not is_there(checkpoint, trimmed):
        raise CheckpointError(
            f"{trimmed}: expected the trimmed {path}, found nothing; nothing was deleted. Make it with `moetier store "
            f"build {path} {store} --trim {trimmed}`"
        )
    _check_apart(checkpoint, trimmed, store)
    report = verify_store(store, checkpoint=path, progress=progress)
    if report.bad:
        files = sorted({record.file for record in report.bad})
        raise StoreError(
            f"{store} has {len(report.bad)} bad records; nothing was deleted. Remove {' and '.join(files)} and run the "
            "same command again: it builds these layers anew"
        )
    with open_store(store, checkpoint) as opened:
        compare_all(opened, checkpoint, progress=progress)
    if checkpoint.reopened().known != checkpoint.known:
        raise CheckpointError(f"{path} was changed meanwhile; nothing was deleted. Run the same command again")
    return _delete(checkpoint)


def _check_apart(checkpoint: Checkpoint, *folders: Path) -> None:
    """StoreError where a copy is a link to the very file that is to be deleted."""
    sources = {_inode(shard.path): shard.path for shard in checkpoint.shards.shards}
    for folder in folders:
        for file in folder.rglob("*"):
            if file.is_file() and (source := sources.get(_inode(file))) is not None:
                raise StoreError(
                    f"{file} is the same file as {source}: expected a copy of its own; nothing was deleted. Remove "
                    f"{folder} and run the same command again"
                )


def _inode(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def _delete(checkpoint: Checkpoint) -> Deleted:
    """Remove the shards, and the blobs of a hub's cache that nothing else links to."""
    freed, stayed = 0, []
    links = [shard.path for shard in checkpoint.shards.shards]
    with store_errors(f"{checkpoint.path} cannot be deleted"):
        for shard in checkpoint.shards.shards:
            target = shard.path.resolve()
            others = target.stat().st_nlink > 1
            why = _why_it_stays(shard.path, target, links)
            shard.path.unlink()
            if why:
                stayed.append(f"{target} ({why})")
                continue
            target.unlink(missing_ok=True)
            if others:
                stayed.append(f"{target} (under other names, as hard links)")
            else:
                freed += shard.size
        sync_folder(checkpoint.path)
    return Deleted(freed, tuple(stayed))


def _why_it_stays(link: Path, target: Path, links: list[Path]) -> str:
    """Why the file that a shard's name leads to is not only this checkpoint's; "" where it is.

    A hub's cache has each content once, under blobs/; the revisions of a repository link to it from snapshots/.
    """
    if not link.is_symlink():
        return ""
    snapshots = target.parent.parent / "snapshots"
    if target.parent.name != "blobs" or not snapshots.is_dir():
        return "a link led to it from here; it may be others' too"
    own = {path.parent.resolve() / path.name for path in links}
    for other in snapshots.resolve().rglob("*"):
        if other.is_symlink() and other not in own and other.resolve() == target:
            return f"{other} links to it"
    return ""
