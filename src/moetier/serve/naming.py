"""From a framework's module names to the checkpoint's layers."""

from __future__ import annotations

import re

from moetier.errors import UnsupportedModelError


def layer_number(name: str) -> int:
    """Number of the checkpoint's layer from a module name such as `model.layers.3.mlp.experts`."""
    numbers = re.findall(r"(?:^|\.)layers\.(\d+)(?=\.)", name)
    if len(numbers) != 1:
        raise UnsupportedModelError(
            f"cannot tell the layer number of {name!r}: expected one 'layers.N.' in it, found {len(numbers)}"
        )
    return int(numbers[0])
