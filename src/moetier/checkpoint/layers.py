"""The layers that config.json announces, against those whose experts are there."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moetier.checkpoint import config as keys
from moetier.checkpoint.index import named, say_once
from moetier.checkpoint.names import LAYERS, MoeLayer
from moetier.checkpoint.shards import Shards
from moetier.errors import CheckpointError

MOST_LAYERS = 10_000
"""Numbers of layers have four digits."""
MOST_DRAFTS = 64

LISTS = ("mlp_layer_types", "moe_layer_freq")
"""Keys with an entry for each layer: a kind, or 1 for routed experts."""
NUMBERS = ("moe_layers_enum", "moe_layers")
"""Keys that list the numbers of the layers with routed experts."""
FIRST_DENSE = ("first_k_dense_replace", "num_dense_layers", "moe_layer_num_skipped")
"""Keys that say how many of the first layers are dense."""
FIRST_DENSE_DEFAULTS = {"glm4_moe": 1, "deepseek_v3": 3}
"""First dense layers that transformers takes for a model type whose config.json has no first_k_dense_replace."""

_ROOTS = "|".join(
    sorted({re.escape(s.template.partition("layers.{layer}.")[0]) for s in LAYERS if not s.drafts}, reverse=True)
)
_MLP = r"(?:mlp|ffn|feed_forward)\.(?:gate_proj|up_proj|down_proj|gate_up_proj|w[123])\b"
_DENSE = re.compile(rf"(?:{_ROOTS})layers\.(\d{{1,4}})\.{_MLP}")
_DENSE_DRAFT = re.compile(rf"(?:\w+\.)*(?:mtp|nextn)\w*\.(?:.*\.)?{_MLP}")

Rule = Callable[[int], bool | None]
"""Whether a layer has routed experts; None: not said."""


@dataclass(frozen=True)
class LeftOut:
    """A draft layer that the store does not have, and why. name: of its experts, "" where there are none."""

    number: int
    name: str
    reason: str


def check_trunk(config: dict[str, Any], shards: Shards, layers: list[MoeLayer]) -> None:
    """CheckpointError where a layer of the model itself lacks the experts that config.json announces, or has others."""
    text = keys.text_config(config)
    hidden = hidden_layers(config)
    rules = _rules(text)
    said = {number: _said(rules, number) for number in range(hidden)}
    default = FIRST_DENSE_DEFAULTS.get(keys.model_type(config), 0) if "first_k_dense_replace" not in text else 0
    found = {layer.number: layer for layer in layers}
    absent = [number for number in range(hidden) if number not in found and said[number] is not False]
    absent = [number for number in absent if said[number] is True or number >= default]
    if absent:
        dense = _dense_layers(shards)
        absent = [number for number in absent if said[number] is True or number not in dense]
    if absent:
        elsewhere = shards.layer_elsewhere(re.compile(rf"(?:{_ROOTS})layers\.{absent[0]}\."))
        have = "dense ones" if absent[0] in _dense_layers(shards) else "none"
        raise CheckpointError(
            f"{shards.folder}: expected routed experts in layer {named(map(str, absent))} by config.json "
            f"({hidden} layers{_why(text)}), found {have}; {elsewhere or 'weights are missing'}: download "
            "the checkpoint again"
        )
    for number, layer in found.items():
        if number < hidden and said[number] is False:
            raise CheckpointError(
                f"{shards.folder}: layer {number} is dense by config.json ({hidden} layers{_why(text)}), but there are "
                f"experts {layer.name}; config.json does not belong to these weights: download both again"
            )


def hidden_layers(config: dict[str, Any]) -> int:
    """Layers of the model itself."""
    hidden = keys.required(keys.text_config(config), keys.LAYERS)
    if hidden >= MOST_LAYERS:
        raise CheckpointError(f"config.json: expected fewer than {MOST_LAYERS} layers, found {hidden}")
    return hidden


def announced_drafts(config: dict[str, Any]) -> int | None:
    """Draft layers that config.json announces; None if it says nothing of them."""
    text = keys.text_config(config)
    for key in keys.DRAFT_LAYERS:
        value = text.get(key, config.get(key))
        if value is None:
            continue
        if type(value) is not int or not 0 <= value <= MOST_DRAFTS:
            raise CheckpointError(f"config.json: expected 0 to {MOST_DRAFTS} for {key}, found {value!r:.80}")
        return value
    return None


def split_drafts(
    config: dict[str, Any], shards: Shards, layers: list[MoeLayer], differs: Callable[[MoeLayer], str]
) -> tuple[list[MoeLayer], list[LeftOut]]:
    """The layers that a store can hold, and the draft layers that it cannot.

    differs says what a draft layer has that the model's layers have not; "" if nothing.
    """
    hidden, announced = hidden_layers(config), announced_drafts(config)
    kept, left = [], []
    for layer in layers:
        beyond = layer.number - hidden - (announced or 0)
        if layer.number < hidden:
            kept.append(layer)
        elif beyond >= 0 and announced is None and not layer.drafts:
            raise CheckpointError(
                f"{shards.folder}: config.json says {hidden} layers, but there are experts {layer.name}; config.json "
                "does not belong to these weights: download both again"
            )
        elif beyond >= 0 and announced is not None:
            left.append(LeftOut(layer.number, layer.name, f"config.json announces {announced} draft layers"))
        elif reason := differs(layer):
            left.append(LeftOut(layer.number, layer.name, reason))
        else:
            kept.append(layer)
    numbers = {layer.number for layer in layers}
    for number in range(hidden, hidden + (announced or 0)):
        if number not in numbers and not _is_dense_draft(shards, number):
            elsewhere = shards.layer_elsewhere(re.compile(rf"layers\.{number}\.|^mtp\b"))
            left.append(
                LeftOut(number, "", "config.json announces it, no tensor is there" + (elsewhere and f"; {elsewhere}"))
            )
    left.sort(key=lambda one: one.number)
    _say_left_out(shards, left)
    return kept, left


def _say_left_out(shards: Shards, left: list[LeftOut]) -> None:
    """One line for all draft layers with the same reason."""
    reasons: dict[str, list[LeftOut]] = {}
    for one in left:
        reasons.setdefault(one.reason, []).append(one)
    for reason, of_it in reasons.items():
        layers = ", ".join(f"{one.number} ({one.name})" if one.name else str(one.number) for one in of_it)
        say_once(
            f"{shards.folder}: draft layer {layers} is left out of the store: {reason}; the model is served without "
            "speculation by its own drafter"
        )


def _rules(text: dict[str, Any]) -> list[Rule]:
    """Return what the keys of config.json say. A list of all layers counts alone."""
    for key in LISTS:
        value = text.get(key)
        if isinstance(value, list):
            return [lambda number, value=value: _entry(value, number)]  # type: ignore[misc]
    for key in NUMBERS:
        value = text.get(key)
        if isinstance(value, str) and re.fullmatch(r"\s*\d{1,4}(\s*,\s*\d{1,4})*\s*", value):
            value = [int(part) for part in value.split(",")]
        if isinstance(value, list) and {*map(type, value)} == {int}:
            return [lambda number, value=value: number in value]  # type: ignore[misc]
    rules: list[Rule] = []
    first = 0
    for key in FIRST_DENSE:
        if (value := _integer(text, key)) is not None:
            first = max(first, value)
            rules.append(lambda number, value=value: number >= value)  # type: ignore[misc]
    every = _integer(text, "moe_layer_freq")
    if every is not None and every > 0:
        # Families disagree about where they begin to count.
        rules.append(lambda number: _agreed(number % every == 0, (number - first) % every == 0))
    if (step := _integer(text, "decoder_sparse_step")) is not None and step > 0:
        rules.append(lambda number: (number + 1) % step == 0)
    only = text.get("mlp_only_layers")
    if only is not None and not (isinstance(only, list) and {*map(type, only)} <= {int}):
        raise CheckpointError(
            f"config.json: expected numbers of layers for mlp_only_layers, found {only!r:.80}; the file is damaged: "
            "download it again"
        )
    if isinstance(only, list):
        rules.append(lambda number: number not in only)
    start, interval = _integer(text, "moe_layer_start_index"), _integer(text, "moe_layer_interval")
    if start is not None:
        end = _integer(text, "moe_layer_end_index")
        last = MOST_LAYERS if end is None or end < 0 else end
        rules.append(lambda number: start <= number <= last and (number + 1) % (interval or 1) == 0)
    return rules


def _said(rules: list[Rule], number: int) -> bool | None:
    """Return what all rules say together; None if they leave it open."""
    said = {rule(number) for rule in rules}
    if False in said:
        return False
    return True if said == {True} else None


def _agreed(one: bool, other: bool) -> bool | None:
    return one if one == other else None


def _entry(value: list[Any], number: int) -> bool | None:
    if number >= len(value):
        return None
    known: dict[Any, bool] = {"sparse": True, "moe": True, "dense": False, 1: True, 0: False}
    entry = value[number]
    return known.get(entry) if isinstance(entry, str | int) else None


def _integer(text: dict[str, Any], key: str) -> int | None:
    value = text.get(key)
    if key in LISTS and isinstance(value, list):
        return None
    if value is not None and type(value) is not int:
        raise CheckpointError(
            f"config.json: expected an integer for {key}, found {value!r:.80}; the file is damaged: download it again"
        )
    return value


def _why(text: dict[str, Any]) -> str:
    """The keys that decide, for a message."""
    have = [
        f"{key} {text[key]}"
        for key in (*NUMBERS, *FIRST_DENSE, "moe_layer_freq", "decoder_sparse_step", "mlp_only_layers")
        if isinstance(text.get(key), int | list | str) and len(str(text[key])) < 60
    ]
    have += ["mlp_layer_types"] if isinstance(text.get("mlp_layer_types"), list) else []
    return "".join(f", {key}" for key in have)


def _dense_layers(shards: Shards) -> set[int]:
    """Numbers of the layers that have a dense MLP."""
    return {int(match[1]) for name in shards.tensors if (match := _DENSE.match(name)) is not None}


def _is_dense_draft(shards: Shards, number: int) -> bool:
    """Whether the drafter has an MLP without experts there."""
    return number in _dense_layers(shards) or any(_DENSE_DRAFT.match(name) for name in shards.tensors)
