"""The safetensors files of a checkpoint: their headers, checked before anything is believed, and reads of exact ranges.

A file is an 8-byte length, a JSON header of that length, and the tensors' bytes. The `safetensors` package hands out
neither F8_E8M0 nor byte ranges without a framework, and a checkpoint comes from strangers, so the header is read here:
bounded length, known dtypes, sizes that agree, no holes, no overlaps, no name twice. Only headers are read at open.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import reprlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moetier.checkpoint.index import INDEX_SUFFIX, choose_files, lawful, named
from moetier.checkpoint.json_files import MAX_JSON, parse_json, read_config, read_json, regular_size, what_to_give
from moetier.checkpoint.samples import sample_shard
from moetier.errors import CheckpointError

__all__ = ["INDEX_SUFFIX", "MAX_JSON", "Shard", "Shards", "Tensor", "parse_shard", "read_config", "read_json"]

MAX_DIMENSIONS = 8

DTYPE_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "BOOL": 8, "U8": 8, "I8": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip


@dataclass(frozen=True)
class Tensor:
    """Where one tensor lies: `offset` counts from the start of the file."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def __str__(self) -> str:
        return f"tensor {self.name} in {self.file}"


@dataclass(frozen=True)
class Shard:
    """One safetensors file whose header passed every check."""

    path: Path
    size: int
    header_sha256: str
    tensors: dict[str, Tensor]
    ignored: frozenset[str] = frozenset()
    """Tensors that it holds too, but that the index does not place in it; none of them is in `tensors`."""


def read_shard(path: Path) -> Shard:
    """Read and check the header of one safetensors file."""
    size = regular_size(path)
    with path.open("rb") as file:

        def read(start: int, stop: int) -> bytes:
            file.seek(start)
            return file.read(stop - start)

        return parse_shard(path, size, read)


def parse_shard(path: Path, size: int, read: Callable[[int, int], bytes]) -> Shard:
    """Check the header of a file of `size` bytes; read(start, stop) gives bytes of it. path is what it is called."""
    if size < 8:
        raise _damaged(path, f"expected a safetensors file, found {size} bytes")
    length = int.from_bytes(read(0, 8), "little")
    if not 2 <= length <= min(MAX_JSON, size - 8):
        raise _damaged(path, f"expected a header of 2 to {min(MAX_JSON, size - 8)} bytes, found a length of {length}")
    raw = read(8, 8 + length)
    if len(raw) != length:
        raise _damaged(path, f"expected a header of {length} bytes, found {len(raw)}")
    header = parse_json(raw, f"header of {path}")
    header.pop("__metadata__", None)
    tensors = {name: _tensor(name, entry, path, 8 + length) for name, entry in header.items()}
    _check_ranges(path, list(tensors.values()), 8 + length, size)
    return Shard(path, size, hashlib.sha256(raw).hexdigest(), tensors)


class Shards:
    """All tensors of a checkpoint by name, and reads of their bytes."""

    remote = False
    """Whether a tensor may have to be fetched before it is read."""
    version = ""
    """Name of this state of the files at the place that they are fetched from; it changes with every byte."""

    def __init__(self, folder: Path, index: bytes, shards: list[Shard], unread: tuple[str, ...] = ()) -> None:
        """unread: names of safetensors files beside the shards that do not belong to the checkpoint."""
        self.folder = folder
        self.index = index
        self.shards = shards
        self.unread = unread
        self._below: dict[str, list[str]] | None = None
        self.tensors: dict[str, Tensor] = {}
        for shard in shards:
            for name, tensor in shard.tensors.items():
                if name in self.tensors:
                    raise CheckpointError(
                        f"tensor {name} lies in both {self.tensors[name].file.name} and {shard.path.name} of {folder}; "
                        "remove the file that does not belong to the checkpoint"
                    )
                self.tensors[name] = tensor

    @classmethod
    def open(cls, folder: Path) -> Shards:
        """Read every header of the folder's shards: those that its index names, or all where there is no index."""
        names = [path.name for path in folder.iterdir() if path.is_file() or path.is_symlink()]
        files = choose_files(str(folder), names, lambda name: read_json(folder / name))
        if not files.names:
            raise CheckpointError(
                f"{folder}: expected a checkpoint (*.safetensors), found none; {what_to_give(folder)}"
            )
        shards = lawful(str(folder), files, {name: read_shard(folder / name) for name in files.names})
        return cls(folder, files.index, shards, files.unread)

    def below(self, experts: str) -> list[str]:
        """Names of the tensors that begin with `experts` and a dot; experts is a name up to `.experts`."""
        if self._below is None:
            self._below = {}
            for name in self.tensors:
                prefix, found, _ = name.partition(".experts.")
                if found:
                    self._below.setdefault(f"{prefix}.experts", []).append(name)
        return self._below.get(experts, [])

    def elsewhere(self, name: str) -> str:
        """Where a tensor that is not of the checkpoint may be; "" if nothing is known of it."""
        for shard in self.shards:
            if name in shard.ignored:
                return f"{shard.path.name} holds one of that name, where the index does not place it"
        return self._may_be_unread()

    def layer_elsewhere(self, name: re.Pattern[str]) -> str:
        """As `elsewhere`, of a layer that is not there; name matches those of its tensors."""
        for shard in self.shards:
            if any(name.search(tensor) for tensor in shard.ignored):
                return f"{shard.path.name} holds tensors of it, where the index does not place them"
        return self._may_be_unread()

    def _may_be_unread(self) -> str:
        return f"it may be in {named(self.unread)}, which the index does not name" if self.unread else ""

    def hold(self, name: str) -> AbstractContextManager[None]:
        """Have the shard on disk for as long as a block runs."""
        return nullcontext()

    def reopened(self) -> Shards:
        """The same files, opened again: what differs was changed meanwhile."""
        return Shards.open(self.folder)

    def sampled(self, shard: Shard) -> str:
        """sha256 (hex) over some bytes of each of a shard's tensors."""
        return sample_shard(shard)

    def read(self, tensor: Tensor, start: int = 0, nbytes: int | None = None) -> NDArray[np.uint8]:
        """Bytes [start, start + nbytes) of a tensor as uint8 [nbytes]; all of it by default."""
        out = np.empty(tensor.nbytes - start if nbytes is None else nbytes, np.uint8)
        if start < 0 or start + out.size > tensor.nbytes:
            raise ValueError(f"bytes {start}..{start + out.size} of {tensor}, which has {tensor.nbytes}")
        try:
            fd = os.open(tensor.file, os.O_RDONLY | os.O_CLOEXEC)
            try:
                found = pread_into(fd, out, tensor.offset + start)
            finally:
                os.close(fd)
        except OSError as error:
            raise CheckpointError(f"{tensor} cannot be read: {error.strerror}; check the disk") from error
        if found != out.size:
            raise _damaged(tensor.file, f"expected {out.size} bytes of tensor {tensor.name}, found {found}")
        return out


def pread_into(fd: int, out: NDArray[np.uint8], offset: int) -> int:
    """Read at `offset` until `out` is full or the file ends; the number of bytes read."""
    view, done = out.data, 0
    while done < out.size:
        got = os.preadv(fd, [view[done:]], offset + done)
        if got == 0:
            break
        done += got
    return done


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path}: {what}; the file is truncated or damaged: download it again")


def _sizes(value: Any, most: int) -> bool:
    if not isinstance(value, list) or len(value) > most:
        return False
    return {*map(type, value)} <= {int} and (not value or (min(value) >= 0 and max(value) < 1 << 63))


def _tensor(name: str, entry: Any, path: Path, data: int) -> Tensor:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _damaged(path, f"expected dtype, shape and data_offsets of tensor {name}, found {reprlib.repr(entry)}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise CheckpointError(
            f"{path}: tensor {name} has the unknown dtype {reprlib.repr(dtype)}; known: {', '.join(DTYPE_BITS)}"
        )
    if not _sizes(shape, MAX_DIMENSIONS) or not _sizes(offsets, 2) or len(offsets) != 2:
        raise _damaged(path, f"tensor {name} has the shape {reprlib.repr(shape)} and offsets {reprlib.repr(offsets)}")
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits % 8 or offsets[1] - offsets[0] != bits // 8:
        raise _damaged(path, f"tensor {name} {dtype} {shape} needs {bits / 8:g} bytes, found {offsets[1] - offsets[0]}")
    return Tensor(name, path, dtype, tuple(shape), data + offsets[0], bits // 8)


def _check_ranges(path: Path, tensors: list[Tensor], start: int, size: int) -> None:
    """The tensors must cover the file from `start` to its end, each byte once."""
    for tensor in sorted(tensors, key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset != start:
            kind = "overlaps the one before it" if tensor.offset < start else "leaves a hole before it"
            raise _damaged(path, f"tensor {tensor.name} at byte {tensor.offset} {kind}, expected byte {start}")
        start += tensor.nbytes
    if start != size:
        raise _damaged(path, f"expected {start} bytes by its header, found {size}")
