"""Entry point of group `vllm.general_plugins`: vLLM calls `register` in every process that it starts."""

from __future__ import annotations

NAME = "moetier"
"""Name of the quantization method, of the load format, and of our part of --additional-config."""


def register() -> None:
    """Make `--quantization moetier --load-format moetier` known. Costs nothing until they are asked for."""
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.model_executor.model_loader import register_model_loader

    from moetier.serve.vllm.config import MoetierConfig
    from moetier.serve.vllm.loader import MoetierLoader

    register_quantization_config(NAME)(MoetierConfig)
    register_model_loader(NAME)(MoetierLoader)
