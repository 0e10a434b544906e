"""The CUDA sources compiled for the CPU by cuda_on_cpu.h, to be launched as nvrtc.Kernel launches them."""

import ctypes
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from moetier.kernels.cuda import nvrtc

MULTIPROCESSORS = 3
SHARED_BYTES_A_BLOCK = 227 * 1024


def without_assembly(source: str) -> str:
    """A source less its functions with inline assembly, which the header has."""
    kept, function = [], ""
    for line in source.splitlines(keepends=True):
        if function or line.startswith(("__device__", "template")):
            function += line
            if function.count("{") == function.count("}") and function.rstrip().endswith(("}", ";")):
                free = re.match(r"(template <[^>]*>\s*)?__device__", function)
                kept.append("" if free and "asm" in function else function)
                function = ""
        else:
            kept.append(line)
    return re.sub(r"extern __shared__ .*shared\[\];", "u8 *const shared = emulated::block->shared;", "".join(kept))


class Kernel:
    """One kernel of a compiled source."""

    def __init__(self, function: "ctypes._CFuncPtr", threads: int, shared_bytes: int) -> None:
        self._function, self._threads, self._shared_bytes = function, threads, shared_bytes

    def launch(
        self,
        grid: tuple[int, ...],
        arguments: Sequence[torch.Tensor | ctypes.Structure | int | None],
        dependent: bool = False,
        shared_bytes: int | None = None,
        together: bool = False,
    ) -> None:
        values = [_value(a) for a in arguments]
        shared = self._shared_bytes if shared_bytes is None else shared_bytes
        self._function(grid[0], grid[1], self._threads, shared, together, (ctypes.c_uint64 * len(values))(*values))


def _value(argument: torch.Tensor | ctypes.Structure | int | None) -> int:
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr()
    return ctypes.addressof(argument) if isinstance(argument, ctypes.Structure) else argument or 0


class Emulation:
    """Compiles into a folder, each source once for the same macros; `load` is what nvrtc.load is on a GPU."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._libraries: dict[str, ctypes.CDLL] = {}

    def load(
        self,
        source: str,
        macros: Mapping[str, str | int],
        device: torch.device,
        kernels: Mapping[str, tuple[int, int]],
    ) -> dict[str, Kernel]:
        key = f"{source} {sorted(macros.items())} {sorted(kernels)}"
        if key not in self._libraries:
            self._libraries[key] = self._compile(source, macros, list(kernels))
        return {name: Kernel(self._libraries[key][f"launch_{name}"], *sizes) for name, sizes in kernels.items()}

    def _compile(self, source: str, macros: Mapping[str, str | int], kernels: list[str]) -> ctypes.CDLL:
        for path in nvrtc.SOURCES.glob("*.*"):
            (self._folder / path.name).write_text(without_assembly(path.read_text()))
        main = self._folder / "main.cpp"
        parameters = "unsigned x, unsigned y, unsigned threads, size_t shared, bool together, const uint64_t *values"
        launches = [
            f'extern "C" __attribute__((visibility("default"))) void launch_{name}({parameters}) '
            f"{{ emulated::launch({name}, {{x, y, 1}}, threads, shared, together, values); }}\n"
            for name in kernels
        ]
        main.write_text(f'#include "panels_on_cpu.h"\n#include "{source}"\n' + "".join(launches))
        library = self._folder / f"library{len(self._libraries)}.so"
        command = ["c++", "-std=c++17", "-O1", "-w", "-ffp-contract=off", "-fno-strict-aliasing", "-shared", "-fPIC"]
        command += ["-fvisibility=hidden"]  # the libraries of other macros have the same names
        defines = [f"-D{name}={value}" for name, value in macros.items()]
        include = ["-I", str(Path(__file__).parent)]
        subprocess.run([*command, "-pthread", *defines, *include, str(main), "-o", str(library)], check=True)
        return ctypes.CDLL(str(library))
