"""Devices: from NVML where its bindings are installed (or vLLM's copy), else from torch; and what idles on the bus.

The order and the choice are those of CUDA_VISIBLE_DEVICES over NVML's order, which is the bus's. No GPU is no error.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypedDict

from moetier.errors import SettingsError
from moetier.machine import limits as machine
from moetier.machine.facts import Gpu
from moetier.machine.probe.files import number, text

NVIDIA = "0x10de"
DISPLAY_CLASSES = ("0x0300", "0x0302")
"""PCI classes of VGA and of 3D controllers."""
PCIE_GENERATIONS = {"2.5": 1, "5": 2, "8": 3, "16": 4, "32": 5, "64": 6}
"""By GT/s."""
P2P_READ, P2P_OK = 0, 0
"""NVML's numbers for reads between devices and for "they work": the bindings' own constant for the first is a tuple."""


class BusFacts(TypedDict):
    """Fields of `Gpu` that the kernel knows."""

    pcie_generation: int | None
    pcie_width: int | None
    pcie_generation_now: int | None
    pcie_width_now: int | None
    numa_node: int | None


def probe_gpus(root: Path = machine.ROOT) -> tuple[Gpu, ...]:
    """The devices that this process may use; SettingsError where the driver knows one that does not answer."""
    nvml = _nvml()
    if nvml is None:
        return tuple(_from_torch(root))
    try:
        return tuple(_from_nvml(nvml, root))
    except nvml.NVMLError as error:
        raise SettingsError(
            f"expected the driver to describe its devices, found: {error}; see nvidia-smi and the kernel's log, and "
            "reset the device or start the machine anew"
        ) from error
    finally:
        nvml.nvmlShutdown()


def unusable_gpus(usable: int, root: Path = machine.ROOT) -> tuple[str, ...]:
    """NVIDIA devices on the bus, if none of them is usable: "address (vendor device)"."""
    if usable:
        return ()
    found = []
    for folder in sorted((root / "sys/bus/pci/devices").glob("*")):
        vendor, kind = text(folder / "vendor"), text(folder / "class") or ""
        if vendor == NVIDIA and kind.startswith(DISPLAY_CLASSES):
            found.append(f"{folder.name} ({vendor} {text(folder / 'device')})")
    return tuple(found)


def _nvml() -> Any:
    """NVML, initialized; None without bindings, library or driver."""
    nvml = _bindings()
    if nvml is None:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    return nvml


def _bindings() -> Any:
    """nvidia-ml-py, else vLLM's copy of it, loaded without vLLM; None without either."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        pass
    vllm = importlib.util.find_spec("vllm")
    for folder in (vllm and vllm.submodule_search_locations) or ():
        file = Path(folder) / "third_party" / "pynvml.py"
        spec = importlib.util.spec_from_file_location("moetier_pynvml", file) if file.is_file() else None
        if spec is not None and spec.loader is not None:
            module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # it looks itself up there
            spec.loader.exec_module(module)
            return module
    return None


def _from_nvml(nvml: Any, root: Path) -> Iterator[Gpu]:
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    uuids = [_string(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    visible = [handles[at] for at in visible_devices(uuids, os.environ)]
    for index, handle in enumerate(visible):
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
        total, free = _memory(nvml, handle, root)
        yield Gpu(
            index=index,
            name=_string(nvml.nvmlDeviceGetName(handle)),
            uuid=_string(nvml.nvmlDeviceGetUUID(handle)),
            compute_capability=f"{major}.{minor}",
            memory_bytes=total,
            free_bytes=free,
            pcie_generation=_ask(nvml, "nvmlDeviceGetMaxPcieLinkGeneration", handle),
            pcie_width=_ask(nvml, "nvmlDeviceGetMaxPcieLinkWidth", handle),
            pcie_generation_now=_ask(nvml, "nvmlDeviceGetCurrPcieLinkGeneration", handle),
            pcie_width_now=_ask(nvml, "nvmlDeviceGetCurrPcieLinkWidth", handle),
            numa_node=_numa_node(root, _string(nvml.nvmlDeviceGetPciInfo(handle).busId)),
            driver=_string(nvml.nvmlSystemGetDriverVersion()),
            peers=tuple(
                other
                for other, peer in enumerate(visible)
                if other != index and _ask(nvml, "nvmlDeviceGetP2PStatus", handle, peer, P2P_READ) == P2P_OK
            ),
        )


def _memory(nvml: Any, handle: Any, root: Path) -> tuple[int, int | None]:
    """Total and free bytes. A device that has the host's memory (GB10) has no answer of its own."""
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError_NotSupported:
        return machine.meminfo(root)["MemTotal"], None
    return int(memory.total), int(memory.free)


def _numa_node(root: Path, bus_id: str) -> int | None:
    """Return the host's memory node next to the device; NVML writes eight digits of the domain, the kernel four."""
    domain, _, rest = bus_id.lower().partition(":")
    return bus_facts(root, f"{domain[-4:]}:{rest}")["numa_node"]


def _ask(nvml: Any, name: str, *arguments: Any) -> int | None:
    """A number; None where device, driver or bindings do not know it, as virtual machines' often do not."""
    try:
        found = int(getattr(nvml, name)(*arguments))
    except (AttributeError, nvml.NVMLError):
        return None
    return found if 0 <= found < 1 << 16 else None


def _string(found: bytes | str) -> str:
    """Older bindings give bytes."""
    return found.decode() if isinstance(found, bytes) else found


def visible_devices(uuids: list[str], environment: Mapping[str, str]) -> list[int]:
    """Which of the devices CUDA shows, in its order: numbers or beginnings of UUIDs, up to the first that is none."""
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return list(range(len(uuids)))
    found: list[int] = []
    for name in (part.strip() for part in chosen.split(",")):
        if name.isdecimal():
            matches = [int(name)] if int(name) < len(uuids) else []
        else:
            matches = [at for at, uuid in enumerate(uuids) if name and uuid.startswith(name)]
        if len(matches) != 1 or matches[0] in found:
            break
        found += matches
    return found


def _from_torch(root: Path) -> Iterator[Gpu]:
    """Without NVML's bindings: the bus tells of the link what it knows.

    Free memory is not asked for: that would take some hundred MB of it, for as long as this process lives.
    """
    try:
        import torch
    except ImportError:
        return
    if torch.version.cuda is None or not torch.cuda.is_available():
        return
    count = torch.cuda.device_count()
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        yield Gpu(
            index=index,
            name=properties.name,
            uuid=f"GPU-{properties.uuid}" if hasattr(properties, "uuid") else None,
            compute_capability=f"{properties.major}.{properties.minor}",
            memory_bytes=properties.total_memory,
            peers=tuple(
                other for other in range(count) if other != index and torch.cuda.can_device_access_peer(index, other)
            ),
            **bus_facts(root, _address(properties)),
        )


def _address(properties: Any) -> str:
    """Return the device's address on the bus, in the kernel's form; older builds do not tell."""
    if not hasattr(properties, "pci_domain_id"):
        return "unknown"
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def bus_facts(root: Path, address: str) -> BusFacts:
    """Return what the kernel tells: the least of the device and the port above it is what both can reach."""
    device = (root / "sys/bus/pci/devices" / address).resolve()
    widths = [number(folder / "max_link_width") for folder in (device, device.parent)]
    generations = [_generation(folder / "max_link_speed") for folder in (device, device.parent)]
    return {
        "pcie_generation": min((found for found in generations if found), default=None),
        "pcie_width": min((found for found in widths if found), default=None),
        "pcie_generation_now": _generation(device / "current_link_speed"),
        "pcie_width_now": number(device / "current_link_width"),
        "numa_node": number(device / "numa_node"),
    }


def _generation(path: Path) -> int | None:
    """Return the generation of a speed such as "16.0 GT/s PCIe"."""
    words = (text(path) or "").split()
    return PCIE_GENERATIONS.get(words[0].removesuffix(".0")) if words else None
