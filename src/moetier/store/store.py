"""A built store, opened for reading: one file of records per MoE layer, each record with its checksum."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from shlex import quote
from types import TracebackType

import numpy as np
import xxhash
from numpy.typing import NDArray

from moetier.checkpoint.shards import pread_into
from moetier.contract import RecordLayout
from moetier.errors import RecordReadError, StoreError
from moetier.files import open_to_read, read_small
from moetier.store.manifest import Manifest


def slice_sums(layout: RecordLayout, data: NDArray[np.uint8], first: int = 0) -> Iterator[int]:
    """xxh3_64 of each slice in `data`, which begins with slice `first`; the record's padding goes with its last one."""
    for index in range(first, layout.slices):
        begin = (index - first) * layout.slice_bytes
        if begin >= data.size:
            return
        end = data.size if index == layout.slices - 1 else begin + layout.slice_bytes
        yield xxhash.xxh3_64_intdigest(data[begin:end].data)


class Store:
    """An opened store. Layers are counted by their index in the manifest, not by the checkpoint's layer number.

    Reads may come from several threads. `close` (or leaving a `with` block) closes its files.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self.layout = RecordLayout.of(manifest.layer_geometry)
        self._index = {layer.number: index for index, layer in enumerate(manifest.layers)}
        self._sums = [self._read_sums(index) for index in range(len(manifest.layers))]
        self._files: dict[int, int] = {}
        self._inodes: dict[int, tuple[int, int]] = {}
        self._lock = threading.Lock()

    @classmethod
    def open(cls, path: str | Path, checkpoint_identity: str | None = None) -> Store:
        """Open a store; StoreError where its format, sizes or checkpoint are not the expected ones.

        checkpoint_identity is that of the checkpoint which will be served (`Checkpoint.identity()`).
        """
        folder = Path(path)
        manifest = Manifest.read(folder)
        found = manifest.checkpoint.identity
        if checkpoint_identity is not None and checkpoint_identity != found:
            raise StoreError(
                f"{folder} was built from another checkpoint: expected identity {checkpoint_identity}, found {found}; "
                f"build one for this checkpoint with `moetier store build CHECKPOINT OUT` into another folder"
            )
        store = cls(folder, manifest)
        store._check_sizes()
        return store

    def layer_index(self, checkpoint_layer: int) -> int:
        """Index of the layer that has this number in the checkpoint."""
        try:
            return self._index[checkpoint_layer]
        except KeyError:
            self.require_drafter(checkpoint_layer)
            raise StoreError(
                f"{self.path} has no experts of layer {checkpoint_layer}, only of {sorted(self._index)}; "
                "the store does not belong to this model"
            ) from None

    def served_layers(self, hidden_layers: int, speculates: bool) -> int:
        """MoE layers that an engine loads: the drafter's, behind the model's own, only where it speculates."""
        return sum(speculates or layer.number < hidden_layers for layer in self.manifest.layers)

    def require_drafter(self, number: int | None = None) -> None:
        """StoreError if the draft layer of this number, or any one, was left out when the store was built."""
        for layer in self.manifest.left_out:
            if number in (None, layer.number):
                raise StoreError(
                    f"{self.path} has no experts of draft layer {layer.number}, which was left out when it was built: "
                    f"{layer.reason}; start without speculation by the checkpoint's own drafter (--speculative-config)"
                )

    def record_file(self, layer: int) -> Path:
        """File of a layer's records: record e lies at `offset(e)`."""
        return self.path / self.manifest.layers[layer].records

    def offset(self, expert: int) -> int:
        """Byte at which an expert's record starts in its layer's file."""
        return expert * self.manifest.record_stride

    def checksums(self, layer: int) -> NDArray[np.uint64]:
        """xxh3_64 of each slice of each record of a layer, uint64 [experts, slices]; the last one's has the padding."""
        return self._sums[layer]

    def problem(self, layer: int, expert: int, data: NDArray[np.uint8], first: int = 0) -> str:
        """Say what is wrong with `data`, a record's bytes from slice `first` on; "" if its checksums are right."""
        expected = self._sums[layer][expert]
        for index, found in enumerate(slice_sums(self.layout, data, first), first):
            if found != int(expected[index]):
                where = f"slice {index}: " if self.layout.slices > 1 else ""
                return f"{where}checksum {found:016x}, expected {int(expected[index]):016x}"
        return ""

    def read_record(self, layer: int, expert: int, out: NDArray[np.uint8]) -> None:
        """Read one record into `out`, contiguous uint8 [record stride], and verify its checksum.

        Bytes that fail are read from the disk once more, past the page cache; then it is a RecordReadError.
        """
        found = self._read_once(layer, expert, out)
        if found:
            os.posix_fadvise(self.descriptor(layer), self.offset(expert), out.size, os.POSIX_FADV_DONTNEED)
            found = self._read_once(layer, expert, out)
        if found:
            raise RecordReadError(
                f"record of layer {self.manifest.layers[layer].number}, expert {expert} in {self.record_file(layer)}: "
                f"{found}; the disk returned other bytes than were written: check the disk, then remove that file and "
                f"run `moetier store build CHECKPOINT {quote(str(self.path))}`, which builds this layer anew"
            )

    def close(self) -> None:
        """Close the record files; a later read opens them again."""
        with self._lock:
            while self._files:
                os.close(self._files.popitem()[1])

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read_once(self, layer: int, expert: int, out: NDArray[np.uint8]) -> str:
        """Return what is wrong with the record as it was read; "" if nothing is."""
        if out.size != self.manifest.record_stride:
            raise ValueError(f"a record has {self.manifest.record_stride} bytes, the buffer {out.size}")
        try:
            done = pread_into(self.descriptor(layer), out, self.offset(expert))
        except OSError as error:
            return f"found no bytes ({error.strerror})"
        if done != out.size:
            return f"found only {done} of {out.size} bytes"
        return self.problem(layer, expert, out)

    def descriptor(self, layer: int) -> int:
        """The file of a layer's records, open for reading for as long as the store is."""
        with self._lock:
            if layer not in self._files:
                self._files[layer] = self.open_records(layer)
            return self._files[layer]

    def open_records(self, layer: int, flags: int = 0) -> int:
        """Open the file of a layer's records; StoreError where another one has taken its place meanwhile.

        OSError with EINVAL where the file system refuses the flags.
        """
        path = self.record_file(layer)
        fd = open_to_read(path, flags)
        status = os.fstat(fd)
        found = status.st_dev, status.st_ino
        # The same store under another inode is none the worse: some file systems number files anew.
        if self._inodes.get(layer, found) != found and Manifest.read(self.path) != self.manifest:
            os.close(fd)
            raise StoreError(
                f"{path} is not the file that was there when the store was opened: expected that {self.path} stays as "
                "it is while it is used, found another store in its place; start again"
            )
        return fd

    def _read_sums(self, index: int) -> NDArray[np.uint64]:
        entry, shape = self.manifest.layers[index], (self.manifest.geometry.experts, self.manifest.slices)
        size = 8 * shape[0] * shape[1]
        try:
            raw = read_small(self.path / entry.sums, size)
        except OSError as error:
            raise StoreError(
                f"{self.path / entry.sums} cannot be read: {error.strerror}; run `moetier store "
                f"build CHECKPOINT {self.path}`, which builds this layer anew"
            ) from error
        digest = hashlib.sha256(raw).hexdigest()
        if digest != entry.sums_sha256 or len(raw) != size:
            raise StoreError(
                f"{self.path / entry.sums}: expected {size} bytes with sha256 "
                f"{entry.sums_sha256}, found {len(raw)} with {digest}; run `moetier store build CHECKPOINT "
                f"{self.path}`, which builds this layer anew"
            )
        return np.frombuffer(raw, "<u8").astype(np.uint64, copy=False).reshape(shape)

    def _not_ours(self, found: str) -> StoreError:
        """The error for a store.json that no build of this version writes, and none may replace."""
        return StoreError(f"{self.path}: {found}; build the store again with this version, into another folder")

    def _check_sizes(self) -> None:
        manifest, layout = self.manifest, self.layout
        if manifest.record_stride != layout.stride:
            raise self._not_ours(
                f"expected records of {layout.stride} bytes for its geometry, found {manifest.record_stride}"
            )
        if len(self._index) != len(manifest.layers):
            raise self._not_ours("store.json has a layer number twice")
        expected = manifest.geometry.experts * layout.stride
        for index in range(len(manifest.layers)):
            path = self.record_file(index)
            status = path.stat() if path.is_file() else None
            size = None if status is None else status.st_size
            if status is not None:
                self._inodes[index] = status.st_dev, status.st_ino
            if size != expected:
                raise StoreError(
                    f"{path}: expected {expected} bytes ({manifest.geometry.experts} records), found "
                    f"{'no file' if size is None else size}; run `moetier store build CHECKPOINT "
                    f"{quote(str(self.path))}`, which builds this layer anew"
                )
