"""The table of what decides: each row looks at the facts, says what it found, and what to do instead."""

from __future__ import annotations

from moetier.decision import experts, serving
from moetier.decision.row import Level, Row

ROWS: tuple[Row, ...] = (
    Row("dense", "no routed experts", experts.dense_row, reads=True, tensors=True),
    Row("names", "names of experts that are not known", experts.names_row, reads=True, tensors=True),
    Row("more-names", "experts under known and unknown names", experts.more_names_row, reads=True, tensors=True),
    Row("keys", "config.json of a family that is not known", experts.keys_row, reads=True, tensors=True),
    Row("kind", "number formats and dialects that are not read", experts.kinds_row, reads=True, tensors=True),
    Row(
        "sizes",
        "sizes that are no multiples of 32, top-k above the experts",
        experts.sizes_row,
        reads=True,
        tensors=True,
    ),
    Row("biases", "biases of experts", experts.biases_row),
    Row("activation", "activations other than SwiGLU (silu)", experts.activation_row),
    Row("alpha", "a SwiGLU with an alpha or beta", experts.alpha_row),
    Row(
        "unknown-keys",
        "an activation, a clamp or an alpha under keys that are not known",
        experts.unknown_keys_row,
        overridable=True,
    ),
    Row(
        "clamp",
        "clamps that differ by layer, come after SiLU, or that vLLM does not have",
        experts.clamp_row,
        reads=True,
    ),
    Row("on-input", "the router's weight on the experts' input", experts.on_input_row),
    Row("zero", "zero-computation experts", experts.zero_row),
    Row("latent", "latent experts", experts.latent_row),
    Row("router-scale", "a scale for each expert in the router", experts.router_scale_row, tensors=True),
    Row("speculation", "speculation with a drafter of another geometry", serving.speculation_row),
    Row(
        "architecture",
        "architectures that the installed vLLM does not know",
        serving.architecture_row,
        overridable=True,
    ),
    Row(
        "support",
        "model types that are known to fail with this vLLM on this device",
        serving.support_row,
        overridable=True,
    ),
    Row("config-code", "a config class that only the checkpoint brings", serving.config_code_row, Level.CONDITION),
    Row("tokenizer-code", "a tokenizer that only the checkpoint brings", serving.tokenizer_code_row, Level.CONDITION),
    Row(
        "drafter",
        "drafters of another geometry, under names that are not known, or announced and missing",
        serving.drafter_row,
        Level.NO_DRAFTER,
    ),
)
"""In this order: what is said first is what stands in the way most."""
