"""A trained model under transformers on one GPU: all experts in slots against some, tokens, logits and scores.

    python benchmarks/hybrid/under_transformers.py MODEL

Needs transformers with CUDA torch and moetier. Prints a table and, where $OUT names a folder, writes JSON there.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from moetier.settings import Settings
from moetier.store.build import build_store
from moetier.transformers.experts import load_model

SETS = Path(__file__).parents[2] / "models" / "eval"


def run(model_path: Path, store: Path, slots: int, items: list[dict[str, Any]], **settings: Any) -> dict[str, Any]:
    """Greedy answers to `items`, and the logits of a long forward."""
    chosen = Settings(store=store, slots=slots, dram_records="100%", **settings)
    model = load_model(model_path, chosen, device="cuda")
    tokenizer = Tokenizer.from_file(str(model_path / "tokenizer.json"))
    start, answers = time.monotonic(), []
    for item in items:
        text = " ".join(str(message["content"]) for message in item["messages"])
        ids = torch.tensor([tokenizer.encode(text).ids], device="cuda")
        answers.append(model.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :].tolist())
    seconds = time.monotonic() - start
    long = torch.arange(2048, device="cuda")[None] % 8000
    with torch.no_grad():
        logits = model(long).logits.float().cpu()
    found = {"answers": answers, "logits": logits, "seconds": seconds, "counters": vars(model.moetier.counters)}
    model.moetier.close()
    return found


def main() -> int:
    """Exit 1 on a difference."""
    model, rows, failed = Path(sys.argv[1]), [], False
    experts = json.loads((model / "config.json").read_text())["n_routed_experts"]
    items = [json.loads(line) for line in (SETS / "arithmetic.jsonl").read_text().splitlines()[:40]]
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        build_store(model, store)
        whole = run(model, store, experts, items)
        for name, settings in {
            "25 %": {"slots": experts // 4},
            "25 %, no spare": {"slots": experts // 4, "spare_slots": 0},
            "4 %": {"slots": max(1, experts // 25)},
        }.items():
            found = run(model, store, items=items, **settings)
            tokens = found["answers"] != whole["answers"]
            logits = not torch.equal(found["logits"], whole["logits"])
            failed |= tokens or logits
            counted = {k: found["counters"][k] for k in ("hits", "misses", "slot_fills", "streamed_bytes")}
            row = {
                "what": name,
                "tokens differ": tokens,
                "logits differ": logits,
                "seconds": found["seconds"],
                **counted,
            }
            print(row, flush=True)
            rows.append(row)
    if os.environ.get("OUT"):
        Path(os.environ["OUT"], "transformers.json").write_text(json.dumps(rows, indent=1))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
