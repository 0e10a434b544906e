"""Rows about the experts: their names, formats, sizes and arithmetic, whatever serves them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from moetier.checkpoint import config as keys
from moetier.contract import LayerGeometry
from moetier.decision import activation
from moetier.decision.facts import Facts
from moetier.decision.kinds import INSTEAD, kind_of, sample
from moetier.decision.row import AS_IT_IS, Found, Here
from moetier.errors import MoetierError, UnsupportedModelError

ON_INPUT = ("apply_router_weight_on_input", "moe_apply_router_weight_on_input")
LATENT = ("moe_latent_size", "routed_expert_hidden_size", "moe_latent_dim")
ZERO = re.compile(r"zero.*expert|expert.*zero|copy_expert")
BIASED = ("gpt_oss",)
"""Model types whose experts have biases, for bundled geometries, which have no headers to see them in."""


def dense_row(f: Facts, here: Here) -> Iterator[Found]:
    if not f.layers and f.expert_count is None and next(f.looks_like_experts(), None) is None:
        yield Found(
            f"is a dense model (model type {f.model_type}): it has no routed experts, in config.json or among its "
            "tensors, and moetier serves Mixture-of-Experts models",
            AS_IT_IS,
        )


def names_row(f: Facts, here: Here) -> Iterator[Found]:
    looks = next(f.looks_like_experts(), None)
    if not f.layers and (f.expert_count is not None or looks is not None):
        yield Found(
            f"is a Mixture-of-Experts model (model type {f.model_type}) whose experts' names moetier does not know "
            "yet: expected names such as model.layers.N.mlp.experts.E.gate_proj.weight, found "
            f"{looks or f'{f.expert_count!r:.20} routed experts in config.json and no tensor that looks like one'}",
            AS_IT_IS,
        )


def more_names_row(f: Facts, here: Here) -> Iterator[Found]:
    own = [name for name in f.unknown_names.values() if not f.drafts(name)] if f.layers else []
    if own:
        yield Found(
            f"has experts under names that moetier knows ({f.layers[0].name}) and others under names that it does not "
            f"know yet: found {own[0]}",
            AS_IT_IS,
        )


def keys_row(f: Facts, here: Here) -> Iterator[Found]:
    for names, what in ((keys.EXPERTS, "how many experts there are"), (keys.LAYERS, "how many layers there are")):
        if f.layers and keys.size(f.text, names) is None:
            yield Found(
                f"is a Mixture-of-Experts model ({f.layers[0].name}) of a family whose config.json moetier does not "
                f"know yet (model type {f.model_type}): expected one of {', '.join(names)}, which says {what}, found "
                "none of them",
                AS_IT_IS,
            )


def kinds_row(f: Facts, here: Here) -> Iterator[Found]:
    for layer, parts in f.own_parts.items():
        kind = kind_of(parts, f.config)
        if not kind.read:
            yield Found(
                f"has experts in a format that moetier does not read: {kind.name} (layer {layer.number}: "
                f"{sample(parts)})",
                INSTEAD,
            )
            return


def sizes_row(f: Facts, here: Here) -> Iterator[Found]:
    sizes = [keys.size(f.text, names) for names in (keys.HIDDEN, keys.INTERMEDIATE, keys.EXPERTS, keys.TOP_K)]
    if f.layers and None not in sizes:
        try:
            LayerGeometry(*(one or 0 for one in sizes))
        except MoetierError as error:
            yield Found(f"has sizes that the store's records cannot hold: {error}", AS_IT_IS)


def biases_row(f: Facts, here: Here) -> Iterator[Found]:
    biased = f.model_type.startswith(BIASED)
    for parts in f.own_parts.values():
        fused = (name for name in parts.fused if re.search(r"(?:^|[._])bias$", name))
        single = (f"{matrix}.bias" for matrix, found in parts.matrices.items() if "bias" in found)
        biased = biased or next(fused, None) is not None or next(single, None) is not None
    if biased:
        yield Found("has experts with biases, which moetier's arithmetic does not define", AS_IT_IS)


def activation_row(f: Facts, here: Here) -> Iterator[Found]:
    found = activation.activation_of(f.text)
    if found is not None and found.lower() not in activation.SILU:
        yield Found(
            f"has experts with the activation {found}, and moetier computes SwiGLU (silu) only",
            AS_IT_IS,
        )


def alpha_row(f: Facts, here: Here) -> Iterator[Found]:
    for key, plain in ((activation.ALPHA, 1), (activation.BETA, 0)):
        if f.text.get(key) not in (None, plain):
            yield Found(
                f"has a SwiGLU with {key} {f.text[key]!r:.40}, and moetier's has none (expected {plain})", AS_IT_IS
            )


def unknown_keys_row(f: Facts, here: Here) -> Iterator[Found]:
    found = next(activation.under_unknown_keys(f.config), None)
    if found and f.layers:
        yield Found(
            f"says {found} in config.json, where moetier does not know what it does to the experts; it computes SwiGLU "
            "(silu) as the known keys say",
            f"{AS_IT_IS}, or, where the model's card says that the key does not concern the routed experts, go on with "
            "--skip-support-check",
        )


def clamp_row(f: Facts, here: Here) -> Iterator[Found]:
    """CheckpointError where the clamp is malformed."""
    try:
        limit = activation.limit_of(f.config, [layer.number for layer in f.own_layers])
    except UnsupportedModelError as error:
        text, _, remedy = str(error).rpartition("; ")
        yield Found(f"has a clamp that moetier does not serve: {text}", remedy)
        return
    if limit is not None and here.vllm is not None and here.vllm.clamps(f.architectures) is False:
        yield Found(
            f"has a SwiGLU clamped at {limit:g} by config.json, and vLLM {here.vllm.version} computes "
            f"{', '.join(f.architectures)} without one, so a store would not fit it",
            "correct config.json by the model's card, or take a vLLM that clamps it",
        )


def on_input_row(f: Facts, here: Here) -> Iterator[Found]:
    said = next((key for key in ON_INPUT if f.text.get(key)), None)
    if said or f.model_type.startswith("llama4"):
        yield Found(
            f"multiplies the router's weight into the experts' input ({said or f.model_type}), which moetier's "
            "arithmetic does not define",
            AS_IT_IS,
        )


def zero_row(f: Facts, here: Here) -> Iterator[Found]:
    for key, value in f.text.items():
        if ZERO.search(key) and type(value) is int and value > 0:
            yield Found(
                f"has {value!r:.20} zero-computation experts beside its routed ones ({key}), which moetier does not "
                "serve",
                AS_IT_IS,
            )
            return


def latent_row(f: Facts, here: Here) -> Iterator[Found]:
    hidden = keys.size(f.text, keys.HIDDEN)
    for key in LATENT:
        if f.text.get(key) not in (None, 0, hidden):
            yield Found(
                f"has latent experts, {f.text[key]!r:.20} wide in a model {hidden} wide ({key}), which moetier does "
                "not serve",
                AS_IT_IS,
            )
            return


def router_scale_row(f: Facts, here: Here) -> Iterator[Found]:
    found = next((name for name in f.tensors if "per_expert_scale" in name), None)
    if found:
        yield Found(f"scales each expert in its router ({found}), which moetier does not serve yet", AS_IT_IS)
