"""Every tensor below an expert's name is known to its source, harmless, or refused by name."""

from __future__ import annotations

import re

from moetier.checkpoint.sources.base import LayerSource, PerExpertSource
from moetier.errors import UnsupportedModelError

HARMLESS = ("input_scale", "input_activation_scale", "activation_scale", "act_scale", "input_global_scale")
"""How the vendor's kernel quantizes activations. Ours quantizes in its own blocks: no value depends on it.

k_scale, v_scale and their like belong to attention and do not lie below an expert.
"""

MEANINGS = {
    "pre_quant_scale": "the input is multiplied by it (AWQ, SmoothQuant)",
    "smooth_scale": "the input is multiplied by it (SmoothQuant)",
    "smooth_factor": "the input is multiplied by it (SmoothQuant)",
    "bias": "it is added to the product, and the contract has no biases",
    "weight_zero_point": "the integers are asymmetric by zero points",
    "zero_point": "the integers are asymmetric by zero points",
    "qzeros": "the integers are asymmetric by zero points",
    "weight_g_idx": "its columns are in another order",
    "g_idx": "its columns are in another order",
    "weight_global_scale": "a second scale of the weight",
    "weight_scale": "a second scale of the weight",
    "weight_scale_inv": "a second scale of the weight",
    "weight_scale_2": "a second scale of the weight",
    "scale": "a second scale of the weight",
    "weight_shape": "the shape of a packed weight",
}
_NAME = re.compile(r"(?:0|[1-9]\d*)\.(\w+)\.(.+)")


def check_companions(source: LayerSource) -> None:
    """UnsupportedModelError for a tensor that would change the experts' arithmetic and that nobody reads."""
    layer = source.layer
    for name in source.shards.below(layer.name):
        rest = name[len(layer.name) + 1 :]
        if isinstance(source, PerExpertSource):
            match = _NAME.fullmatch(rest)
            known = match is not None and match[1] in source.spelling and match[2] in (*source.parts(name), *HARMLESS)
        else:
            known = rest in source.consumed or rest.rpartition(".")[2] in HARMLESS
        if not known:
            part = rest.rpartition(".")[2]
            raise UnsupportedModelError(
                f"{source.shards.tensors[name]}: expected only {', '.join(source.consumed)} of each of the "
                f"{source.format} experts, found this: "
                f"{MEANINGS.get(part, 'what it does to the experts is not known')}; take a release of the model "
                "without it"
            )
