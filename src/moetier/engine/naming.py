"""From a framework's module names to the checkpoint's layers."""

from __future__ import annotations

from moetier.checkpoint.names import MODULES, module_layer
from moetier.errors import UnsupportedModelError


def layer_number(name: str, hidden_layers: int | None = None) -> int:
    """Number of the checkpoint's layer from a module name such as `model.layers.3.mlp.experts`.

    hidden_layers: of the model itself; a drafter's layers (`mtp.layers.0.mlp.experts`) count on from it.
    """
    number = module_layer(name, hidden_layers)
    if number is None:
        known = ", ".join(spelling.template.format(layer="N") for spelling in MODULES)
        raise UnsupportedModelError(
            f"cannot tell which layer of the checkpoint {name!r} is: expected one of {known}, found another name; "
            "use vLLM without moetier for this model"
        )
    return number
