"""Copies between pinned host memory and devices, and within a device, timed by the device's own events."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moetier.errors import SettingsError
from moetier.machine.facts import Gpu, GpuRate

if TYPE_CHECKING:
    import torch

COPY_BYTES = 256 << 20
COPIES = 8
"""Back to back in one timing."""
REPEATS = 5


@dataclass
class Links:
    """Rates of all devices."""

    host_to_device: tuple[GpuRate, ...] = ()
    device_to_host: tuple[GpuRate, ...] = ()
    device_copy: tuple[GpuRate, ...] = ()


@dataclass
class _Device:
    """Buffers of COPY_BYTES on one device, and pinned ones on the host."""

    gpu: int
    device: torch.device
    host: torch.Tensor
    here: torch.Tensor
    there: torch.Tensor
    stream: torch.cuda.Stream


def measure_links(gpus: tuple[Gpu, ...]) -> Links:
    """Each device alone, then host to device for all at once, since they may share a root port; none: no rates."""
    if not gpus:
        return Links()
    try:
        return _measured(_devices(gpus))
    except RuntimeError as error:  # torch's: out of memory on a device, or no memory that could be pinned
        reason = str(error).partition("\n")[0]
        raise SettingsError(
            f"expected to copy {COPY_BYTES >> 20} MiB from and to each of {len(gpus)} devices, found: {reason}; "
            "stop what uses them (nvidia-smi lists it), or raise the limit on pinned memory"
        ) from error


def _measured(devices: list[_Device]) -> Links:
    links = Links(
        host_to_device=tuple(_alone(at, lambda at: at.here.copy_(at.host, non_blocking=True)) for at in devices),
        device_to_host=tuple(_alone(at, lambda at: at.host.copy_(at.here, non_blocking=True)) for at in devices),
        device_copy=tuple(_alone(at, lambda at: at.there.copy_(at.here)) for at in devices),
    )
    if len(devices) > 1:
        links.host_to_device += _together(devices)
    return links


def _devices(gpus: tuple[Gpu, ...]) -> list[_Device]:
    """CUDA may number devices otherwise than NVML, so they are matched by UUID where both know it."""
    try:
        import torch
    except ImportError:
        raise SettingsError(
            f"expected torch to measure {len(gpus)} devices with, found none; pip install 'moetier[gpu]'"
        ) from None
    if not torch.cuda.is_available():
        raise SettingsError(
            f"expected a CUDA build of torch to measure {len(gpus)} devices, found torch {torch.__version__}; "
            "install one, or hide the devices: CUDA_VISIBLE_DEVICES="
        )
    numbers = {
        f"GPU-{getattr(torch.cuda.get_device_properties(at), 'uuid', '')}": at
        for at in range(torch.cuda.device_count())
    }
    found = []
    for gpu in gpus:
        device = torch.device("cuda", numbers.get(gpu.uuid or "", gpu.index))
        found.append(
            _Device(
                gpu=gpu.index,
                device=device,
                host=torch.ones(COPY_BYTES, dtype=torch.uint8, pin_memory=True),
                here=torch.ones(COPY_BYTES, dtype=torch.uint8, device=device),
                there=torch.ones(COPY_BYTES, dtype=torch.uint8, device=device),
                stream=torch.cuda.Stream(device),  # type: ignore[no-untyped-call]
            )
        )
        torch.cuda.synchronize(device)
    return found


def _alone(at: _Device, copy: Callable[[_Device], object]) -> GpuRate:
    return _median([_timed([at], copy)[0] for _ in range(REPEATS + 1)], at, 1)


def _together(devices: list[_Device]) -> tuple[GpuRate, ...]:
    runs = [_timed(devices, lambda at: at.here.copy_(at.host, non_blocking=True)) for _ in range(REPEATS + 1)]
    return tuple(_median([run[i] for run in runs], at, len(devices)) for i, at in enumerate(devices))


def _timed(devices: list[_Device], copy: Callable[[_Device], object]) -> list[float]:
    """Seconds of COPIES copies on each device, all started before any is waited for."""
    import torch

    events = []
    for at in devices:
        with torch.cuda.device(at.device), torch.cuda.stream(at.stream):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            for _ in range(COPIES):
                copy(at)
            end.record()
            events.append((start, end))
    for _, end in events:
        end.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in events]


def _median(seconds: list[float], at: _Device, at_once: int) -> GpuRate:
    """The first run warms up and does not count."""
    speed = COPIES * COPY_BYTES / statistics.median(seconds[1:])
    return GpuRate(gpu=at.gpu, bytes_per_s=speed, at_once=at_once)
