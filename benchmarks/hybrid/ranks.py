"""Tensor parallelism over two GPUs: a rank's bits against the oracle of its slices, what it reads, tokens, speed."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from engine import engine, prompts_of, tiered
from speed import ROUNDS, decode_runs, decode_steps

from moetier.contract import RecordLayout, oracle
from moetier.launch.counting import read_snapshots
from moetier.machine.limits import allowed_cpus, compute_cpus
from moetier.store.build import build_store
from moetier.store.store import Store
from moetier.tiers.arena import Arena
from moetier.tiers.disk import DiskReader
from moetier.tiers.part import Part
from moetier_reference.experts import DeviceExperts

if TYPE_CHECKING:
    from under_vllm import Bed

RANKS, SLICES, CALLS, TOKENS = 2, 4, 12, (1, 3, 8, 32)
STREAMS = (1, 8, 32)
ENVIRONMENT = {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
Report = Callable[[dict[str, Any]], None]


def ranks(bed: Bed, show: Report) -> bool:
    """All of it from one store of SLICES slices."""
    folder = bed.store.parent / "sliced"
    build_store(bed.model, folder, slices=SLICES)
    failed = False
    with Store.open(folder) as store:
        for rank in range(RANKS):
            row = against_oracle(store, Part(store.manifest.layer_geometry, rank, RANKS))
            failed |= bool(row["differ"])
            show(row)
    return failed | under_vllm(bed, folder, show)


def against_oracle(store: Store, part: Part) -> dict[str, Any]:
    """Random calls of the first layer through the device's kernels of one rank."""
    g, family = part.narrow, store.manifest.layer_family
    layout, rng = RecordLayout.of(g), np.random.default_rng(part.rank)
    reader, arena = DiskReader(store, 4, part=part), Arena(g.experts, part.room, part.shift)
    slots = torch.zeros((g.experts, layout.stride), dtype=torch.uint8, device="cuda")
    matrices = {}
    for expert in range(g.experts):
        reader.read(0, expert, arena.view(expert))
        record = np.zeros(layout.stride, np.uint8)
        size = part.count * layout.slice_bytes
        record[:size] = arena.view(expert)[part.shift : part.shift + size]
        slots[expert] = torch.from_numpy(record).cuda()
        matrices[expert] = layout.unpack(record)
    reader.close()
    experts, differ = DeviceExperts(g, family, max(TOKENS)), 0
    table = torch.arange(g.experts, dtype=torch.int32, device="cuda")
    for number in range(CALLS):
        tokens = TOKENS[number % len(TOKENS)]
        x = oracle.to_bf16(rng.standard_normal((tokens, g.hidden), np.float32))
        ids = np.argsort(rng.random((tokens, g.experts)), axis=1)[:, : g.top_k].astype(np.int32)
        weights = rng.random((tokens, g.top_k), np.float32)
        given = torch.from_numpy(x.view(np.int16)).view(torch.bfloat16).cuda()
        out = experts.forward(given, torch.from_numpy(ids).cuda(), torch.from_numpy(weights).cuda(), table, slots)
        wanted = oracle.moe_layer(oracle.from_bf16(x), ids, weights, matrices, g.experts, family, part.count)
        differ += int((out.view(torch.int16).cpu().numpy().view(np.uint16) != wanted).sum())
    return {"what": f"rank {part.rank} of {part.ranks} against the oracle", "calls": CALLS, "differ": differ}


def under_vllm(bed: Bed, store: Path, show: Report) -> bool:
    """The same prompts with all experts in slots, and with some; counters of each rank come over its file.

    The first placement's tokens are those that all others of as many ranks must have; one rank is there for the speed.
    One engine after the other, for each measures at its start what a miss costs.
    """
    prompts = prompts_of(bed.model, 32)
    runs: list[dict[str, Any]] = [{"prompts": prompts, "max_tokens": 32, "logprobs": 2}]
    for streams in STREAMS:
        runs += decode_runs(lambda streams=streams: prompts[:streams])
    placements: list[tuple[int, str, dict[str, Any]]] = [
        (RANKS, "all resident", {"slots": bed.experts}),
        (RANKS, "25 %", {"slots": bed.slots(0.25)}),
        (1, "all resident", {"slots": bed.experts}),
        (1, "25 %", {"slots": bed.slots(0.25)}),
        (RANKS, "12 %, a quarter in DRAM", {"slots": bed.slots(0.12), "dram_records": "25%"}),
    ]

    def start(count: int, settings: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
        with tempfile.TemporaryDirectory() as counters:
            common = {
                "store": str(store),
                "heat_file": f"{counters}/heat",
                "dram_records": "100%",
                "check_at_end": True,
                "cpus": compute_cpus(allowed_cpus()),  # as `moetier serve` has it
            }
            found = engine(
                runs,
                ENVIRONMENT,
                model=str(bed.model),
                tensor_parallel_size=count,
                distributed_executor_backend="mp",
                disable_custom_all_reduce=True,
                kv_cache_memory_bytes=1 << 30,
                max_model_len=1024,
                max_num_seqs=64,
                gpu_memory_utilization=0.02,
                **tiered({**common, "counters_folder": counters, **settings}, bed.arguments.graphs),
            )
            return found, read_snapshots(Path(counters))

    failed, references = False, dict[int, dict[str, Any]]()
    for count, name, settings in placements:
        try:
            found, snapshots = start(count, settings)
        except RuntimeError as error:
            show({"what": f"TP={count}, {name}", "error": str(error)})
            failed = True
            continue
        run = found["runs"][0]
        reference = references.setdefault(count, run)
        row: dict[str, Any] = {"what": f"TP={count}, {name}"}
        for key in ("tokens", "logprobs"):
            row[f"{key} differ"] = sum(a != b for a, b in zip(run[key], reference[key], strict=True))
            failed |= bool(row[f"{key} differ"])
        for i, streams in enumerate(STREAMS):
            steps = decode_steps(found["runs"][1 + 2 * ROUNDS * i :][: 2 * ROUNDS])
            row[f"decode_{streams}_tok_s"] = streams / statistics.median(steps)
            row[f"decode_{streams}_step_ms"] = " ".join(f"{1e3 * step:.2f}" for step in sorted(steps))
        failed |= len(snapshots) != count
        with Store.open(store) as opened:
            geometry = opened.manifest.layer_geometry
        for snapshot in snapshots:
            part = Part(geometry, snapshot.rank, count)
            row[f"rank {snapshot.rank}"] = {
                "records read": snapshot.disk_reads,
                "bytes": snapshot.disk_bytes,
                "of whole records": snapshot.disk_bytes / max(1, snapshot.disk_reads * part.layout.stride),
                "misses": snapshot.total.misses,
                "slot fills": snapshot.total.slot_fills,
            }
            failed |= snapshot.disk_bytes != snapshot.disk_reads * part.room
        show(row | {"start_s": found["start_s"], "log": found["log"]})
    return failed
