"""Trim a checkpoint: everything but the routed experts, so that the whole one need not lie beside its store.

A trimmed copy counts as being there only once every tensor of it was compared with the checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from moetier.checkpoint.shards import INDEX_SUFFIX, Shard, Shards, Tensor, read_shard
from moetier.errors import CheckpointError, StoreError
from moetier.files import locked_folder, store_errors, sweep, sync_folder, write_all, write_durably
from moetier.store import manifest
from moetier.store import origin as note
from moetier.store.checkpoint import Checkpoint
from moetier.store.identity import sampled_identity
from moetier.store.manifest import GeometryEntry
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
    """Write the tensors of a shard that no store has to a file of the same name in `folder`, if there are any.

    What lies there from an earlier run is compared.
    """
    kept, path = _kept(shard, is_stored), folder / shard.path.name
    if has_size(shard, folder, is_stored) and (not kept or _is_copy(shards, kept, path)):
        return
    header = _header(kept)
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
        if name := _first_difference(shards, kept, aside):
            raise StoreError(f"{aside}: {name} is not what was written; check the disk and try again")
        aside.rename(path)
        sync_folder(folder)


def has_size(shard: Shard, folder: Path, is_stored: Callable[[str], bool]) -> bool:
    """Whether `folder` has what `trim_shard` writes of a shard, by its size."""
    kept, path = _kept(shard, is_stored), folder / shard.path.name
    size = len(_header(kept)) + sum(tensor.nbytes for tensor in kept)
    return not kept or (path.exists() and path.stat().st_size == size)


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
            headers=checkpoint.headers,
            own=sampled_identity((partial / "config.json").read_bytes(), Shards.open(partial)),
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
        for path in (partial / f"model{INDEX_SUFFIX}", partial / note.FILE):
            sweep(path)
        (partial / LOCK).unlink()
        partial.rename(out)
        sync_folder(out.parent)


def is_there(checkpoint: Checkpoint, out: Path) -> bool:
    """Whether `out` is this checkpoint, trimmed, with every tensor of it; StoreError if it is anything else."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    if not (out / note.FILE).exists():
        raise _in_the_way(checkpoint, out, "it is no trimmed checkpoint")
    trimmed = Checkpoint.open(out)
    if values := checkpoint.known.differs(trimmed.identities):
        raise _in_the_way(checkpoint, out, f"expected identity {values[0]}, found {values[1]}")
    if not checkpoint.shards.remote and (name := first_other_tensor(checkpoint, trimmed)):
        raise _in_the_way(checkpoint, out, f"its tensor {name} is another one")
    return True


def first_other_tensor(checkpoint: Checkpoint, trimmed: Checkpoint) -> str:
    """Name of the first tensor that a trimmed copy lacks or has otherwise than the checkpoint; "" if there is none."""
    for shard in checkpoint.shards.shards:
        for tensor in _kept(shard, checkpoint.is_stored):
            if tensor.name not in trimmed.tensors or _differs(checkpoint.shards, trimmed.shards, tensor):
                return tensor.name
    return ""


def _in_the_way(checkpoint: Checkpoint, out: Path, why: str) -> StoreError:
    return StoreError(
        f"{out} exists and is not the trimmed {checkpoint.path} ({why}): expected a free name; choose another, or "
        f"remove {out} yourself and run the command again"
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


def _is_copy(shards: Shards, kept: list[Tensor], path: Path) -> bool:
    """Whether a file holds the kept tensors of a shard, byte for byte."""
    try:
        return not _first_difference(shards, kept, path)
    except (CheckpointError, KeyError):
        return False


def _first_difference(shards: Shards, kept: list[Tensor], path: Path) -> str:
    """Name of the first kept tensor that a file, as it lies on the disk now, has otherwise; "" if there is none."""
    copy = Shards(path.parent, b"", [read_shard(path)])
    return next((tensor.name for tensor in kept if _differs(shards, copy, tensor)), "")


def _differs(shards: Shards, copy: Shards, tensor: Tensor) -> bool:
    """Whether a copy has other bytes, or another form, under a tensor's name."""
    other = copy.tensors[tensor.name]
    if (other.dtype, other.shape) != (tensor.dtype, tensor.shape):
        return True
    starts = range(0, tensor.nbytes, CHUNK)
    sizes = (min(CHUNK, tensor.nbytes - start) for start in starts)
    return any(
        not np.array_equal(copy.read(other, start, size), shards.read(tensor, start, size))
        for start, size in zip(starts, sizes, strict=True)
    )


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
