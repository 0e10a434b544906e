"""Hold config.json's words about the experts' quantization against their tensors.

Where both contradict each other one of them is wrong, and nobody can tell which: refused. Algorithms that change the
experts' input (rotations, AWQ's and SmoothQuant's scales) want arithmetic that the contract does not have.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Set
from typing import Any

from moetier.checkpoint import config as keys
from moetier.checkpoint.names import MATRICES
from moetier.checkpoint.sources.base import LayerSource, PerExpertSource
from moetier.errors import CheckpointError, UnsupportedModelError

FLOATS = frozenset(("bf16", "fp16", "fp32"))
METHODS = {"fp8": {"fp8", "mxfp4"}, "mxfp4": {"mxfp4"}, "fbgemm_fp8": {"fp8"}}
"""quant_method to the formats that experts then have. DeepSeek-V4 says fp8 and has experts in MXFP4."""
OTHER_PACKINGS = frozenset(
    re.split(
        r"\s+",
        "awq awq_marlin gptq gptq_marlin auto_gptq bitsandbytes hqq aqlm eetq exl2 exl3 quip spqr vptq higgs "
        "quanto torchao gguf bitnet marlin squeezellm fp_quant moe_wna16 auto-round auto_round intel/auto-round",
    )
)
"""quant_method of formats that no source reads: experts in one that a source reads contradict it."""
ALGORITHMS = (
    ("NVFP4", "nvfp4"),
    ("FP8", "fp8"),
    ("MXFP4", "mxfp4"),
    ("W4A16", "int4"),
    ("W4A8", "int4"),
    ("INT4", "int4"),
)
"""How modelopt's quant_algo begins, and the format."""
PACKED = {
    "pack-quantized": {"int4"}, "float-quantized": {"fp8"}, "naive-quantized": {"fp8"},
    "nvfp4-pack-quantized": {"nvfp4"}, "mxfp4-pack-quantized": {"mxfp4"},
}  # fmt: skip
"""The `format` of compressed-tensors, and the experts' formats."""
TYPES: dict[tuple[Any, Any], set[str]] = {("float", 8): {"fp8"}, ("float", 4): {"nvfp4", "mxfp4"}, ("int", 4): {"int4"}}
EXPERT_DTYPES: dict[str, Set[str]] = {"fp4": {"mxfp4", "nvfp4"}, "fp8": {"fp8"}, "bf16": FLOATS}
EXCLUDED = ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules", "exclude")
INPUTS = re.compile(r"awq|smooth|hadamard|quarot|spinquant|quip|svd|rotat", re.IGNORECASE)
"""Algorithms that change inputs, as names or keys call them."""
ROTATIONS = re.compile(r"hadamard|quarot|spinquant|quip|rotat", re.IGNORECASE)
ALGORITHM_KEYS = ("quant_algo", "algorithm", "algo", "quant_type")
NO, YES = ("false", "0", "no", "off", "n", "f"), ("true", "1", "yes", "on", "y", "t")
"""How compressed-tensors' settings may be spelled, in lower case."""
INPUT_METHODS = ("smoothquant", "quarot", "spinquant", "quip", "quip_sharp", "hadamard")


def check_said(source: LayerSource, draft: bool) -> None:
    """CheckpointError or UnsupportedModelError where config.json says other things than the tensors of a layer are."""
    quantization = keys.quantization(source.config)
    text = keys.text_config(source.config)
    stated = text.get("expert_dtype", (quantization or {}).get("expert_dtype"))
    if isinstance(stated, str) and stated in EXPERT_DTYPES and not draft:
        _same_format(source, EXPERT_DTYPES[stated], f"expert_dtype {stated!r}")
    if quantization is None:
        return
    modules = _modules(source)
    if source.format in FLOATS and (draft or _excluded(quantization, modules)):
        return
    _no_inputs_changed(source, quantization, modules)
    method = quantization.get("quant_method")
    if isinstance(method, str) and method in METHODS:
        _same_format(source, METHODS[method], f"quant_method {method!r}")
    elif isinstance(method, str) and method.lower() in OTHER_PACKINGS and "compress" not in _packing(quantization):
        _same_format(source, {f"{method}-packed"}, f"quant_method {method!r}")
    for algorithm in _algorithms(quantization, modules):
        known = next((name for start, name in ALGORITHMS if algorithm.upper().startswith(start)), None)
        if known is not None:
            _same_format(source, {known}, f"quant_algo {algorithm!r}")
    for group in groups_of(quantization, modules):
        _check_group(source, quantization, group)


def _packing(quantization: dict[str, Any]) -> str:
    """How AutoRound wrote the weights: it also writes compressed-tensors' format."""
    return f"{quantization.get('packing_format', '')} {quantization.get('format', '')}".lower()


def _modules(source: LayerSource) -> list[str]:
    """Names that config.json may call the experts' matrices by."""
    name = source.layer.name
    if isinstance(source, PerExpertSource):
        return [f"{name}.0.{matrix}" for matrix in source.spelling]
    return [name, f"{name}.gate_up_proj", *(f"{name}.0.{matrix}" for matrix in MATRICES[0])]


def _same_format(source: LayerSource, formats: Set[str], said: str) -> None:
    if source.format not in formats:
        raise CheckpointError(
            f"layer {source.layer.number} ({source.layer.name}): expected {' or '.join(sorted(formats))} experts by "
            f"config.json ({said}), found {source.format}; config.json does not belong to these weights: download both "
            "again"
        )


def _excluded(quantization: dict[str, Any], modules: list[str]) -> bool:
    """Whether config.json leaves the experts unquantized."""
    patterns = [p for key in EXCLUDED for p in _strings(quantization.get(key))]
    return any(_matches(pattern, module) for pattern in patterns for module in modules)


def _strings(value: Any) -> list[str]:
    return [entry for entry in value if isinstance(entry, str)] if isinstance(value, list) else []


def _matches(pattern: str, module: str) -> bool:
    """A regular expression, a name with wildcards, a part of a name, or a class of layers."""
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], module) is not None
        except re.error:
            return False
    return pattern in module or fnmatch.fnmatchcase(module, pattern) or fnmatch.fnmatchcase(module, f"*{pattern}*")


def _no_inputs_changed(source: LayerSource, quantization: dict[str, Any], modules: list[str]) -> None:
    found = [f"{key} {value!r}" for key, value in _algorithm_values(quantization, modules) if INPUTS.search(value)]
    method = quantization.get("quant_method")
    if isinstance(method, str) and method.lower() in INPUT_METHODS:
        found.append(f"quant_method {method!r}")
    found += [str(key) for key, value in quantization.items() if value and INPUTS.search(str(key))]
    transforms = quantization.get("transform_config") or source.config.get("transform_config")
    found += [f"transform_config ({scheme})" for scheme in _online(transforms, modules)]
    if found:
        raise UnsupportedModelError(
            f"layer {source.layer.number} ({source.layer.name}): expected experts whose input stays as it is, found "
            f"{found[0]} in config.json, which changes it (a rotation, AWQ's or SmoothQuant's scales); start from the "
            "model without it"
        )


def _algorithm_values(quantization: dict[str, Any], modules: list[str]) -> Iterator[tuple[str, str]]:
    inner = quantization.get("quantization")
    for part in (quantization, inner if isinstance(inner, dict) else {}):
        for key in ALGORITHM_KEYS:
            if isinstance(value := part.get(key), str):
                yield key, value
    # Quark's list. Its AWQ and SmoothQuant are folded into the layers before; rotations are not all.
    steps = quantization.get("algo_config")
    for step in steps if isinstance(steps, list) else [steps]:
        name = step.get("name") if isinstance(step, dict) else step
        if isinstance(name, str) and ROTATIONS.search(name):
            yield "algo_config", name
    layers = quantization.get("quantized_layers")
    for module in modules:
        entry = layers.get(module) if isinstance(layers, dict) else None
        if isinstance(entry, dict) and isinstance(value := entry.get("quant_algo"), str):
            yield f"quantized_layers of {module}: quant_algo", value


def _algorithms(quantization: dict[str, Any], modules: list[str]) -> set[str]:
    """Return what modelopt calls the experts' algorithm: the one of the layer, where it says one for each."""
    values = list(_algorithm_values(quantization, modules))
    own = {value for key, value in values if key.startswith("quantized_layers")}
    return own or {value for key, value in values if key == "quant_algo"}


def _online(transforms: Any, modules: list[str]) -> Iterator[str]:
    """Transforms of compressed-tensors that are applied to the experts when they run; those of weights are in them."""
    if not transforms:
        return
    groups = transforms.get("config_groups") if isinstance(transforms, dict) else None
    if not isinstance(groups, dict):
        yield "of an unknown form"
        return
    for name, scheme in groups.items():
        applies = scheme.get("apply") if isinstance(scheme, dict) else None
        for apply in applies if isinstance(applies, list) else [{}]:
            if not isinstance(apply, dict) or apply.get("location") not in ("weight_input", "weight_output"):
                targets = apply.get("targets") if isinstance(apply, dict) else None
                named = _strings(targets if isinstance(targets, list) else [targets])
                if not named or any(_targets(target, module) for target in named for module in modules):
                    yield str(name)
                    break


def _targets(target: str, module: str) -> bool:
    return target in ("Linear", "LinearBase") or "MoE" in target or _matches(target, module)


def groups_of(quantization: dict[str, Any], modules: list[str]) -> list[dict[str, Any]]:
    """Groups of compressed-tensors, or of modelopt, whose targets are experts: those that name them before classes."""
    groups = quantization.get("config_groups")
    groups = [g for g in groups.values() if isinstance(g, dict)] if isinstance(groups, dict) else []
    chosen = []
    for group in groups:
        targets = _strings(group.get("targets"))
        classes = [target for target in targets if target in ("Linear", "LinearBase") or "MoE" in target]
        if any(_matches(target, module) for target in targets if target not in classes for module in modules):
            return [group]
        chosen += [group] if classes else []
    return chosen


def _check_group(source: LayerSource, quantization: dict[str, Any], group: dict[str, Any]) -> None:
    weights = group.get("weights")
    if not isinstance(weights, dict):
        return
    packed = group.get("format") or quantization.get("format")
    if isinstance(packed, str) and packed in PACKED:
        _same_format(source, PACKED[packed], f"format {packed!r}")
    kind = (str(weights.get("type") or "int"), weights.get("num_bits"))
    known = TYPES.get(kind, set()) if isinstance(kind[1], int | float) else set()
    _same_format(source, known or {f"{kind[0]} of {kind[1]!r:.40} bits"}, f"num_bits {kind[1]!r:.40}")
    for key, wrong, what in (
        ("symmetric", NO, "asymmetric weights"),
        ("dynamic", (*YES, "local"), "weights that are quantized when they are used"),
        ("actorder", (*YES, "group", "dynamic"), "columns in another order"),
    ):
        if str(weights.get(key)).lower() in wrong:
            if key == "symmetric" and kind[0] == "float":
                continue
            raise UnsupportedModelError(
                f"layer {source.layer.number} ({source.layer.name}): config.json says {key} {weights[key]!r}: {what}; "
                "expected symmetric weights in column order; quantize the model so, or take its "
                "unquantized weights"
            )
    _check_scales(source, weights)


def _check_scales(source: LayerSource, weights: dict[str, Any]) -> None:
    """Rows and columns that share a scale."""
    strategy, size, structure = (weights.get(key) for key in ("strategy", "group_size", "block_structure"))
    for rows, columns, n, k in source.blocks:
        wanted = {"channel": (1, k), "tensor": (n, k)}.get(strategy) if isinstance(strategy, str) else None
        if strategy == "block" and isinstance(structure, list) and len(structure) == 2:
            wanted = (structure[0], structure[1])
        elif strategy in (None, "group", "tensor_group") and type(size) is int and size > 0:
            wanted = (1, size)
        if wanted is None or type(wanted[0]) is not int or type(wanted[1]) is not int or min(wanted) < 1:
            continue
        have, want = ((-(-n // r), -(-k // c)) for r, c in ((rows, columns), wanted))
        if have != want:
            raise CheckpointError(
                f"layer {source.layer.number} ({source.layer.name}): expected a scale for {wanted[0]} x {wanted[1]} "
                f"weights by config.json (strategy {strategy!r}, group_size {size!r}), found one for {min(rows, n)} x "
                f"{min(columns, k)}; config.json does not belong to these weights: download both again"
            )
