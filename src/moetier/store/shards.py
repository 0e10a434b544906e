"""The safetensors files of a checkpoint: their headers, checked before anything is believed, and reads of exact ranges.

A file is an 8-byte length, a JSON header of that length, and the tensors' bytes. The `safetensors` package hands out
neither F8_E8M0 nor byte ranges without a framework, and a checkpoint comes from strangers, so the header is read here:
bounded length, known dtypes, sizes that agree, no holes, no overlaps, no name twice. Only headers are read at open.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import reprlib
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moetier.errors import CheckpointError
from moetier.store.samples import sample_shard

MAX_JSON = 48 << 20
"""Bytes of a header, an index or a config: enough for 400,000 tensors, and parsed within a GiB whatever it holds."""
DENSE_JSON = 1 << 20
"""From this size on, text made of nothing but tiny values is refused before it is parsed: it would fill the memory."""
SPARSE = {b"[": 16, b"{": 16, b'"': 5, b",": 6}
"""A table of tensors has at least this many bytes for each of these characters."""
MAX_DIMENSIONS = 8
INDEX_SUFFIX = ".safetensors.index.json"

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


def read_json(path: Path) -> tuple[dict[str, Any], bytes]:
    """A JSON object from a file of bounded size, and its bytes."""
    size = _regular_size(path)
    if size > MAX_JSON:
        raise CheckpointError(f"{path}: expected at most {MAX_JSON} bytes of JSON, found {size}")
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    return _parse(raw, str(path)), raw


def read_config(folder: Path) -> tuple[dict[str, Any], bytes]:
    """config.json of a checkpoint's folder, and its bytes."""
    file = folder / "config.json"
    if not folder.is_dir():
        found = "a file" if folder.exists() else "nothing"
        raise CheckpointError(f"{folder}: expected a checkpoint folder, found {found}; {_instead(folder)}")
    if not os.path.lexists(file):
        raise CheckpointError(f"{file} cannot be read: it is not there; {_instead(folder)}")
    return read_json(file)


def _instead(path: Path) -> str:
    """What to give for something that is no checkpoint."""
    quantized = path.suffix == ".gguf" or any(path.glob("*.gguf"))
    note = " (GGUF is not read: take the repository that it was made from)" if quantized else ""
    return f"give the folder that holds config.json and *.safetensors{note}"


def read_shard(path: Path) -> Shard:
    """Read and check the header of one safetensors file."""
    size = _regular_size(path)
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
    header = _parse(raw, f"header of {path}")
    header.pop("__metadata__", None)
    tensors = {name: _tensor(name, entry, path, 8 + length) for name, entry in header.items()}
    _check_ranges(path, list(tensors.values()), 8 + length, size)
    return Shard(path, size, hashlib.sha256(raw).hexdigest(), tensors)


class Shards:
    """All tensors of a checkpoint folder by name, and reads of their bytes."""

    remote = False
    """Whether a tensor may have to be fetched before it is read."""
    version = ""
    """What the place that they are fetched from calls this state of them; it changes with every byte."""

    def __init__(self, folder: Path, index: bytes, shards: list[Shard]) -> None:
        self.folder = folder
        self.index = index
        self.shards = shards
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
        indexes = sorted(folder.glob("*" + INDEX_SUFFIX))
        if len(indexes) > 1:
            raise CheckpointError(
                f"{folder}: expected one *{INDEX_SUFFIX}, found {', '.join(i.name for i in indexes)}; remove one"
            )
        if not indexes:
            single = folder / "model.safetensors"
            files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
            if not files:
                raise CheckpointError(
                    f"{folder}: expected a checkpoint (*.safetensors), found none; {_instead(folder)}"
                )
            return cls(folder, b"", [read_shard(file) for file in files])
        weight_map, raw = read_weight_map(indexes[0])
        names = sorted(set(weight_map.values()))
        shards = {name: read_shard(_existing(folder / name, indexes[0])) for name in names}
        check_index(indexes[0], weight_map, shards)
        return cls(folder, raw, [shards[name] for name in names])

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


def _regular_size(path: Path) -> int:
    try:
        status = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path}: expected a regular file, found something else")
    return status.st_size


def _existing(path: Path, index: Path) -> Path:
    if not path.exists():
        raise CheckpointError(f"shard {path} is missing, {index.name} names it; download it again")
    return path


def _parse(raw: bytes, what: str) -> dict[str, Any]:
    """JSON object without a key twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            keys = [key for key, _ in pairs]
            raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} twice")
        return found

    if len(raw) > DENSE_JSON and any(raw.count(mark) * size > len(raw) for mark, size in SPARSE.items()):
        raise CheckpointError(f"{what}: expected a table of names, found mostly punctuation; the file is damaged")
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{what}: expected JSON, found {error}; the file is damaged: download it again"
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{what}: expected a JSON object, found {type(value).__name__}")
    return value


def check_index(index: Path, weight_map: dict[str, str], shards: dict[str, Shard]) -> None:
    """Every tensor must lie in the shard that the index names."""
    for tensor, file in weight_map.items():
        if tensor not in shards[file].tensors:
            raise CheckpointError(
                f"{index} places tensor {tensor} in {file}, which does not hold it; download both again"
            )


def read_weight_map(index: Path) -> tuple[dict[str, str], bytes]:
    content, raw = read_json(index)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: expected a weight_map with names and files, found {type(weight_map).__name__}")
    for name, file in weight_map.items():
        if not isinstance(file, str):
            raise CheckpointError(f"{index}: expected a file's name for tensor {name}, found {reprlib.repr(file)}")
    for file in set(weight_map.values()):
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(f"{index}: expected the name of a *.safetensors file beside it, found {file!r}")
    return weight_map, raw


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
