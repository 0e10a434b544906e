"""Place everything: the store, the records in DRAM, and the table of it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from moetier.budget import GIB, cpu_items, device_host_items, records_that_fit
from moetier.errors import StoreError
from moetier.launch import process as launcher
from moetier.launch.command import ServeRequest, tensor_parallel_size
from moetier.launch.progress import progress_bar
from moetier.machine import limits as machine
from moetier.store.build import build_from
from moetier.store.checkpoint import Checkpoint, is_expert_tensor
from moetier.store.match import compare_some
from moetier.store.match import open_store as open_store_of
from moetier.store.store import Store
from moetier.vllm_arguments import drafts_itself, speculates

console = Console(stderr=True)


def open_store(checkpoint: Checkpoint, path: Path, build: bool) -> Store:
    if not path.exists():
        if not build:
            paths = shlex.join((str(checkpoint.path), str(path)))
            raise StoreError(
                f"there is no store at {path}; build it with `moetier store build {paths}` or add --build-store"
            )
        with progress_bar() as step:
            built = build_from(checkpoint, path, check=2, progress=step)
        text = f"built {path}: {built.layers} layers x {built.experts} experts in {built.seconds:.1f} s"
        console.print(text, markup=False)
    return open_store_of(path, checkpoint)


def compare(store: Store, checkpoint: Checkpoint) -> None:
    """StoreError where an expert of the store is not the checkpoint's; a line of what was compared."""
    if (compared := compare_some(store, checkpoint, each=1)) is not None:
        console.print(f"{store.path}: {compared}", soft_wrap=True, markup=False, highlight=False)


def check_drafter(store: Store, request: ServeRequest) -> None:
    """StoreError if speculation asks for a drafter that the store was built without."""
    if drafts_itself(request.extra):
        store.require_drafter()


def place(
    checkpoint: Checkpoint, store: Store, request: ServeRequest, cpus: tuple[int, ...]
) -> tuple[int, dict[str, Any]]:
    """Records per layer, and the report of what lives where."""
    on_cpu = launcher.runs_on_cpu()
    drafts, facts = speculates(request.extra), checkpoint.facts
    dense = sum(
        tensor.nbytes
        for name, tensor in checkpoint.tensors.items()
        if not is_expert_tensor(name) and (drafts or not facts.drafts(name))
    )
    cache = int(request.kv_cache_gib * GIB) if on_cpu else 0
    manifest, stride = store.manifest, store.layout.stride
    experts = manifest.geometry.experts
    layers = store.served_layers(checkpoint.hidden_layers, drafts)
    ranks = tensor_parallel_size(request.extra)
    items = cpu_items(dense, cache) if on_cpu else device_host_items(ranks)
    records = records_that_fit(request.settings, store, layers, items, ranks)
    slots = request.settings.slots_of(experts) or 0  # what fits is known once the engine has started
    resident = slots - request.settings.spare_of(slots, experts)  # which DRAM does not hold too
    held = min(records, experts - resident)
    on_disk = (experts - resident - held) * layers
    tiers = [
        {"tier": "DRAM", "records": held * layers, "bytes": held * layers * stride},
        {"tier": "disk", "records": on_disk, "bytes": on_disk * stride},
        {"tier": "staging (DRAM)", "records": None, "bytes": request.settings.staging_records * stride},
        {"tier": "dense weights", "records": None, "bytes": dense},
    ]
    if on_cpu:
        tiers.append({"tier": "KV cache", "records": None, "bytes": cache})
    if request.settings.slots:
        size = slots * layers * stride if slots else None
        name = "device slots" if slots else "device slots (what fits)"
        tiers.insert(0, {"tier": name, "records": slots * layers if slots else None, "bytes": size or 0})
    report = {
        "model": str(checkpoint.path),
        "store": str(store.path),
        "contract": manifest.contract,
        "requantized": manifest.checkpoint.requantized,
        "layers": layers,
        "experts": experts,
        "records_per_layer_in_dram": records,
        "ranks": ranks,
        "compute_cpus": list(request.settings.cpus or machine.compute_cpus(cpus)),
        "tiers": tiers,
    }
    return records, report


def show(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(report), flush=True)  # whoever reads it waits for it
        return
    title = f"{report['model']}: {report['layers']} MoE layers of {report['experts']} experts"
    console.print(title, soft_wrap=True, markup=False, highlight=False)
    table = Table()
    table.add_column("lives in")
    table.add_column("records", justify="right")
    table.add_column("MiB", justify="right")
    for tier in report["tiers"]:
        records = "" if tier["records"] is None else f"{tier['records']:,}"
        table.add_row(tier["tier"], records, f"{tier['bytes'] / 2**20:,.1f}")
    console.print(table, markup=False)
    cpus = ", ".join(str(cpu) for cpu in report["compute_cpus"])
    if any(tier["tier"].startswith("device slots") for tier in report["tiers"]):
        console.print(f"experts ({report['contract']}) without a slot are computed by CPUs {cpus}, or streamed")
    else:
        console.print(f"experts ({report['contract']}) and attention take turns on CPUs {cpus}")
    if report["requantized"]:
        console.print("the store's experts are re-quantized: not the checkpoint's released precision")
