"""Decode and prefill under vLLM with a model of Qwen3-235B's shape, all-resident against hybrid."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cpus
import qwen3
import torch
from bed import copy_rate
from engine import engine, tiered

from moetier.store.build import build_store

PREFILL_TOKENS, STEPS, ROUNDS, STREAMS = (8192, 4096), 64, 5, (1, 4, 8)
SHARES = (1.0, 0.43, 0.25)
LINK_BYTES = 1 << 30


def speed(arguments: argparse.Namespace, folder: Path, show: Callable[[dict[str, Any]], None]) -> bool:
    """One engine after the other, for each measures at its start what a miss costs."""
    quantization = json.loads((Path(arguments.model) / "config.json").read_text())["quantization_config"]
    model, store, start = folder / "model", folder / "store", time.monotonic()
    qwen3.write(model, arguments.layers, quantization)
    written = time.monotonic()
    build_store(model, store)
    made = {"layers": arguments.layers, "write_s": written - start, "build_s": time.monotonic() - written}
    threads = arguments.threads or cpus.served()
    show({"what": "made", **made, "threads": threads, "cpus": cpus.granted()})
    pinned = torch.zeros(LINK_BYTES, dtype=torch.uint8).pin_memory()
    link = copy_rate(torch.empty_like(pinned, device="cuda"), pinned)
    del pinned
    show({"what": "link", "GB_s": link / 1e9})
    for share in SHARES:
        settings = {"store": str(store), "slots": round(share * qwen3.EXPERTS), "dram_records": "100%"}
        settings |= {"heat_file": str(folder / f"heat-{share}"), "threads": threads}
        found = engine(
            runs(),
            model=str(model),
            kv_cache_memory_bytes=4 << 30,
            max_model_len=max(PREFILL_TOKENS) + 256,
            max_num_seqs=32,
            max_num_batched_tokens=max(PREFILL_TOKENS),
            gpu_memory_utilization=0.05,
            **tiered(settings, arguments.graphs),
        )
        show({"what": f"{share:.0%} in slots"} | row(found, link))
    return False


def runs() -> list[dict[str, Any]]:
    """Of every length one prefill and ROUNDS more; then for every number of streams, pairs of runs that differ by STEPS
    steps.
    """
    rng = random.Random(0)

    def prompts(count: int, tokens: int) -> list[list[int]]:
        return [[rng.randrange(qwen3.VOCABULARY) for _ in range(tokens)] for _ in range(count)]

    made = [{"prompts": prompts(1, tokens), "max_tokens": 1} for tokens in PREFILL_TOKENS for _ in range(1 + ROUNDS)]
    for streams in STREAMS:
        made += decode_runs(partial(prompts, streams, 32))
    return made


def decode_runs(prompts: Callable[[], list[list[int]]]) -> list[dict[str, Any]]:
    """Pairs of runs that differ by STEPS steps of decode, ROUNDS of them; prompts: of the next run."""
    return [{"prompts": prompts(), "max_tokens": tokens} for _ in range(ROUNDS) for tokens in (1, 1 + STEPS)]


def decode_steps(done: list[dict[str, Any]]) -> list[float]:
    """Seconds of a step, of each pair of `decode_runs`."""
    pairs = zip(done[::2], done[1::2], strict=True)
    return [(more["seconds"] - one["seconds"]) / STEPS for one, more in pairs]


def row(found: dict[str, Any], link: float) -> dict[str, Any]:
    """Tokens a second, and the bytes a second that prefill streamed, against the link's."""
    done, first, made = found["runs"], (1 + ROUNDS) * len(PREFILL_TOKENS), dict[str, Any]()
    for i, tokens in enumerate(PREFILL_TOKENS):
        made |= of_prefill(tokens, done[(1 + ROUNDS) * i : (1 + ROUNDS) * (i + 1)], link)
    made["misses"], made["counted"] = "", {}
    for i, streams in enumerate(STREAMS):
        these = done[first + 2 * ROUNDS * i : first + 2 * ROUNDS * (i + 1)]
        made[f"decode_{streams}_tok_s"] = streams / statistics.median(decode_steps(these))
        made["counted"][streams] = counted = a_call(these)
        made["misses"] += f"{counted.get('misses', 0):.2f} "
    return made | {"start_s": found["start_s"], "costs": done[-1]["counts"].get("costs"), "log": found["log"]}


def of_prefill(tokens: int, done: list[dict[str, Any]], link: float) -> dict[str, Any]:
    """Of prompts of so many tokens, each in one step; the first run is left out."""
    took = [run["seconds"] for run in done[1:]]
    first, last = done[0]["counts"], done[-1]["counts"]
    streamed = (last.get("streamed_bytes", 0) - first.get("streamed_bytes", 0)) / sum(took)
    made: dict[str, Any] = {"tok_s": tokens / statistics.median(took), "streamed_GB_s": streamed / 1e9}
    made["ms"] = " ".join(f"{1e3 * one:.0f}" for one in took)
    if streamed:
        made["share_of_link"] = streamed / link
    name = "prefill" if tokens == max(PREFILL_TOKENS) else f"prefill_{tokens}"
    return {f"{name}_{key}": value for key, value in made.items()}


def a_call(runs: list[dict[str, Any]]) -> dict[str, float]:
    """What the device counted in every second run, a layer call of decode; {} where it planned none."""
    totals: dict[str, float] = {}
    for before, after in zip(runs[::2], runs[1::2], strict=True):
        for name, value in after["counts"].items():
            if name.startswith("device_"):
                key = name.removeprefix("device_")
                totals[key] = totals.get(key, 0) + value - before["counts"][name]
    calls = totals.get("calls", 0)
    return {name: value / calls for name, value in totals.items()} if calls else {}
