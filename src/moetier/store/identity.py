"""Which checkpoint a store belongs to: a hash of its config, its headers and some bytes of every tensor.

Headers alone do not tell a model from its fine-tune, so every tensor contributes bytes (samples.py).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from moetier.checkpoint.shards import Shards
from moetier.errors import CheckpointError
from moetier.store.work import Workers

HASH_CHUNK = 1 << 22
READERS = 8
"""Shards that are sampled at once: on a cold disk each read waits for it."""


@dataclass(frozen=True)
class Identity:
    """headers: of config, index and headers, version 1; sampled: with bytes of every tensor, version 2.

    sampled is None in what a moetier wrote that knew only headers.
    """

    headers: str
    sampled: str | None

    @classmethod
    def recorded(cls, identity: str, headers: str | None) -> Identity:
        """From what a store or a trimmed checkpoint has on file; without `headers` it knew nothing else."""
        return cls(identity, None) if headers is None else cls(headers, identity)

    def differs(self, other: Identity) -> tuple[str, str] | None:
        """The first two values that contradict each other; None where the two may be one checkpoint."""
        if self.sampled is not None and other.sampled is not None:
            return None if self.sampled == other.sampled else (self.sampled, other.sampled)
        return None if self.headers == other.headers else (self.headers, other.headers)

    def certain_of(self, other: Identity) -> bool:
        """Whether both know samples; else equal headers are all that was compared."""
        return self.sampled is not None and other.sampled is not None


def headers_identity(config: bytes, shards: Shards) -> str:
    """sha256 (hex) over config.json, the index and every shard's name, size and header: version 1."""
    return _headers(config, shards).hexdigest()


def content_identity(config: bytes, shards: Shards) -> str:
    """As `headers_identity`, and every byte of every shard."""
    digest = _headers(config, shards)
    digest.update(b"content")
    for shard in shards.shards:
        _hash_file(shard.path, digest)
    return digest.hexdigest()


def sampled_identity(config: bytes, shards: Shards) -> str:
    """As `headers_identity`, and the samples of every tensor: version 2."""
    digest = hashlib.sha256(b"moetier checkpoint 2")
    digest.update(_headers(config, shards).digest())
    with Workers(min(READERS, max(len(shards.shards), 1)), "moetier-identity") as workers:
        for sample in workers.map(shards.sampled, shards.shards):
            digest.update(bytes.fromhex(sample))
    return digest.hexdigest()


def _headers(config: bytes, shards: Shards) -> hashlib._Hash:
    digest = hashlib.sha256(b"moetier checkpoint 1")
    parts = [config, shards.index]
    parts += [f"{s.path.name} {s.size} {s.header_sha256}".encode() for s in shards.shards]
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest


def _hash_file(path: Path, digest: hashlib._Hash) -> None:
    try:
        with path.open("rb") as file:
            while chunk := file.read(HASH_CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; check the disk") from error
