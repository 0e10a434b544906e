"""Some bytes of every tensor of a shard, at positions that follow from its header: what an identity has of its content.

A shard is sampled by itself, wherever it lies and whenever it arrives.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from moetier.checkpoint.names import is_expert_tensor
from moetier.errors import CheckpointError

if TYPE_CHECKING:
    from moetier.checkpoint.shards import Shard, Tensor

SAMPLE = 64
"""Bytes of a sample. The end of a tensor and the beginning of the next one join into one read."""
LEAST = 2
"""Steps from the first sample of a tensor (or of one expert in it) to its last: beginning, middle and end."""
STEP = 1 << 16
"""Bytes between two samples of tensors that are no expert's: few, and a fine-tune often changes them alone..."""
MOST = 64
"""...and at most so often."""
MOST_EXPERTS = 1 << 12
"""A shape that says more in one tensor does not make us read forever."""
CHUNK = 1 << 20


def sample_shard(shard: Shard) -> str:
    """sha256 (hex) over the samples of a shard's tensors, in the order of the file."""
    digest = hashlib.sha256()
    try:
        fd = os.open(shard.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # no read ahead of what nobody wants
            for start, stop in _joined(shard.tensors.values()):
                while start < stop:
                    data = os.pread(fd, min(stop - start, CHUNK), start)
                    if not data:
                        raise CheckpointError(
                            f"{shard.path}: expected at least {stop} bytes, found {start}; download it again"
                        )
                    digest.update(data)
                    start += len(data)
        finally:
            os.close(fd)
    except OSError as error:
        raise CheckpointError(f"{shard.path} cannot be read: {error.strerror}; check the disk") from error
    return digest.hexdigest()


def _joined(tensors: Iterable[Tensor]) -> Iterator[tuple[int, int]]:
    """The byte ranges of a file that are sampled; those that touch or overlap are one."""
    begin = end = -1
    for start, stop in sorted(span for tensor in tensors for span in _samples(tensor)):
        if start > end:
            if end > begin:
                yield begin, end
            begin = start
        end = max(end, stop)
    if end > begin:
        yield begin, end


def _samples(tensor: Tensor) -> Iterator[tuple[int, int]]:
    """Byte ranges of one tensor: beginning, end, and even steps between them; all of a small one."""
    last = max(tensor.nbytes - SAMPLE, 0)
    steps = _steps(tensor)
    for step in range(steps + 1):
        start = last * step // steps
        yield tensor.offset + start, tensor.offset + min(start + SAMPLE, tensor.nbytes)


def _steps(tensor: Tensor) -> int:
    if not is_expert_tensor(tensor.name):
        return min(max(tensor.nbytes // STEP, LEAST), MOST)
    experts = tensor.shape[0] if len(tensor.shape) > 2 else 1  # all experts of a layer in one tensor
    return LEAST * min(max(experts, 1), MOST_EXPERTS)
