"""Entry point of group `vllm.general_plugins`: vLLM calls `register` in every process that it starts."""

from __future__ import annotations

import logging

from moetier.visible import VisibleRecords

NAME = "moetier"
"""Name of the quantization method, of the load format, and of our part of --additional-config."""


def register() -> None:
    """Make `--quantization moetier --load-format moetier` known. Costs nothing until they are asked for."""
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.model_executor.model_loader import register_model_loader

    from moetier.vllm.config import MoetierConfig
    from moetier.vllm.loader import MoetierLoader

    register_quantization_config(NAME)(MoetierConfig)
    register_model_loader(NAME)(MoetierLoader)
    for handler in logging.getLogger("vllm").handlers:  # ours log through it
        if not any(isinstance(found, VisibleRecords) for found in handler.filters):
            handler.addFilter(VisibleRecords())
