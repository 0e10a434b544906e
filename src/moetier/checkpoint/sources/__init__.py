"""Number formats and layouts of experts that a store can be built from; the first that matches a layer is used."""

from __future__ import annotations

from typing import Any

from moetier.checkpoint.names import MoeLayer
from moetier.checkpoint.shards import Shards
from moetier.checkpoint.sources.base import Converted, LayerSource
from moetier.checkpoint.sources.companions import check_companions
from moetier.checkpoint.sources.floats import FloatSource, FusedFloatSource
from moetier.checkpoint.sources.fp8 import Fp8Source
from moetier.checkpoint.sources.int4 import Int4Source
from moetier.checkpoint.sources.mxfp4 import GptOssSource, Mxfp4Source
from moetier.checkpoint.sources.nvfp4 import Nvfp4Source
from moetier.checkpoint.sources.said import check_said
from moetier.errors import CheckpointError

SOURCES: tuple[type[LayerSource], ...] = (
    Mxfp4Source,
    GptOssSource,
    Nvfp4Source,
    Fp8Source,
    FloatSource,
    FusedFloatSource,
    Int4Source,
)

__all__ = ["SOURCES", "Converted", "LayerSource", "open_layer"]


def open_layer(
    shards: Shards, layer: MoeLayer, experts: int, config: dict[str, Any], draft: bool = False
) -> LayerSource:
    """The source that reads the layer; every tensor of it was checked. draft: exports often leave it unquantized."""
    for source in SOURCES:
        if source.matches(shards, layer):
            opened = source(shards, layer, experts, config)
            check_companions(opened)
            check_said(opened, draft)
            return opened
    sample = [t for name, t in sorted(shards.tensors.items()) if name.startswith(layer.name + ".")][:6]
    raise CheckpointError(
        f"layer {layer.number} of {shards.folder}: expected experts in MXFP4, NVFP4 (modelopt), FP8 (E4M3), INT4 "
        "(compressed-tensors), BF16, FP16 or FP32, found "
        + ", ".join(f"{t.name} {t.dtype} {list(t.shape)}" for t in sample)
    )
