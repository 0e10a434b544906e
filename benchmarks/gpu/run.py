"""Identity and speed of the device tier on one NVIDIA GPU: `PYTHONPATH=src python benchmarks/gpu/run.py [part ...]`.

Needs torch, triton and this source tree. Prints a table and, where $OUT names a folder, writes results.json there.
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

import torch
import triton

PARTS = ("identity", "decode", "prefill", "fill")


def show(row: dict[str, Any]) -> None:
    """One line: numbers to four digits."""
    cells = [
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in row.items()
        if key != "what"
    ]
    print(f"{row['what']:58} {'  '.join(cells)}", flush=True)


def save(rows: list[dict[str, Any]]) -> None:
    """What is known so far, where $OUT says."""
    if os.environ.get("OUT"):
        Path(os.environ["OUT"], "results.json").write_text(json.dumps(rows, indent=1))


def main() -> int:
    """Run the parts named on the command line, all by default; exit 1 on a difference or an error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=list(PARTS))
    parser.add_argument("--quick", action="store_true", help="fewer calls and rows")
    parser.add_argument("--shapes", help="identity: only these, separated by commas")
    arguments = parser.parse_args()
    machine = {
        "what": "machine",
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    show(machine)
    rows, failed = [machine], False
    for part in arguments.parts or PARTS:
        start = time.monotonic()
        try:
            for row in importlib.import_module(part).run(arguments):
                show(row)
                failed |= bool(row.get("differ"))
                rows.append(row)
                save(rows)
        except Exception:  # the other parts still tell something
            traceback.print_exc()
            failed = True
            continue
        print(f"-- {part}: {time.monotonic() - start:.0f} s", flush=True)
        torch.cuda.empty_cache()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
