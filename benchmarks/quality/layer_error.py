"""Error of every routed-expert layer against float64 on real activations: `python benchmarks/quality/layer_error.py`.

Reads held-out texts with the reference model, gives each layer's inputs to every variant, prints a table and writes
WORK/MODEL/layer_error.json.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from common import folder, items, machine, open_model, parser
from rich.console import Console
from rich.table import Table

from moetier_bench.eval.items import Text
from moetier_bench.eval.quality_layers import LayerError, layer_errors
from moetier_bench.eval.quality_numerics import VARIANTS


def main() -> None:
    """Measure, print, write."""
    arguments = parser(__doc__).parse_args()
    start = time.monotonic()
    with open_model(arguments) as model:
        found = [item for item in items("heldout_text", arguments.limit) if isinstance(item, Text)]
        texts = [model.tokenizer.encode(item.text, add_special_tokens=False)[: model.positions] for item in found]
        errors = layer_errors(model, texts, progress=lambda done: print(f"{done}/{len(texts)}", file=sys.stderr))
    show(errors, f"{arguments.model}, {len(texts)} texts")
    state = {
        **machine(),
        "model": arguments.model,
        "texts": len(texts),
        "seconds": round(time.monotonic() - start, 1),
        "layers": [
            {
                "layer": error.layer,
                "tokens": error.tokens,
                "relative_rms": {variant: error.relative(variant) for variant in VARIANTS},
                "decibels": {variant: error.decibels(variant) for variant in VARIANTS},
            }
            for error in errors
        ],
    }
    path = folder(arguments) / "layer_error.json"
    path.write_text(json.dumps(state, indent=1) + "\n")
    print(path)


def show(errors: list[LayerError], title: str) -> None:
    """A table: relative RMS error and dB per layer and variant."""
    table = Table("layer", "tokens", *VARIANTS, title=f"Relative RMS error against float64, {title}")
    for error in errors:
        cells = (f"{error.relative(variant):.2e} ({error.decibels(variant):.1f} dB)" for variant in VARIANTS)
        table.add_row(str(error.layer), f"{error.tokens:,}", *cells)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
