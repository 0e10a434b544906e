"""The hybrid step under vLLM: identity of every tier with a trained model, and speed with one of a real shape.

    python benchmarks/hybrid/under_vllm.py identity MODEL [--graphs none,decode,all]
    python benchmarks/hybrid/under_vllm.py speed MODEL_OF_THE_SAME_FORMAT --layers 8

Needs vLLM with CUDA and moetier installed beside it. Prints a table and, where $OUT names a folder, writes JSON there.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from engine import engine

ROOT = Path(__file__).parents[2]
WORKER = "moetier.serve.vllm.gpu_worker.MoetierGpuWorker"
GRAPHS: dict[str, dict[str, Any]] = {
    "none": {"enforce_eager": True},
    "decode": {
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "max_cudagraph_capture_size": 64}
    },
    "all": {"compilation_config": {"max_cudagraph_capture_size": 64}},
}


def tiers(store: Path, slots: int, graphs: str, **settings: Any) -> dict[str, Any]:
    """Engine arguments with `slots` experts of each layer on the device."""
    moetier = {"store": str(store), "slots": slots, "dram_records": "100%", "heat_file": "/dev/null", **settings}
    return {
        "quantization": "moetier",
        "load_format": "moetier",
        "worker_cls": WORKER,
        "additional_config": {"moetier": moetier},
        **GRAPHS[graphs],
    }


def show(row: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """One line, and what is known so far to $OUT."""
    cells = [f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items() if k not in ("what", "log")]
    print(f"{row['what']:44} {'  '.join(cells)}", flush=True)
    rows.append(row)
    if os.environ.get("OUT"):
        Path(os.environ["OUT"], f"vllm-{sys.argv[1]}.json").write_text(json.dumps(rows, indent=1))


def build(model: Path, store: Path) -> None:
    """The model's store."""
    from moetier.store.build import build_store

    build_store(model, store)


def prompts_of(model: Path, count: int) -> list[list[int]]:
    """Evaluation prompts as token ids of the model's tokenizer."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    texts = [
        " ".join(str(message.get("content")) for message in json.loads(line)["messages"])
        for path in sorted((ROOT / "models" / "eval").glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    random.Random(0).shuffle(texts)
    return [tokenizer.encode(text).ids[:512] for text in texts[:count]]


def identity(arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> bool:
    """All prompts queued at once, greedy; every placement against all-resident."""
    model, failed = Path(arguments.model), False
    experts = json.loads((model / "config.json").read_text())["n_routed_experts"]
    runs = [{"prompts": prompts_of(model, arguments.prompts), "max_tokens": arguments.tokens, "logprobs": 2}]
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        build(model, store)
        common = {"model": str(model), "kv_cache_memory_bytes": 1 << 30, "max_model_len": 1024, "max_num_seqs": 64}
        placements: dict[str, dict[str, Any]] = {
            "all resident": {"slots": experts},
            "43 %": {"slots": round(0.43 * experts)},
            "12 %": {"slots": round(0.12 * experts)},
            "4 %": {"slots": max(1, round(0.04 * experts))},
            "12 %, a quarter in DRAM": {"slots": round(0.12 * experts), "dram_records": "25%"},
        }
        for graphs in arguments.graphs.split(","):
            reference: dict[str, Any] | None = None
            for name, placement in placements.items():
                try:
                    found = engine(runs, **common, **tiers(store, graphs=graphs, **placement))
                except RuntimeError as error:
                    show({"what": f"{name}, graphs {graphs}", "error": str(error)}, rows)
                    failed = True
                    continue
                run = found["runs"][0]
                if reference is None and name != "all resident":
                    continue  # there is nothing to compare with
                reference = reference or run
                differ = {key: run[key] != reference[key] for key in ("tokens", "logprobs")}
                failed |= any(differ.values())
                counted = {k.removeprefix("device_"): v for k, v in run["counts"].items() if k.startswith("device_")}
                chosen = ("hits", "misses", "streamed", "pairs_cpu", "cpu_calls", "helped")
                row = {"what": f"{name}, graphs {graphs}", **{k: counted.get(k) for k in chosen}}
                row |= {
                    "fills": run["counts"].get("slot_fills"),
                    "seconds": run["seconds"],
                    "start_s": found["start_s"],
                }
                show(row | {f"{key} differ": value for key, value in differ.items()} | {"log": found["log"]}, rows)
    return failed


def batches(arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> bool:
    """VLLM_BATCH_INVARIANT=1: the same prompts in batches of several sizes and chunks, and several placements."""
    model, failed = Path(arguments.model), False
    experts = json.loads((model / "config.json").read_text())["n_routed_experts"]
    runs = [{"prompts": prompts_of(model, 32), "max_tokens": arguments.tokens, "logprobs": 2}]
    cells = [(experts, 32, 1024), (experts // 8, 1, 1024), (experts // 8, 8, 1024), (experts // 8, 32, 64)]
    reference: dict[str, Any] | None = None
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        build(model, store)
        for slots, sequences, chunk in cells:
            name = f"{slots} slots, {sequences} sequences, chunks of {chunk}"
            arguments_of = {"model": str(model), "kv_cache_memory_bytes": 1 << 30, "max_model_len": 1024}
            arguments_of |= {"max_num_seqs": sequences, "max_num_batched_tokens": chunk}
            try:
                found = engine(
                    runs, {"VLLM_BATCH_INVARIANT": "1"}, **arguments_of, **tiers(store, slots, arguments.graphs)
                )
            except RuntimeError as error:
                show({"what": name, "error": str(error)}, rows)
                failed = True
                continue
            run = found["runs"][0]
            reference = reference or run
            differ = {f"{key} differ": run[key] != reference[key] for key in ("tokens", "logprobs")}
            failed |= any(differ.values())
            show({"what": name, **differ, "s": run["seconds"]}, rows)
    return failed


def speed(arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> bool:
    """Decode and prefill, all-resident against hybrid."""
    import qwen3

    quantization = json.loads((Path(arguments.model) / "config.json").read_text())["quantization_config"]
    rng = random.Random(0)

    def prompts(count: int, tokens: int) -> list[list[int]]:
        return [[rng.randrange(qwen3.VOCABULARY) for _ in range(tokens)] for _ in range(count)]

    prefill_tokens, steps = 8192, 64
    runs = [{"prompts": prompts(1, prefill_tokens), "max_tokens": 1} for _ in range(6)]
    for streams in (1, 4, 8):
        runs += [{"prompts": prompts(streams, 32), "max_tokens": n} for _ in range(5) for n in (1, 1 + steps)]
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        model, store = Path(folder) / "model", Path(folder) / "store"
        start = time.monotonic()
        qwen3.write(model, arguments.layers, quantization)
        written = time.monotonic()
        build(model, store)
        show({"what": "made", "write_s": written - start, "build_s": time.monotonic() - written}, rows)
        common = {"model": str(model), "kv_cache_memory_bytes": 4 << 30, "max_model_len": prefill_tokens + 256}
        common |= {"max_num_seqs": 32, "max_num_batched_tokens": prefill_tokens}
        for share in (1.0, 0.43, 0.25):
            slots = round(share * qwen3.EXPERTS)
            threads = max(1, (os.cpu_count() or 1) - 2)
            found = engine(runs, **common, **tiers(store, slots, arguments.graphs, threads=threads))
            prefill = [run["seconds"] for run in found["runs"][1:6]]
            before, after = found["runs"][0]["counts"], found["runs"][5]["counts"]
            streamed = (after.get("streamed_bytes", 0) - before.get("streamed_bytes", 0)) / sum(prefill)
            row = {"what": f"{share:.0%} in slots", "prefill_tok_s": prefill_tokens / statistics.median(prefill)}
            row |= {"streamed_GB_s": streamed / 1e9, "start_s": found["start_s"]}
            for i, streams in enumerate((1, 4, 8)):
                timed = [run["seconds"] for run in found["runs"][6 + 10 * i : 16 + 10 * i]]
                pairs = [(timed[j + 1] - timed[j]) / steps for j in range(0, 10, 2)]
                row[f"decode_{streams}_tok_s"] = streams / statistics.median(pairs)
            show(row | {"costs": after.get("costs"), "log": found["log"]}, rows)
    return False


def main() -> int:
    """Exit 1 on a difference or an error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("identity", "batches", "speed"))
    parser.add_argument("model")
    parser.add_argument("--graphs", default="none", help="none, decode, all; identity takes several")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--folder", help="speed: where the model and its store are made")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    try:
        return int({"identity": identity, "batches": batches, "speed": speed}[arguments.part](arguments, rows))
    except Exception:
        traceback.print_exc()
        return 1


if __name__ == "__main__":
    sys.exit(main())
