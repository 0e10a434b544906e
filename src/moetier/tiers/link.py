"""Copies from host memory to the device, by addresses: a layer of a long prompt makes one for every missed expert."""

from __future__ import annotations

import ctypes

import torch

from moetier.errors import MoetierError


class CopyError(MoetierError):
    """The driver refused a copy to the device."""


def copy_to_device(target: int, source: int, size: int, stream: torch.cuda.Stream | None) -> None:
    """Start copying `size` bytes to the device's address `target` on `stream`; None: at once, on a CPU "device".

    source: the address of memory that the device can read, which stays as it is until the copy has ended. By addresses
    because a copy between tensors costs the host many times what the driver's call takes.
    """
    if stream is None:
        ctypes.memmove(target, source, size)
        return
    from cuda.bindings import driver

    (status,) = driver.cuMemcpyHtoDAsync(target, source, size, stream.cuda_stream)
    if int(status) != 0:
        raise CopyError(
            f"copying {size:,} bytes to the device: expected success, found {status.name}; restart, and look at "
            "`dmesg` and `moetier doctor` if it comes again"
        )
