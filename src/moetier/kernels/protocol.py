"""Structures that device, mailbox and host share, as protocol.h declares it and the compiler laid it out."""

from __future__ import annotations

import ctypes
from typing import Any

from moetier.kernels.cpu import _native

_STRUCTS, _NUMBERS, _COUNTS = _native.protocol()

_KINDS: dict[str, Any] = {
    "p": ctypes.c_uint64,  # an address: of pinned memory, or of the device's
    "f32": ctypes.c_float,
    "u8": ctypes.c_uint8,
    "i32": ctypes.c_int32,
    "u32": ctypes.c_uint32,
    "u64": ctypes.c_uint64,
}

MAX_PAIRS = _NUMBERS["MAX_PAIRS"]
"""Pairs of a call that the decode kernels take, at most."""
MAX_STAGED = _NUMBERS["MAX_STAGED"]
"""Records that one call can stream, at most."""
STEP_THREADS = _NUMBERS["STEP_THREADS"]
"""Threads of a block that plans a step."""
STREAM_BLOCKS = _NUMBERS["STREAM_BLOCKS"]
"""Thread blocks that read records over the link."""
COUNTS: tuple[str, ...] = tuple(sorted((name for name in _COUNTS if name != "COUNTS"), key=_COUNTS.__getitem__))
"""Names of what a layer counts, in the order of its int64 words."""
WORD = 4


def _structure(name: str) -> type[ctypes.Structure]:
    _, fields = _STRUCTS[name]
    members = [(field, _KINDS[kind] * count if count > 1 else _KINDS[kind]) for field, kind, count, _ in fields]
    return type(name, (ctypes.Structure,), {"_fields_": members})


Box = _structure("Box")
"""The mailbox's words."""
Step = _structure("Step")
"""State of a hybrid step on the device; its table of slots, int32 [experts], follows."""
Costs = _structure("Costs")
HybridStep = _structure("HybridStep")
"""Arguments of a hybrid step's kernels beside the call; addresses are integers."""


def word(field: str) -> int:
    """Return the place of a field of Box among its int32 words."""
    return int(getattr(Box, field).offset) // WORD
