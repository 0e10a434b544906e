"""CUDA C++ kernels compiled at run time for one geometry and one device, and launched on torch's streams."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from moetier.errors import MoetierError
from moetier.kernels.cuda.kept import kept, key_of

OPTIONS = ("--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")
"""Every operation rounds on its own, by itself and to nearest: said, not left to defaults."""
SOURCES = Path(__file__).parent / "source"


class KernelBuildError(MoetierError):
    """A CUDA kernel does not compile or load on this machine."""


def _ok(result: tuple[Any, ...], what: str, log: str = "") -> Any:
    """The value of a call of cuda.bindings, or an error that says what was tried."""
    status, *values = result
    if int(status) != 0:
        raise KernelBuildError(f"{what}: expected success, found {status.name}\n{log}".strip())
    return values[0] if len(values) == 1 else values


def architecture(device: torch.device) -> str:
    """Return what kernels for a device are compiled for, like "sm_80"; wgmma is only in "sm_90a"."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}{'a' if major == 9 else ''}"


def shared_memory_a_block(device: torch.device) -> int:
    """The most bytes of shared memory that a block may ask for."""
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]


def multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def header_files() -> list[Path]:
    """Everything that a .cu file may include."""
    return sorted((*SOURCES.glob("*.cuh"), *SOURCES.glob("*.h")))


def compiler_options(macros: Mapping[str, str | int], arch: str) -> list[str]:
    fixed = [f"--gpu-architecture={arch}", *OPTIONS]
    return [*fixed, *(f"-D{name}={value}" for name, value in sorted(macros.items()))]


def compile_source(source: str, macros: Mapping[str, str | int], arch: str) -> tuple[bytes, str]:
    """Machine code and PTX of one of our .cu files for `arch`. Needs no GPU."""
    from cuda.bindings import nvrtc

    headers = {path.name.encode(): path.read_bytes() for path in header_files()}
    code = (SOURCES / source).read_bytes()
    program = _ok(
        nvrtc.nvrtcCreateProgram(code, source.encode(), len(headers), list(headers.values()), list(headers)),
        "creating an NVRTC program",
    )
    options = compiler_options(macros, arch)
    status = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    log = _read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
    _ok(status, f"compiling {source} for {arch}", log.decode(errors="replace"))
    cubin = _read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    ptx = _read(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
    nvrtc.nvrtcDestroyProgram(program)
    return cubin, ptx.decode()


def _read(size_of: Callable[..., Any], write_into: Callable[..., Any], program: Any) -> bytes:
    """Return what NVRTC writes into bytes of ours: never into a single one (an empty log), which Python shares."""
    size = _ok(size_of(program), "reading NVRTC's output")
    room: bytes = b" " * (size + 2)
    _ok(write_into(program, room), "reading NVRTC's output")
    return room[:size]


def cached_cubin(source: str, macros: Mapping[str, str | int], arch: str) -> bytes:
    """Machine code of a .cu file, or what an earlier run made of the same by the same compiler."""
    from cuda.bindings import nvrtc

    texts = [SOURCES / source, *header_files()]
    made_from = {
        "files": [(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in texts],
        "options": compiler_options(macros, arch),
        "compiler": [*_ok(nvrtc.nvrtcVersion(), "asking for NVRTC's version"), *compiler_packages()],
    }
    return kept(f"{Path(source).stem}-{arch}", key_of(made_from), lambda: compile_source(source, macros, arch)[0])


def compiler_packages() -> list[str]:
    """NVRTC's packages with all of their versions, of which it tells two numbers itself."""
    names = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc-cu13", "cuda-bindings")
    found = []
    for name in names:
        with suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name}=={importlib.metadata.version(name)}")
    return found


class Kernel:
    """One loaded kernel. `dependent` launches may start before the previous kernel of the stream has ended.

    Launched by one thread at a time.
    """

    def __init__(self, function: Any, threads: int, shared_bytes: int, device: int) -> None:
        """device: its index."""
        from cuda.bindings import driver

        self._driver, self._function, self.threads, self.shared_bytes = driver, function, threads, shared_bytes
        self._device = device
        self._early_start = torch.cuda.get_device_capability(device) >= (9, 0)  # older devices know no such launches
        self._config = cache(self._make_config)
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _ok(driver.cuFuncSetAttribute(function, attribute, shared_bytes), f"asking for {shared_bytes} B shared memory")

    def _make_config(self, dependent: bool, together: bool) -> Any:
        """Return what launches of one kind have in common."""
        driver, attributes = self._driver, []
        config = driver.CUlaunchConfig()
        config.blockDimX, config.blockDimY, config.blockDimZ = self.threads, 1, 1
        if dependent and self._early_start:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            attributes.append(attribute)
        if together:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            attribute.value.cooperative = 1
            attributes.append(attribute)
        config.attrs, config.numAttrs = attributes, len(attributes)
        return config

    def launch(
        self,
        grid: tuple[int, ...],
        arguments: Sequence[torch.Tensor | ctypes.Structure | int | None],
        dependent: bool = False,
        shared_bytes: int | None = None,
        together: bool = False,
    ) -> None:
        """Tensors and None are passed as pointers, integers as 8 bytes, of which an int parameter takes the low 4,
        structures by value.

        shared_bytes: dynamic shared memory where it is less than the most that was asked for. together: all blocks run
        at once, whatever else is on the device, so that they may wait for each other.
        """
        driver, config = self._driver, self._config(dependent, together)
        config.gridDimX, config.gridDimY, config.gridDimZ = grid[0], grid[1], grid[2] if len(grid) > 2 else 1
        config.sharedMemBytes = self.shared_bytes if shared_bytes is None else shared_bytes
        config.hStream = driver.CUstream(torch.cuda.current_stream(self._device).cuda_stream)
        values = tuple(a.data_ptr() if isinstance(a, torch.Tensor) else 0 if a is None else a for a in arguments)
        types = tuple(map(_parameter_type, arguments))
        _ok(driver.cuLaunchKernelEx(config, self._function, (values, types), 0), "launching a kernel")


def _parameter_type(argument: torch.Tensor | ctypes.Structure | int | None) -> Any:
    """How cuda.bindings packs a parameter: None is a structure by value."""
    if isinstance(argument, ctypes.Structure):
        return None
    return ctypes.c_int64 if isinstance(argument, int) else ctypes.c_void_p


@cache
def _module(source: str, macros: tuple[tuple[str, str | int], ...], arch: str, device: int) -> tuple[Any, bytes]:
    from cuda.bindings import driver

    cubin = cached_cubin(source, dict(macros), arch)
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # makes torch's context current
        return _ok(driver.cuModuleLoadData(cubin), f"loading {source} for {arch}"), cubin


def load(
    source: str, macros: Mapping[str, str | int], device: torch.device, kernels: Mapping[str, tuple[int, int]]
) -> dict[str, Kernel]:
    """The kernels of a file on `device`; kernels: name -> (threads, bytes of dynamic shared memory)."""
    from cuda.bindings import driver

    index = device.index if device.index is not None else torch.cuda.current_device()
    module, _ = _module(source, tuple(sorted(macros.items())), architecture(device), index)
    return {
        name: Kernel(_ok(driver.cuModuleGetFunction(module, name.encode()), f"finding {name}"), *sizes, index)
        for name, sizes in kernels.items()
    }
