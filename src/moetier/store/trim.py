"""Trim a checkpoint: everything but the routed experts, so that the whole one need not lie beside its store."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from moetier.errors import CheckpointError, StoreError
from moetier.store import manifest
from moetier.store import origin as note
from moetier.store.checkpoint import Checkpoint, identity_of
from moetier.store.files import locked_folder, store_errors, sync_folder, write_all, write_durably
from moetier.store.manifest import GeometryEntry
from moetier.store.shards import INDEX_SUFFIX, Shard, Shards, Tensor, read_shard
from moetier.store.verify import verify_store
from moetier.store.work import Meter, Report

PARTIAL = ".partial"
LOCK = "trim.lock"
CHUNK = 16 << 20
WEIGHTS = (".safetensors", INDEX_SUFFIX, ".safetensors.part", ".bin", ".pt", ".pth", ".gguf", note.FILE)
"""Endings of files that are not copied as they are."""


def trim_checkpoint(checkpoint: Checkpoint, out: Path, progress: Report | None = None) -> None:
    """Write the trimmed checkpoint to `out`, or find that it is there. Killed, it resumes at the last whole shard.

    What was written is read back and compared with the checkpoint before the folder gets its name.
    """
    checkpoint.require_experts()
    out = out.absolute()
    if is_there(checkpoint, out):
        return
    if out.resolve().is_relative_to(checkpoint.path.resolve()):
        raise StoreError(f"{out} lies in the checkpoint {checkpoint.path}: expected a folder outside of it")
    partial = out.with_name(out.name + PARTIAL)
    with locked_folder(partial, LOCK):
        with store_errors(f"{partial} cannot be written"):
            copy_small_files(checkpoint.path, partial)
        meter = Meter("trim", len(checkpoint.shards.shards), progress)
        for shard in checkpoint.shards.shards:
            trim_shard(checkpoint.shards, shard, partial, checkpoint.is_stored)
            meter.add(1)
        finish(checkpoint, partial, out)


def trim_shard(shards: Shards, shard: Shard, folder: Path, is_stored: Callable[[str], bool]) -> None:
    """Write the tensors of a shard that no store has to a file of the same name in `folder`, if there are any."""
    kept = _kept(shard, is_stored)
    path = folder / shard.path.name
    header = _header(kept)
    size = len(header) + sum(tensor.nbytes for tensor in kept)
    if not kept or (path.exists() and path.stat().st_size == size):
        return
    aside = path.with_name(path.name + ".tmp")
    with store_errors(f"{path} cannot be written"):
        fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            write_all(fd, memoryview(header), 0)
            offset = len(header)
            for tensor in kept:
                for start in range(0, tensor.nbytes, CHUNK):
                    data = shards.read(tensor, start, min(CHUNK, tensor.nbytes - start))
                    write_all(fd, data.data, offset)
                    offset += data.size
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
        _compare(shards, kept, aside)
        aside.rename(path)
        sync_folder(folder)


def finish(checkpoint: Checkpoint, partial: Path, out: Path) -> None:
    """Write the index and the note of where it comes from, and give the folder its name."""
    files = {shard.path.name: _kept(shard, checkpoint.is_stored) for shard in checkpoint.shards.shards}
    weight_map = {tensor.name: file for file, kept in files.items() for tensor in kept}
    total = sum(tensor.nbytes for kept in files.values() for tensor in kept)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    with store_errors(f"{partial} cannot be finished"):
        write_durably(partial / f"model{INDEX_SUFFIX}", json.dumps(index, indent=1).encode())
        geometry = checkpoint.geometry
        origin = note.Origin(
            identity=checkpoint.identity(),
            own=identity_of((partial / "config.json").read_bytes(), Shards.open(partial)),
            source_format=checkpoint.source_format,
            requantized=checkpoint.requantized,
            geometry=GeometryEntry(
                hidden=geometry.hidden,
                intermediate=geometry.intermediate,
                experts=geometry.experts,
                top_k=geometry.top_k,
            ),
            layers=tuple(note.LayerName(number=layer.number, name=layer.name) for layer in checkpoint.moe_layers),
        )
        write_durably(partial / note.FILE, origin.to_json())
        (partial / LOCK).unlink()
        partial.rename(out)
        sync_folder(out.parent)


def is_there(checkpoint: Checkpoint, out: Path) -> bool:
    """Whether `out` is this checkpoint, trimmed; StoreError if it is anything else."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    if (out / note.FILE).exists() and Checkpoint.open(out).identity() == checkpoint.identity():
        return True
    raise StoreError(
        f"{out} exists and is not the trimmed {checkpoint.path}: expected a free name; choose another, or remove it "
        "yourself"
    )


def _kept(shard: Shard, is_stored: Callable[[str], bool]) -> list[Tensor]:
    kept = [tensor for tensor in shard.tensors.values() if not is_stored(tensor.name)]
    return sorted(kept, key=lambda tensor: tensor.offset)


def _header(tensors: list[Tensor]) -> bytes:
    """The length and the header of a safetensors file of these tensors, one after the other."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        span = [offset, offset + tensor.nbytes]
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": span}
        offset += tensor.nbytes
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _compare(shards: Shards, kept: list[Tensor], written: Path) -> None:
    """Every kept tensor as it lies on the disk now, against the checkpoint."""
    copy = Shards(written.parent, b"", [read_shard(written)])
    for tensor in kept:
        for start in range(0, tensor.nbytes, CHUNK):
            size = min(CHUNK, tensor.nbytes - start)
            found, wanted = copy.read(copy.tensors[tensor.name], start, size), shards.read(tensor, start, size)
            if not np.array_equal(found, wanted):
                raise StoreError(f"{written}: {tensor.name} is not what was written; check the disk and try again")


def copy_small_files(source: Path, folder: Path) -> None:
    """Config, tokenizer, templates and code: all that is not weights. A store that lies in it stays there."""
    marks = (*source.rglob(manifest.FILE), *source.rglob("*.records"))
    stores = {mark.parent for mark in marks} - {source}
    for path in sorted(source.rglob("*")):
        if path.is_file() and path.parent not in stores and not path.name.endswith(WEIGHTS):
            target = folder / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
            with target.open("rb") as file:
                os.fsync(file.fileno())


def delete_source_of(path: Path, store: Path, trimmed: Path, progress: Report | None = None) -> int:
    """Delete the weights of the whole checkpoint at `path`; the bytes that became free.

    First every record of its store is verified, and its trimmed copy must be there.
    """
    checkpoint = Checkpoint.open(path)
    checkpoint.require_experts()
    report = verify_store(store, checkpoint=path, progress=progress)
    if report.bad:
        raise StoreError(f"{store} has {len(report.bad)} bad records: build it again; nothing was deleted")
    if not is_there(checkpoint, trimmed):
        raise CheckpointError(f"{trimmed}: expected the trimmed {path}, found nothing; nothing was deleted")
    freed = 0
    with store_errors(f"{path} cannot be deleted"):
        for shard in checkpoint.shards.shards:
            shard.path.resolve().unlink()
            shard.path.unlink(missing_ok=True)  # where it was a link into a cache
            freed += shard.size
        sync_folder(path)
    return freed
