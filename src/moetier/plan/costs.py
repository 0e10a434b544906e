"""Costs of a step beside bytes over rates: few constants, each with its source and how far it may be off.

An engine profile is the time outside the experts of one engine on one kind of device. `published` ones were worked out
from one machine's published rows, `assumed` ones were not measured by anybody; `moetier calibrate` corrects both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from moetier.errors import SettingsError
from moetier.plan.hardware import Hardware, Known

FOUR = "published rows of DeepSeek-V4.1-Flash on four 32 GB cards: "
H200 = "measured on one H200: "
UNCAPTURED = (
    H200 + "prompts of 16 to 1,800 tokens through 5 and 8 layers under vLLM 0.26: 12 to 19 and 16 to 22 ms (25e4a8f)"
)


@dataclass(frozen=True)
class Engine:
    """Seconds of one engine that no bytes explain."""

    name: str
    source: str
    layer: Known
    """Launches and small kernels of one layer."""
    reduce: Known
    """One all-reduce of a decode step; two a layer when there is more than one rank."""
    step: Known
    """Sampling and what else of a step nothing hides."""
    host: Known
    """Scheduling and launching a step on the host, while the device computes the one before: the least a step takes."""
    sequence: Known
    """Seconds that each running sequence adds to that: its tokens are scheduled, taken in and sent."""
    launch: Known
    """A layer of a prompt's step, for which there is no graph, on the host, while the device computes those before."""
    start: Known
    """From the command to the first answer, beside reading weights."""


ENGINES = {
    "vllm-graphs": Engine(
        "vllm-graphs",
        "published: decode in CUDA graphs, on four 32 GB cards of compute capability 12.0",
        Known(42e-6, 0.3, FOUR + "a step of 7.5 ms less 1.3 ms of misses, dense weights, experts, and reductions"),
        Known(16e-6, 0.35, "assumed: an all-reduce of one token's hidden row over PCIe"),
        Known(0.5e-3, 0.4, "assumed: what asynchronous scheduling does not hide, and sampling"),
        Known(2.0e-3, 0.3, "measured: vLLM 0.26, one H200, 6 and 7 layers all in slots: 1 to 8 streams 2.2 to 3.1 ms"),
        Known(43e-6, 0.4, "measured: the same, 7 layers: 32 streams 3.8 ms, two runs (3a971ac, 6604d53)"),
        Known(2.5e-3, 0.4, UNCAPTURED),
        Known(90.0, 0.5, "assumed: imports, profiling, compilation from a warm cache, graph capture"),
    ),
    "vllm-eager": Engine(
        "vllm-eager",
        "every kernel launched from Python: the layers measured, the rest assumed",
        Known(2.5e-3, 0.4, UNCAPTURED),
        Known(40e-6, 0.5, "assumed"),
        Known(3e-3, 0.5, "assumed"),
        Known(0.0, 0.0, "launches are the layers' time"),
        Known(0.0, 0.0, "not counted beside them"),
        Known(0.0, 0.0, "launches are the layers' time"),
        Known(60.0, 0.5, "assumed: imports and profiling"),
    ),
    "vllm-cpu": Engine(
        "vllm-cpu",
        "assumed: vLLM's CPU build, dense weights read from DRAM",
        Known(400e-6, 0.5, "assumed: some 25 operators of torch for each layer"),
        Known(0.0, 0.0, "one rank"),
        Known(5e-3, 0.5, "assumed"),
        Known(0.0, 0.0, "nothing overlaps"),
        Known(0.0, 0.0, "a part of the layers' time"),
        Known(0.0, 0.0, "a part of the layers' time"),
        Known(40.0, 0.5, "assumed: imports and warm-up"),
    ),
}


COMMON = {
    "skew": Known(1.0, 0.08, "two short prompts on one machine are 16 % apart: 8 % of the exponent"),
    "dense_share": Known(0.85, 0.15, "assumed: of the device's copy rate, by dense layers of one token"),
    "begin": Known(
        0.6e-6, 2.0, H200 + "a hybrid call of one token without a miss, beyond an all-resident one (54b30e1)"
    ),
    "one": Known(4e-6, 0.5, H200 + "clocks of one token's kernel that no byte explains (docs/device-kernels.md)"),
    "one_share": Known(0.81, 0.1, H200 + "of the copy rate, by that kernel otherwise: 26.1 and 39.2 us (aea9a80)"),
    "few": Known(21e-6, 0.3, H200 + "what the kernels for more tokens take whatever the bytes (aea9a80)"),
    "few_share": Known(1.0, 0.1, H200 + "of the copy rate, by those for a few tokens otherwise (aea9a80)"),
    "few_pair": Known(0.30, 0.4, H200 + "what a pair costs them, in records read: 105, 173 and 201 us (aea9a80)"),
    "tile": Known(77.0, 0.3, H200 + "a tile of prefill beside its pairs, in pairs: 0.78, 4.36, 16.4 ms (aea9a80)"),
    "ops_share": Known(0.54, 0.3, H200 + "of 989 TFLOP/s, by prefill's pairs, tiles counted apart (aea9a80)"),
    "dense_ops_share": Known(0.6, 0.25, "assumed: of the data sheet, by dense layers and attention of a prompt"),
    "miss": Known(
        12e-6, 0.4, "measured: a layer with one miss less its call on the CPU, on one H200: 14 us (docs/hybrid.md)"
    ),
    "slowed": Known(0.15, 0.5, H200 + "of the CPU's rate, what a streaming link takes away: 0.13 to 0.24 (54b30e1)"),
    "together": Known(1.25, 0.1, H200 + "CPU and link read 140 GB/s where threads alone read 115 (54b30e1)"),
    "read": Known(60e-6, 0.5, "assumed: latency of a layer's reads from disk before the first byte"),
    "overlap": Known(
        0.75, 0.15, FOUR + "time to first token with records on disk, against either of disk and link alone"
    ),
    "scan_share": Known(0.0205, 0.4, FOUR + "87 to 70 tokens/s from 2K to 512K of context, by indexer bytes"),
    "kv_share": Known(0.6, 0.3, "assumed: of the device's copy rate, by attention over the whole context"),
}
"""Costs that no machine or engine changes. From `begin` to `ops_share` they are our kernels' (kernels.py says how they
are used); benchmarks/plan/against.py says what a run gives."""


@dataclass(frozen=True)
class Costs:
    """Every number that a prediction rests on. Rates in bytes or operations a second, times in seconds."""

    gpu_rate: Known
    gpu_ops: Known
    link_rate: Known
    dram_rate: Known
    cpu_rate: Known
    cpu_call: Known
    cpu_ops: Known
    disk_rate: Known
    layer: Known
    reduce: Known
    step: Known
    host: Known
    sequence: Known
    launch: Known
    start: Known
    skew: Known
    dense_share: Known
    begin: Known
    one: Known
    one_share: Known
    few: Known
    few_share: Known
    few_pair: Known
    tile: Known
    ops_share: Known
    dense_ops_share: Known
    miss: Known
    slowed: Known
    together: Known
    read: Known
    overlap: Known
    scan_share: Known
    kv_share: Known

    def scaled(self, factors: Mapping[str, float], why: str = "", spread: float | None = None) -> Costs:
        """The same with some numbers multiplied; why and spread: of these from now on."""
        known = {field.name for field in fields(self)}
        changed: dict[str, Known] = {}
        for name, factor in factors.items():
            if name not in known:
                raise SettingsError(f"there is no cost {name!r}; known: {', '.join(sorted(known))}")
            old: Known = getattr(self, name)
            changed[name] = Known(old.value * factor, old.spread if spread is None else spread, why or old.why)
        return replace(self, **changed)

    def items(self) -> list[tuple[str, Known]]:
        return [(field.name, getattr(self, field.name)) for field in fields(self)]


def engine_named(name: str | None, hardware: Hardware) -> Engine:
    """The profile, or the default one: CUDA graphs on a GPU, the CPU build without."""
    chosen = name or ("vllm-graphs" if hardware.gpus else "vllm-cpu")
    if chosen not in ENGINES:
        raise SettingsError(f"engine {chosen!r} is not known; known: {', '.join(ENGINES)}")
    if (chosen == "vllm-cpu") != (hardware.gpus == 0):
        raise SettingsError(
            f"engine {chosen} does not fit a machine with {hardware.gpus} GPUs; leave --engine out for the right one"
        )
    return ENGINES[chosen]


def costs_of(hardware: Hardware, engine: Engine) -> Costs:
    """The machine's rates and the engine's times together."""
    return Costs(
        gpu_rate=hardware.gpu_rate,
        gpu_ops=hardware.gpu_ops,
        link_rate=hardware.link_rate,
        dram_rate=hardware.dram_rate,
        cpu_rate=hardware.cpu_rate,
        cpu_call=hardware.cpu_call,
        cpu_ops=hardware.cpu_ops,
        disk_rate=hardware.disk_rate,
        layer=engine.layer,
        reduce=engine.reduce,
        step=engine.step,
        host=engine.host,
        sequence=engine.sequence,
        launch=engine.launch,
        start=engine.start,
        **COMMON,
    )
