"""At most K shards on disk: each is fetched when it is needed, and removed when its room is needed."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moetier.checkpoint.samples import sample_shard
from moetier.checkpoint.shards import Shard, Shards, Tensor
from moetier.errors import CheckpointError
from moetier.files import store_errors, sync_folder, write_durably
from moetier.store.remote.fetch import Fetcher, RemoteFile

PART = ".part"
HASH_CHUNK = 1 << 22


class ShardCache:
    """Shards of a checkpoint in a folder.

    A shard is absent, arriving (one thread fetches it, others wait) or here; here it may be held by readers. Those that
    are here and arriving are never more than `keep`. A shard that is held is not removed, and a reader holds one at a
    time, so that waiting for room always ends.
    """

    def __init__(self, folder: Path, files: dict[str, RemoteFile], fetcher: Fetcher, keep: int) -> None:
        self.folder = folder
        self.files = files
        self.fetcher = fetcher
        self.keep = keep
        self.arrived: Callable[[str], None] = lambda name: None
        """Called with each shard that arrived, before anybody can hold or remove it."""
        self.fetched = 0
        """Bytes fetched since the start."""
        self._change = threading.Condition()
        self._arriving: set[str] = set()
        self._here: dict[str, int] = {}  # name -> readers; the least recently used first
        for name, file in files.items():
            if (folder / name).is_file() and (folder / name).stat().st_size == file.size:
                self._here[name] = 0

    @contextmanager
    def hold(self, name: str) -> Iterator[None]:
        """Have the shard on disk for as long as the block runs."""
        self._acquire(name)
        try:
            yield
        finally:
            with self._change:
                self._here[name] -= 1
                self._change.notify_all()

    def _acquire(self, name: str) -> None:
        with self._change:
            while name not in self._here:
                if name not in self._arriving and self._make_room():
                    self._arriving.add(name)
                    break
                self._change.wait()
            else:
                self._here[name] = self._here.pop(name) + 1
                return
        try:
            self._fetch(self.files[name])
            self.arrived(name)
        except BaseException:
            with self._change:
                self._arriving.remove(name)
                self._change.notify_all()
            raise
        with self._change:
            self._arriving.remove(name)
            self._here[name] = 1
            self._change.notify_all()

    def _make_room(self) -> bool:
        """Remove shards nobody holds, the least recently used first, until one more fits; whether it does."""
        while len(self._here) + len(self._arriving) >= self.keep:
            idle = next((name for name, readers in self._here.items() if readers == 0), None)
            if idle is None:
                return False
            with store_errors(f"{self.folder / idle} cannot be removed"):
                (self.folder / idle).unlink()
            del self._here[idle]
        return True

    def _fetch(self, file: RemoteFile) -> None:
        """Fetch a whole file; what is there of it from an earlier attempt is kept."""
        path, part = self.folder / file.name, self.folder / (file.name + PART)
        for last in (False, True):
            with store_errors(f"{part} cannot be written"):
                path.parent.mkdir(parents=True, exist_ok=True)
                with part.open("ab") as out:
                    start = out.tell()
                    if start > file.size:
                        out.truncate(start := 0)
                    self.fetcher.stream(file, start, file.size, out.write)
                    self.fetched += file.size - start
                    out.flush()
                    os.fsync(out.fileno())
                if file.sha256 is None or _sha256(part) == file.sha256:
                    part.rename(path)
                    sync_folder(path.parent)
                    return
                part.unlink()
            if last:
                raise CheckpointError(
                    f"{file.url}: expected content with sha256 {file.sha256}, found other bytes twice; "
                    "something between here and the repository changes them: try again, or from another network"
                )


class RemoteShards(Shards):
    """Tensors whose shards are fetched when they are read."""

    remote = True

    def __init__(
        self,
        folder: Path,
        index: bytes,
        shards: list[Shard],
        cache: ShardCache,
        samples: Path,
        version: str,
        unread: tuple[str, ...] = (),
    ) -> None:
        """samples: folder for what the identity has of each shard, which may be gone when it is asked for."""
        super().__init__(folder, index, shards, unread)
        self.cache = cache
        self.version = version
        self._samples = samples
        self._by_name = {shard.path.name: shard for shard in shards}

    def keep_sample(self, name: str) -> None:
        """Note what the identity has of a shard that is here."""
        with store_errors(f"{self._samples} cannot be written"):
            self._samples.mkdir(exist_ok=True)
            write_durably(self._samples / name, sample_shard(self._by_name[name]).encode())

    def sampled(self, shard: Shard) -> str:
        """As it was noted when the shard arrived."""
        note = self._samples / shard.path.name
        if not note.exists():
            with self.cache.hold(shard.path.name):  # of an earlier run that noted nothing
                self.keep_sample(shard.path.name)
        return note.read_text()

    def read(self, tensor: Tensor, start: int = 0, nbytes: int | None = None) -> NDArray[np.uint8]:
        with self.cache.hold(tensor.file.name):
            return super().read(tensor, start, nbytes)

    def hold(self, name: str) -> AbstractContextManager[None]:
        return self.cache.hold(name)

    def reopened(self) -> Shards:
        """A commit does not change."""
        return self


class RangedShards(Shards):
    """Tensors whose bytes are fetched one range at a time, and not kept: for a look at a few."""

    def __init__(self, shards: RemoteShards) -> None:
        super().__init__(shards.folder, shards.index, shards.shards)
        self.cache = shards.cache

    def read(self, tensor: Tensor, start: int = 0, nbytes: int | None = None) -> NDArray[np.uint8]:
        size = tensor.nbytes - start if nbytes is None else nbytes
        at, cache = tensor.offset + start, self.cache
        return np.frombuffer(cache.fetcher.read(cache.files[tensor.file.name], at, at + size), np.uint8)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(HASH_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
