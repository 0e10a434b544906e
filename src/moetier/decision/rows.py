"""The table of what decides: each row looks at the facts, says what it found, and what to do instead."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from moetier.decision import activation
from moetier.decision.facts import Facts
from moetier.decision.installed import Installed
from moetier.decision.kinds import INSTEAD, kind_of, sample
from moetier.doctor.facts import Answer, Support
from moetier.doctor.support import check
from moetier.errors import MoetierError, UnsupportedModelError
from moetier.formats import LayerGeometry
from moetier.store import config as keys
from moetier.vllm_arguments import has

AS_IT_IS = "serve it with vLLM as it is if it fits"
TRUST = "--trust-remote-code"
NGRAM = re.compile(r"ngram|suffix")
ON_INPUT = ("apply_router_weight_on_input", "moe_apply_router_weight_on_input")
LATENT = ("moe_latent_size", "routed_expert_hidden_size", "moe_latent_dim")
ZERO = re.compile(r"zero.*expert|expert.*zero|copy_expert")
TIKTOKEN = ("kimi",)
"""Model types, by prefix, whose tiktoken.model transformers reads itself. Of others it makes a tokenizer that knows no
text, without a word: those need a tokenizer.json, or their own code."""
BIASED = ("gpt_oss",)
"""Model types whose experts have biases, for bundled geometries, which have no headers to see them in."""


class Level(StrEnum):
    """What a finding means."""

    REFUSES = "refuses"
    CONDITION = "condition"
    """Serving needs an argument for vLLM; everything before it goes on."""
    NO_DRAFTER = "no drafter"
    NOTE = "note"


@dataclass(frozen=True)
class Here:
    """Where it would be served."""

    vllm: Installed | None = None
    devices: tuple[str | None, ...] = ()
    """"cpu" or compute capabilities; empty: no matter where."""
    arguments: tuple[str, ...] = ()
    """What is passed on to vLLM."""


@dataclass(frozen=True)
class Found:
    """What a row found, as a sentence that begins with the checkpoint's name; remedy is what to do."""

    text: str
    remedy: str = ""


@dataclass(frozen=True)
class Row:
    """One row.

    reads: experts cannot even be read. tensors: the row looks at headers. overridable: by --skip-support-check.
    """

    id: str
    about: str
    find: Callable[[Facts, Here], Iterator[Found]]
    level: Level = Level.REFUSES
    reads: bool = False
    tensors: bool = False
    overridable: bool = False


def _dense(f: Facts, here: Here) -> Iterator[Found]:
    if not f.layers and f.expert_count is None and next(f.looks_like_experts(), None) is None:
        yield Found(
            f"is a dense model (model type {f.model_type}): it has no routed experts, in config.json or among its "
            "tensors, and moetier serves Mixture-of-Experts models",
            "use vLLM as it is for this one",
        )


def _names(f: Facts, here: Here) -> Iterator[Found]:
    looks = next(f.looks_like_experts(), None)
    if not f.layers and (f.expert_count is not None or looks is not None):
        yield Found(
            f"is a Mixture-of-Experts model (model type {f.model_type}) whose experts' names moetier does not know "
            "yet: expected names such as model.layers.N.mlp.experts.E.gate_proj.weight, found "
            f"{looks or f'{f.expert_count!r:.20} routed experts in config.json and no tensor that looks like one'}",
            AS_IT_IS,
        )


def _more_names(f: Facts, here: Here) -> Iterator[Found]:
    own = [name for name in f.unknown_names.values() if not f.drafts(name)] if f.layers else []
    if own:
        yield Found(
            f"has experts under names that moetier knows ({f.layers[0].name}) and others under names that it does not "
            f"know yet: found {own[0]}",
            AS_IT_IS,
        )


def _keys(f: Facts, here: Here) -> Iterator[Found]:
    for names, what in ((keys.EXPERTS, "how many experts there are"), (keys.LAYERS, "how many layers there are")):
        if f.layers and keys.size(f.text, names) is None:
            yield Found(
                f"is a Mixture-of-Experts model ({f.layers[0].name}) of a family whose config.json moetier does not "
                f"know yet (model type {f.model_type}): expected one of {', '.join(names)}, which says {what}, found "
                "none of them",
                AS_IT_IS,
            )


def _kinds(f: Facts, here: Here) -> Iterator[Found]:
    for layer, parts in f.parts.items():
        kind = kind_of(parts, f.config)
        if not kind.read:
            yield Found(
                f"has experts in a format that moetier does not read: {kind.name} (layer {layer.number}: "
                f"{sample(parts)})",
                INSTEAD,
            )
            return


def _sizes(f: Facts, here: Here) -> Iterator[Found]:
    sizes = [keys.size(f.text, names) for names in (keys.HIDDEN, keys.INTERMEDIATE, keys.EXPERTS, keys.TOP_K)]
    if f.layers and None not in sizes:
        try:
            LayerGeometry(*(one or 0 for one in sizes))
        except MoetierError as error:
            yield Found(f"has sizes that the store's records cannot hold: {error}", AS_IT_IS)


def _biases(f: Facts, here: Here) -> Iterator[Found]:
    biased = f.model_type.startswith(BIASED)
    for parts in f.parts.values():
        fused = (name for name in parts.fused if re.search(r"(?:^|[._])bias$", name))
        single = (f"{matrix}.bias" for matrix, found in parts.matrices.items() if "bias" in found)
        biased = biased or next(fused, None) is not None or next(single, None) is not None
    if biased:
        yield Found("has experts with biases, which moetier's arithmetic does not define", AS_IT_IS)


def _activation(f: Facts, here: Here) -> Iterator[Found]:
    found = activation.activation_of(f.text)
    if found is not None and found.lower() not in activation.SILU:
        yield Found(
            f"has experts with the activation {found}, and moetier computes SwiGLU (silu) only",
            AS_IT_IS,
        )


def _alpha(f: Facts, here: Here) -> Iterator[Found]:
    for key, plain in ((activation.ALPHA, 1), (activation.BETA, 0)):
        if f.text.get(key) not in (None, plain):
            yield Found(
                f"has a SwiGLU with {key} {f.text[key]!r:.40}, and moetier's has none (expected {plain})", AS_IT_IS
            )


def _clamp(f: Facts, here: Here) -> Iterator[Found]:
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


def _on_input(f: Facts, here: Here) -> Iterator[Found]:
    said = next((key for key in ON_INPUT if f.text.get(key)), None)
    if said or f.model_type.startswith("llama4"):
        yield Found(
            f"multiplies the router's weight into the experts' input ({said or f.model_type}), which moetier's "
            "arithmetic does not define",
            AS_IT_IS,
        )


def _zero(f: Facts, here: Here) -> Iterator[Found]:
    for key, value in f.text.items():
        if ZERO.search(key) and type(value) is int and value > 0:
            yield Found(
                f"has {value!r:.20} zero-computation experts beside its routed ones ({key}), which moetier does not "
                "serve",
                AS_IT_IS,
            )
            return


def _latent(f: Facts, here: Here) -> Iterator[Found]:
    hidden = keys.size(f.text, keys.HIDDEN)
    for key in LATENT:
        if f.text.get(key) not in (None, 0, hidden):
            yield Found(
                f"has latent experts, {f.text[key]!r:.20} wide in a model {hidden} wide ({key}), which moetier does "
                "not serve",
                AS_IT_IS,
            )
            return


def _router_scale(f: Facts, here: Here) -> Iterator[Found]:
    found = next((name for name in f.tensors if "per_expert_scale" in name), None)
    if found:
        yield Found(f"scales each expert in its router ({found}), which moetier does not serve yet", AS_IT_IS)


def _architecture(f: Facts, here: Here) -> Iterator[Found]:
    if here.vllm is not None and here.vllm.knows(f.architectures) is False:
        yield Found(
            f"is of an architecture that vLLM {here.vllm.version} does not know: {', '.join(f.architectures)} (model "
            f"type {f.model_type})",
            "take a vLLM that has it; where a plugin of yours brings it, --skip-support-check",
        )


def supports(f: Facts, here: Here) -> tuple[Support, ...]:
    """What support.toml says of each kind of device, by the name of the model type that it knows."""
    if here.vllm is None:
        return ()
    found = []
    for device in dict.fromkeys(here.devices):
        each = [check(kind, here.vllm.version, device) for kind in reversed(f.model_types)]
        found.append(next((one for one in each if one.sources), each[0]))
    return tuple(found)


def _support(f: Facts, here: Here) -> Iterator[Found]:
    for support in supports(f, here):
        if support.answer is Answer.FAILS:
            yield Found(
                f"is known to fail here: {support}",
                "take another vLLM or device, or, if this one is mended, --skip-support-check",
            )


def _config_code(f: Facts, here: Here) -> Iterator[Found]:
    needs = f.config.get("auto_map")
    native = here.vllm is not None and here.vllm.model_types is not None and f.model_types[-1] in here.vllm.model_types
    if isinstance(needs, dict) and "AutoConfig" in needs and not native:
        yield _code("config.json", needs["AutoConfig"], here)


def _tokenizer_code(f: Facts, here: Here) -> Iterator[Found]:
    mapped = f.tokenizer.config.get("auto_map")
    code = mapped.get("AutoTokenizer") if isinstance(mapped, dict) else mapped
    named = str(f.tokenizer.config.get("tokenizer_class") or "")
    known = (here.vllm.tokenizers if here.vllm is not None else None) or frozenset()
    by_type = any(kind in known and (f.tokenizer.whole or kind.startswith(TIKTOKEN)) for kind in f.model_types)
    native = named.removesuffix("Fast") in known or named in known or by_type
    if code and not native and not has(here.arguments, "--tokenizer"):
        yield _code("tokenizer_config.json", code, here)


def _code(where: str, code: object, here: Here) -> Found:
    files = [one for one in (code if isinstance(code, list) else [code]) if isinstance(one, str)]
    return Found(
        f"brings Python code of its own that vLLM would have to run (auto_map in {where}: {', '.join(files)[:200]})",
        f"read it, and if you trust it, serve with `-- {TRUST}`",
    )


def drafter_problem(f: Facts) -> str | None:
    """What is wrong with the drafter, as what "it has"; None: there is none, or a store holds it."""
    if f.left_out:
        return f"layers that a store does not hold: {'; '.join(f.left_out)}"
    experts, top_k = keys.size(f.text, keys.EXPERTS), keys.size(f.text, keys.TOP_K)
    sizes = keys.size(f.text, ("dspark_n_routed_experts",)), keys.size(f.text, ("dspark_num_experts_per_tok",))
    if any(size not in (None, own) for size, own in zip(sizes, (experts, top_k), strict=True)):
        return f"{sizes[0] or experts} experts, top-{sizes[1] or top_k}, and the model {experts}, top-{top_k}"
    for layer in f.draft_layers:
        found = f.parts[layer].experts if layer in f.parts else experts
        if found != experts:
            return f"{found} experts (layer {layer.number}, {layer.name}), and the model {experts}"
    whole = f.headers and f.trimmed_format is None
    if whole and f.announced_drafts and not f.draft_layers and not any(map(f.drafts, f.tensors)):
        return f"{f.announced_drafts} layers by config.json, and none among the tensors"
    return next((f"experts under a name that is not known yet ({name})" for name in f.unknown_names.values()
                 if f.layers and f.drafts(name)), None)  # fmt: skip


def _drafter(f: Facts, here: Here) -> Iterator[Found]:
    problem = drafter_problem(f)
    if problem:
        yield Found(
            f"brings a drafter (speculative decoding) that moetier does not serve: it has {problem}",
            "serve without --speculative-config",
        )


def _speculation(f: Facts, here: Here) -> Iterator[Found]:
    asked = [one.partition("=")[0] for one in here.arguments if one.startswith(("--spec", "-sc"))]
    problem = drafter_problem(f)
    if asked and problem and not NGRAM.search(" ".join(here.arguments)):
        yield Found(f"cannot speculate with its own drafter, which has {problem}", f"leave {asked[0]} out")


ROWS: tuple[Row, ...] = (
    Row("dense", "no routed experts", _dense, reads=True, tensors=True),
    Row("names", "names of experts that are not known", _names, reads=True, tensors=True),
    Row("more-names", "experts under known and unknown names", _more_names, reads=True, tensors=True),
    Row("keys", "config.json of a family that is not known", _keys, reads=True, tensors=True),
    Row("kind", "number formats and dialects that are not read", _kinds, reads=True, tensors=True),
    Row("sizes", "sizes that are no multiples of 32, top-k above the experts", _sizes, reads=True, tensors=True),
    Row("biases", "biases of experts", _biases),
    Row("activation", "activations other than SwiGLU (silu)", _activation),
    Row("alpha", "a SwiGLU with an alpha or beta", _alpha),
    Row("clamp", "clamps that differ by layer, come after SiLU, or that vLLM does not have", _clamp, reads=True),
    Row("on-input", "the router's weight on the experts' input", _on_input),
    Row("zero", "zero-computation experts", _zero),
    Row("latent", "latent experts", _latent),
    Row("router-scale", "a scale for each expert in the router", _router_scale, tensors=True),
    Row("speculation", "speculation with a drafter of another geometry", _speculation),
    Row("architecture", "architectures that the installed vLLM does not know", _architecture, overridable=True),
    Row("support", "model types that are known to fail with this vLLM on this device", _support, overridable=True),
    Row("config-code", "a config class that only the checkpoint brings", _config_code, Level.CONDITION),
    Row("tokenizer-code", "a tokenizer that only the checkpoint brings", _tokenizer_code, Level.CONDITION),
    Row(
        "drafter",
        "drafters of another geometry, under names that are not known, or announced and missing",
        _drafter,
        Level.NO_DRAFTER,
    ),
)
"""In this order: what is said first is what stands in the way most."""
