"""The hybrid step on one NVIDIA GPU: `PYTHONPATH=src python benchmarks/hybrid/run.py [part ...]`.

Needs torch, this source tree with its extension built, and room in DRAM for the layers asked for. Prints a table and,
where $OUT names a folder, writes hybrid.json there.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import cpus
import torch

NANO = Path(__file__).parents[2] / "models" / "nano-mxfp4"
PARTS = ("identity", "disk", "stack", "prefill")


def show(row: dict[str, Any]) -> None:
    """One line: numbers to four digits."""
    cells = [
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in row.items()
        if key not in ("what", "fixed_us")
    ]
    print(f"{row['what']:34} {'  '.join(cells)}", flush=True)


def main() -> int:
    """Run the parts named on the command line, all by default; exit 1 on a difference or an error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=list(PARTS))
    parser.add_argument("--quick", action="store_true", help="fewer calls, layers and rows")
    parser.add_argument("--layers", type=int, default=12, help="stack: MoE layers, 3.4 GB of DRAM each")
    parser.add_argument("--calls", type=int, default=4800, help="identity: layer calls of each share of slots")
    parser.add_argument("--seconds", type=float, default=1e9, help="identity and disk: the most that a cell may take")
    parser.add_argument("--model", type=Path, default=NANO, help="disk: a checkpoint")
    parser.add_argument("--threads", type=cpus.threads, default=cpus.served(), help="CPU threads that compute")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = [
        {"what": "machine", "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cpus": cpus.granted()}
    ]
    show(rows[0])
    failed = False
    for part in arguments.parts or PARTS:
        start = time.monotonic()
        try:
            for row in importlib.import_module(part).run(arguments):
                show(row)
                failed |= bool(row.get("differ"))
                rows.append(row)
        except Exception:  # the other parts still tell something
            traceback.print_exc()
            failed = True
        if os.environ.get("OUT"):
            Path(os.environ["OUT"], "hybrid.json").write_text(json.dumps(rows, indent=1))
        print(f"-- {part}: {time.monotonic() - start:.0f} s", flush=True)
        torch.cuda.empty_cache()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
