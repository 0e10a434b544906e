"""The machine that we are on against the documents: which machine file is its own, what a recipe needs."""

from __future__ import annotations

import os
from pathlib import Path

from moetier_bench import BenchError
from moetier_bench.documents import Library, MachineFile, Recipe
from moetier_bench.provenance import machine_here


def machine_of(library: Library) -> MachineFile:
    """The machine file of this machine's hardware; BenchError if there is none."""
    here = MachineFile.model_validate(machine_here("here", "this machine"))
    for name in library.names("machines"):
        named = library.machine(name)
        if named.identity == here.identity:
            return named
    raise BenchError(
        "no file of machines/ describes this hardware: write one with `moetier bench machine NAME --summary TEXT`"
    )


def check_machine(recipe: Recipe, named: MachineFile) -> None:
    """BenchError if the machine is not the one named, or too small for the recipe."""
    here = MachineFile.model_validate(machine_here("here", "this machine"))
    if here.identity != named.identity:
        raise BenchError(f"this machine is not {named.id}: its hardware is {here.identity}, not {named.identity}")
    needs, gpus = recipe.requires, sorted((gpu.memory_bytes for gpu in named.gpus), reverse=True)
    lacks = []
    if len(named.cpu.allowed) < needs.cpus:
        lacks.append(f"{needs.cpus} CPUs (found {len(named.cpu.allowed)})")
    if named.memory.limit_bytes < needs.host_gib * 2**30:
        lacks.append(f"{needs.host_gib:g} GiB of memory (found {named.memory.limit_bytes / 2**30:.1f})")
    if len(gpus) < needs.gpus or any(size < needs.gpu_gib * 2**30 for size in gpus[: needs.gpus]):
        found = ", ".join(f"{size / 2**30:.0f} GiB" for size in gpus) or "none"
        lacks.append(f"{needs.gpus} GPUs of {needs.gpu_gib:g} GiB (found {found})")
    if lacks:
        raise BenchError(f"{recipe.id} needs {'; '.join(lacks)}")


def set_folders(root: Path) -> tuple[Path, ...]:
    """Where evaluation sets may be."""
    shared = os.environ.get("MOETIER_SHARED_MODELS") or str(root.parent / "shared" / "models")
    return (root / "models" / "eval", Path(shared) / "eval")
