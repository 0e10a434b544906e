"""Which rank of tensor parallelism this process is, and what the ranks tell each other at the start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed
from vllm.distributed import get_tp_group


def place() -> tuple[int, int]:
    """(rank, ranks) of this process."""
    group = get_tp_group()
    return group.rank_in_group, group.world_size


def gather(mine: Any) -> Sequence[Any]:
    """`mine` of every rank, in their order, through the group that vLLM keeps for the CPU."""
    group = get_tp_group()
    if group.world_size == 1:
        return [mine]
    everyone: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(everyone, mine, group=group.cpu_group)
    return everyone
