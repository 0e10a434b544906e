"""Routing traces: which experts each layer call of real traffic asked for, small enough to keep and to replay.

File, format 1, little-endian. Header, 64 bytes: magic, format u16, layers u16, experts u16, top-k u16, the
checkpoint's identity (32 bytes), zeros. Then blocks: raw size u32, packed size u32, crc32 of the packed bytes u32, the
zlib-packed bytes. The blocks unpack to one stream of calls: layer u16, flags u16 (1: a prompt is in the step),
sequences u32 (0: not known), tokens u32, then the ids [tokens, top-k], u8 where there are fewer than 256 experts, else
u16; an id that names no expert is written as the number of experts. A call lies whole in one block, so a recording that
was killed is readable up to its last whole block.
"""

from __future__ import annotations

import logging
import os
import stat
import struct
import threading
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from moetier.errors import SettingsError
from moetier.tiers.step import Step

logger = logging.getLogger(__name__)

MAGIC = b"MOETRACE"
FORMAT = 1
HEADER = struct.Struct("<8sHHHH32s16x")
BLOCK = struct.Struct("<III")
CALL = struct.Struct("<HHII")
PREFILL = 1
BLOCK_BYTES = 1 << 16
"""A block is packed once it has so many bytes, or is FLUSH_SECONDS old."""
FLUSH_SECONDS = 1.0
MAX_BLOCK = 1 << 30
"""Far more than one call can take."""


@dataclass(frozen=True)
class TraceHeader:
    """Header of a trace: a model's MoE layers (by index in the store), experts a layer, experts a token."""

    layers: int
    experts: int
    top_k: int
    identity: str
    """Identity of the checkpoint, 64 hexadecimal digits."""

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """Type of the ids in the file."""
        return np.dtype(np.uint8 if self.experts < 256 else "<u2")


@dataclass(frozen=True)
class TracedCall:
    """One layer call: ids int32 [T, top_k]; one that names no expert is `experts` of the header."""

    layer: int
    step: Step
    ids: NDArray[np.int32]


class TraceWriter:
    """Appends calls to a new file. Calls may come from several threads.

    A disk that takes no more ends the recording with a warning, never the service.
    """

    def __init__(self, path: Path, header: TraceHeader) -> None:
        self.header = header
        self._file = _new(path)
        self._file.write(
            HEADER.pack(MAGIC, FORMAT, header.layers, header.experts, header.top_k, bytes.fromhex(header.identity))
        )
        self._block = bytearray()
        self._begun = time.monotonic()
        self._lock = threading.Lock()

    def add(self, layer: int, step: Step, ids: NDArray[np.int32] | NDArray[np.int64]) -> None:
        """One call: ids [T, top_k]."""
        outside = (ids < 0) | (ids >= self.header.experts)
        packed = np.where(outside, self.header.experts, ids).astype(self.header.dtype)
        with self._lock:
            if self._file.closed:
                return
            self._block += CALL.pack(layer, PREFILL * step.prefill, step.sequences, ids.shape[0])
            self._block += packed.tobytes()
            if len(self._block) >= BLOCK_BYTES or time.monotonic() - self._begun > FLUSH_SECONDS:
                self._flush()

    def _flush(self) -> None:
        if self._block:
            packed = zlib.compress(self._block)
            block = BLOCK.pack(len(self._block), len(packed), zlib.crc32(packed)) + packed
            self._block.clear()
            try:
                while block:
                    block = block[self._file.write(block) :]
            except OSError as error:
                logger.warning("the trace %s ends here: %s", self._file.name, error.strerror)
                self._file.close()
        self._begun = time.monotonic()

    def close(self) -> None:
        """Write what is left."""
        with self._lock:
            if not self._file.closed:
                self._flush()
                self._file.close()


class Trace:
    """A trace file, opened for reading."""

    def __init__(self, path: Path, header: TraceHeader) -> None:
        self.path = path
        self.header = header

    @classmethod
    def open(cls, path: Path) -> Trace:
        """SettingsError if `path` is no trace."""
        with _opened(path) as file:
            raw = file.read(HEADER.size)
        if len(raw) < HEADER.size or not raw.startswith(MAGIC):
            raise SettingsError(
                f"{path}: expected a routing trace, found another file; record one with `moetier trace record`"
            )
        _, found, layers, experts, top_k, identity = HEADER.unpack(raw)
        if found != FORMAT or not (layers and experts and 0 < top_k <= experts):
            raise SettingsError(
                f"{path}: expected a trace of format {FORMAT}, found format {found} with {layers} layers, {experts} "
                f"experts, top-{top_k}; record it again with this version"
            )
        return cls(path, TraceHeader(layers, experts, top_k, identity.hex()))

    def calls(self) -> Iterator[TracedCall]:
        """Every call, in the order in which they were made. A block that a kill cut off ends the trace."""
        with _opened(self.path) as file:
            file.seek(HEADER.size)
            while (raw := file.read(BLOCK.size)) and len(raw) == BLOCK.size:
                size, packed_size, crc = BLOCK.unpack(raw)
                if max(size, packed_size) > MAX_BLOCK:
                    raise self._damaged("a block of impossible size")
                packed = file.read(packed_size)
                if len(packed) < packed_size:
                    return
                if zlib.crc32(packed) != crc:
                    raise self._damaged("a block with a wrong checksum")
                yield from self._unpack(packed, size)

    def steps(self) -> Iterator[list[TracedCall]]:
        """The calls of each forward: the layers ascend in one, and the next begins where they do not."""
        step: list[TracedCall] = []
        for call in self.calls():
            if step and call.layer <= step[-1].layer:
                yield step
                step = []
            step.append(call)
        if step:
            yield step

    def _unpack(self, packed: bytes, size: int) -> Iterator[TracedCall]:
        inflate = zlib.decompressobj()
        try:
            raw = inflate.decompress(packed, size)
        except zlib.error as error:
            raise self._damaged(str(error)) from error
        if len(raw) != size or not inflate.eof:
            raise self._damaged("a block that unpacks to another size than it says")
        header, at = self.header, 0
        while at < size:
            if size - at < CALL.size:
                raise self._damaged("a block that ends inside a call")
            layer, flags, sequences, tokens = CALL.unpack_from(raw, at)
            at += CALL.size
            count = tokens * header.top_k
            if layer >= header.layers or size - at < count * header.dtype.itemsize:
                raise self._damaged(f"a call of layer {layer} with {tokens} tokens, which does not fit")
            ids = np.frombuffer(raw, header.dtype, count, at).astype(np.int32).reshape(tokens, header.top_k)
            at += count * header.dtype.itemsize
            if (ids > header.experts).any():
                raise self._damaged(f"an expert beyond {header.experts}")
            yield TracedCall(layer, Step(sequences, bool(flags & PREFILL)), ids)

    def _damaged(self, found: str) -> SettingsError:
        return SettingsError(f"{self.path}: expected whole blocks of calls, found {found}; record the trace again")


def write_trace(path: Path, header: TraceHeader, calls: Iterable[TracedCall]) -> None:
    """A whole trace at once."""
    writer = TraceWriter(path, header)
    try:
        for call in calls:
            writer.add(call.layer, call.step, call.ids)
    finally:
        writer.close()


def _new(path: Path) -> FileIO:
    if path.exists():
        raise SettingsError(f"{path} exists already; name a new file for the trace")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("xb", buffering=0)
    except OSError as error:
        raise SettingsError(f"cannot write the trace {path} ({error.strerror}); name another file") from error


def _opened(path: Path) -> BinaryIO:
    try:
        file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    except OSError as error:
        raise SettingsError(f"{path}: expected a routing trace, found: {error.strerror}; check the name") from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise SettingsError(f"{path}: expected a routing trace, found no regular file; check the name")
    return file
