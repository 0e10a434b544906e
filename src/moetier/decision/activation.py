"""Activation and clamp of the experts, as config.json says them and as vLLM's layer will have them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from moetier.checkpoint import config as keys
from moetier.contract import Family
from moetier.decision.row import AS_IT_IS
from moetier.errors import CheckpointError, UnsupportedModelError

ACTIVATIONS = ("hidden_act", "hidden_activation", "mlp_hidden_act", "moe_hidden_act", "activation_function", "ffn_act")
SILU = ("silu", "swish", "swiglu")
ALPHA, BETA = "swiglu_alpha", "swiglu_beta"
LIMITS = ("swiglu_limit", "swiglu_limits", "expert_swiglu_limit_list")
"""Keys whose meaning is known: one number, or one for each layer."""
CLAMP = re.compile(r"swiglu.*(?:limit|clamp|clip)|(?:limit|clamp|clip).*swiglu|(?:expert|moe|mlp).*(?:clamp|clip)")
OTHERS = re.compile(r"shared?_|_shared?|vision|dense")
"""Clamps of shared experts and towers, which are vLLM's own business."""
DEFAULT_LIMIT = {"deepseek_v4": 10.0, "glm5_next": 10.0, "hy_v4": 10.0, "minimax_m3": 7.0}
"""Model types, by prefix, whose config class clamps where config.json does not say (transformers 5.19, vLLM 0.32)."""
ZERO_IS_NONE = ("hy_v4", "exaone_moe")
"""Model types that clamp for which 0 is no clamp; the others would clamp to 0."""
DEEPEST = 3
"""Dictionaries inside each other that are looked into."""
STEP = ("step3p5", "step3p7", "bailing_moe_v3")
"""Model types, by prefix, that clamp after SiLU and not before it."""

ACTS = frozenset(("act", "activation", "activations", "actfn", "nonlinearity"))
CLAMPS = frozenset(("clamp", "clamps", "clamping", "clip", "clips", "clipping", "limit", "limits", "cap"))
COEFFICIENTS = {"alpha": 1, "beta": 0}
"""Words of keys that shape a SwiGLU, and what changes nothing."""
GLU = frozenset(("act", "activation", "swiglu", "glu", "expert", "experts", "ffn", "mlp", "moe"))
ELSEWHERE = frozenset(
    re.split(
        r"\s+",
        "vision visual image video audio speech mm projector attn attention conv mamba ssm linear router gating "
        "scoring shared classifier pooler quant quantization kv embedding encoder adapter checkpoint "
        "checkpointing recompute dtype scheme dropout logit logits softcap qkv grad gradient token tokens "
        "position positions rope time step dt length factor loss aux lora group groups indexer engram ngram "
        "generation id2label label2id auto",
    )
)
"""Words of keys that are about other parts of a model, or about training."""


def under_unknown_keys(config: dict[str, Any]) -> Iterator[str]:
    """Yield what config.json says of an activation, a clamp or a coefficient where nobody here or in a row looks.

    A key is judged by its words, so that one that no released model had until today is not taken for plain SwiGLU.
    """
    text = keys.text_config(config)
    known = {*ACTIVATIONS, ALPHA, BETA, *(key for key, _ in _said(text))}
    places = [("", text, known)]
    if text is not config:
        places.append(("", {key: value for key, value in config.items() if value is not text}, set(LIMITS)))
    while places:
        path, part, skipped = places.pop()
        for key, value in part.items():
            words = set(re.split(r"[^a-z0-9]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", str(key)).lower()))
            if key in skipped or words & ELSEWHERE:
                continue
            name = f"{path}{key}"
            if words & ACTS:
                said = value.get("name", value.get("type")) if isinstance(value, dict) else value
                each = said if isinstance(said, list) else [said]
                if any(isinstance(one, str) and one and one.lower() not in SILU for one in each):
                    yield f"{name} {said!r:.60}"
                    continue
            if (words & CLAMPS and _says_something(value) and not isinstance(value, bool)) or (
                words & GLU and any(value not in (None, COEFFICIENTS[word]) for word in words & COEFFICIENTS.keys())
            ):
                yield f"{name} {value!r:.60}"
            elif isinstance(value, dict) and path.count(".") < DEEPEST:
                places.append((f"{name}.", value, set()))


def activation_of(text: Mapping[str, Any]) -> str | None:
    """The experts' activation by name, the first that is not SiLU; None where config.json names none."""
    said = [text[key] for key in ACTIVATIONS if text.get(key) is not None]
    inner = (part.get(key) for part in text.values() if isinstance(part, dict) for key in ("ffn_act_fn", "ffn_act"))
    said += [one.get("name") if isinstance(one, dict) else one for one in inner if one is not None]
    other = [one for one in said if not (isinstance(one, str) and one.lower() in SILU)]
    return str((other or said)[0]) if said else None


def family(config: dict[str, Any], layers: Iterable[int] = ()) -> Family:
    """Clamp and place of the route weight. layers: numbers of the model's own MoE layers, for clamps layer by layer."""
    return Family(
        swiglu_limit=limit_of(config, layers),
        route_weight_before_down=keys.model_type(config).startswith(keys.ROUTE_WEIGHT_BEFORE_DOWN),
    )


def limit_of(config: dict[str, Any], layers: Iterable[int] = ()) -> float | None:
    """The clamp of all MoE layers, None: none; UnsupportedModelError where one number does not describe it."""
    text, model_type, numbers = keys.text_config(config), keys.model_type(config), tuple(layers)
    found: dict[str, set[float | None]] = {}
    for key, value in _said(text):
        if key not in LIMITS and _says_something(value):
            raise UnsupportedModelError(
                f"config.json has {key} {value!r:.80}: a clamp whose meaning moetier does not know; {AS_IT_IS}"
            )
        found[key] = _values(key, value, numbers) if key in LIMITS else {None}
    outside = {key: value for key, value in _said(config) if text is not config and _says_something(value)}
    for key, value in outside.items():
        if key not in LIMITS or found.get(key) != _values(key, value, numbers):
            raise UnsupportedModelError(
                f"config.json says {key} {value!r} for the whole model and {text.get(key)!r} for its language model, "
                "which is what vLLM reads; correct config.json by the model's card"
            )
    clamps = {key: values for key, values in found.items() if values != {None}}
    if not clamps:
        return _unsaid(text, model_type)
    key, values = next(iter(clamps.items()))
    if model_type.startswith(STEP):
        raise UnsupportedModelError(
            f"its experts are clamped after SiLU ({key}), which the contract does not define; {AS_IT_IS}"
        )
    if len(values) > 1 or any(other != values for other in clamps.values()):
        listed = ", ".join("none" if one is None else f"{one:g}" for one in sorted(values, key=lambda v: v or 0.0))
        raise UnsupportedModelError(
            f"its SwiGLU's clamp differs by layer ({key}: {listed}), and a store has one for all layers; {AS_IT_IS}"
        )
    return next(iter(values))


def _unsaid(text: Mapping[str, Any], model_type: str) -> float | None:
    """Where config.json clamps nothing: what the model's own config class has."""
    default = next((limit for kind, limit in DEFAULT_LIMIT.items() if model_type.startswith(kind)), None)
    if default is None or (text.get("swiglu_limit") == 0 and model_type.startswith(ZERO_IS_NONE)):
        return None
    if "swiglu_limit" in text:
        raise UnsupportedModelError(
            f"config.json says swiglu_limit {text['swiglu_limit']!r}, at which vLLM's {model_type} would clamp all to "
            f"nothing; correct config.json by the model's card (usual: {default:g})"
        )
    return default


def _said(text: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Keys about clamps of routed experts, with their values."""
    for key, value in text.items():
        if CLAMP.search(key) and not OTHERS.search(key):
            yield key, value


def _says_something(value: Any) -> bool:
    """Whether a value is more than none, 0, false, or a list of them."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(map(_says_something, inner)) if isinstance(value, dict | list) else bool(value)


def _values(key: str, value: Any, layers: tuple[int, ...]) -> set[float | None]:
    """The clamps of these layers; of all that are listed where no layers are given."""
    if isinstance(value, dict):
        numbered = all(isinstance(name, str) and name.isdecimal() for name in value)
        each = [value.get(str(n)) for n in layers] if numbered and layers else list(value.values())
    elif isinstance(value, list):
        each = [value[n] if n < len(value) else None for n in layers] if layers else list(value)
    else:
        each = [value]
    return {_number(key, one) for one in each} or {None}


def _number(key: str, value: Any) -> float | None:
    """A clamp; None and 0 are none."""
    if value is None:
        return None
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    if not plain or not 0 <= value < 2**100:  # a NaN is not either
        raise CheckpointError(f"config.json: expected a positive number for {key}, found {value!r:.80}")
    return float(value) or None
