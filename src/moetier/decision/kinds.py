"""Number formats and dialects of experts: which are read, which are not, and what to take instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moetier.checkpoint import config as keys
from moetier.checkpoint.names import MATRICES
from moetier.checkpoint.shards import Tensor
from moetier.decision.facts import ExpertParts

INSTEAD = (
    "take this model's BF16, FP8 (E4M3), NVFP4 (modelopt), INT4 (compressed-tensors, symmetric) or MXFP4 "
    "(X.weight with X.scale) release"
)
FLOATS = ("BF16", "F16", "F32")
E8M0 = ("U8", "F8_E8M0")
FP8_SCALES = ("weight_scale_inv", "scale", "weight_scale")


@dataclass(frozen=True)
class Matrix:
    """Facts of one matrix (or of all experts at once): tensors by what follows their name, and the config."""

    parts: dict[str, Tensor]
    fused: bool
    config: dict[str, Any]
    reads_hidden: bool = False
    """Whether its input is the hidden state: gate and up, not down."""

    def dtype(self, part: str) -> str:
        """Its dtype; "" where there is none."""
        return self.parts[part].dtype if part in self.parts else ""

    def has(self, *parts: str) -> bool:
        return any(part in self.parts for part in parts)

    @property
    def method(self) -> str:
        """How config.json calls the quantization, lower case: method, algorithm and format."""
        found = self.config.get("quantization_config") or keys.text_config(self.config).get("quantization_config")
        named = found if isinstance(found, dict) else {}
        return " ".join(
            str(named.get(key, "")) for key in ("quant_method", "quant_algo", "format", "packing_format")
        ).lower()


@dataclass(frozen=True)
class Kind:
    """One format in one dialect. `format`: as store.json calls it, of those that are read."""

    id: str
    name: str
    matches: Callable[[Matrix], bool]
    format: str = ""
    lossless: bool = False

    @property
    def read(self) -> bool:
        return bool(self.format)


def _bits(m: Matrix) -> int:
    """Return the bits of packed integers: by a gate's shape, else config.json; of a down projection, its gate's."""
    packed, hidden = m.parts["weight_packed"], keys.text_config(m.config).get("hidden_size")
    if not m.reads_hidden:
        return 4
    if type(hidden) is int and len(packed.shape) == 2 and packed.shape[1] * 32 in (4 * hidden, 8 * hidden):
        return packed.shape[1] * 32 // hidden
    found = m.config.get("quantization_config")
    groups = found.get("config_groups") if isinstance(found, dict) else None
    each = list(groups.values()) if isinstance(groups, dict) else []
    weights = each[0].get("weights") if len(each) == 1 and isinstance(each[0], dict) else None
    said = weights.get("num_bits") if isinstance(weights, dict) else None
    return said if type(said) is int else 4


def _mxfp8(m: Matrix) -> bool:
    """E4M3 with an E8M0 scale for 32 columns; where weight_block_size says so, the FP8 reader knows it."""
    scale, weight = m.parts.get("weight_scale"), m.parts.get("weight")
    if scale is None or weight is None or weight.dtype != "F8_E4M3":
        return False
    fits = len(weight.shape) == 2 and scale.shape == (weight.shape[0], weight.shape[1] // 32)
    found = m.config.get("quantization_config")
    said = isinstance(found, dict) and found.get("weight_block_size") == [1, 32]
    return scale.dtype == "U8" or (scale.dtype == "F8_E8M0" and fits and not said)


def _gptq(m: Matrix) -> bool:
    return m.has("qweight") and (m.has("g_idx") or "gptq" in m.method)


KINDS: tuple[Kind, ...] = (
    Kind("gpt-oss", "MXFP4 in gpt-oss's fused blocks", lambda m: m.has("gate_up_proj_blocks"), "mxfp4", True),
    Kind(
        "bitsandbytes",
        "bitsandbytes (NF4, FP4 or INT8)",
        lambda m: any(part.startswith(("weight.absmax", "weight.quant", "weight.nested", "SCB")) for part in m.parts),
    ),
    Kind("auto-round", "AutoRound in GPTQ's or AWQ's packing", lambda m: m.has("qweight") and "round" in m.method),
    Kind("gptq", "GPTQ", _gptq),
    Kind("awq", "AWQ", lambda m: m.has("qweight") and ("awq" in m.method or m.has("qzeros"))),
    Kind("qweight", "AWQ or GPTQ", lambda m: m.has("qweight")),
    Kind("exl", "EXL2 or EXL3 (ExLlama)", lambda m: m.has("trellis", "q_weight")),
    Kind("hqq", "HQQ", lambda m: m.has("W_q")),
    Kind("mlx", "MLX", lambda m: m.dtype("weight") == "U32" or (m.has("scales", "biases") and m.has("weight"))),
    Kind("mxfp4", "MXFP4", lambda m: m.dtype("weight") in ("I8", "U8", "F4") and m.has("scale"), "mxfp4", True),
    Kind("nvfp4", "NVFP4 (modelopt)", lambda m: m.dtype("weight") == "U8" and m.has("weight_scale_2"), "nvfp4"),
    Kind(
        "nvfp4-compressed-tensors",
        "NVFP4 as compressed-tensors writes it (weight_packed, weight_global_scale)",
        lambda m: m.dtype("weight_packed") == "U8" and m.has("weight_global_scale"),
    ),
    Kind(
        "mxfp4-compressed-tensors",
        "MXFP4 as compressed-tensors writes it (weight_packed, weight_scale)",
        lambda m: m.dtype("weight_packed") == "U8" and m.dtype("weight_scale") in E8M0,
    ),
    Kind(
        "mxfp4-weight-scale",
        "MXFP4 as Quark and modelopt write it (weight, weight_scale)",
        lambda m: m.dtype("weight") in ("U8", "F4") and m.dtype("weight_scale") in E8M0,
    ),
    Kind("mxfp8", "MXFP8 (E4M3 with a scale for 32 columns)", _mxfp8),
    Kind("fp8", "FP8 (E4M3)", lambda m: m.dtype("weight") == "F8_E4M3" and m.has(*FP8_SCALES), "fp8"),
    Kind("fp8-unscaled", "FP8 (E4M3) without scales", lambda m: m.dtype("weight") == "F8_E4M3"),
    Kind("fp8-other", "FP8 of another kind than E4M3", lambda m: m.dtype("weight").startswith("F8_")),
    Kind(
        "int4-asymmetric",
        "asymmetric INT4 (compressed-tensors with weight_zero_point)",
        lambda m: m.dtype("weight_packed") == "I32" and m.has("weight_zero_point"),
    ),
    Kind(
        "int4-act-order",
        "INT4 with columns in another order (weight_g_idx)",
        lambda m: m.dtype("weight_packed") == "I32" and m.has("weight_g_idx"),
    ),
    Kind(
        "int-packed",
        "packed integers of another width than 4 bits (compressed-tensors)",
        lambda m: m.dtype("weight_packed") == "I32" and _bits(m) != 4,
    ),
    Kind("int4", "INT4 (compressed-tensors, symmetric)", lambda m: m.dtype("weight_packed") == "I32", "int4"),
    Kind("int8", "INT8", lambda m: m.dtype("weight") == "I8" or m.dtype("weight_packed") == "I8"),
    Kind("float", "BF16, FP16 or FP32", lambda m: m.dtype("weight") in FLOATS and not m.fused, "float"),
    Kind(
        "float-fused",
        "BF16, FP16 or FP32 in fused tensors",
        lambda m: m.fused and "gate_up_proj" in m.parts and m.dtype("gate_up_proj") in FLOATS,
        "float",
    ),
    Kind("fp8-fused", "FP8 in fused tensors of all experts", lambda m: m.fused and _fused(m).startswith("F8_")),
    Kind(
        "separate-fused",
        "one tensor of all experts for each of gate and up",
        lambda m: m.fused and m.has("gate_proj", "w1", "up_proj", "w3", "w13", "w13_weight"),
    ),
    Kind("packed-fused", "packed integers in fused tensors of all experts", lambda m: m.fused and _fused(m) != ""),
    Kind("unknown", "in a format that we do not know", lambda m: True),
)
"""The first that matches counts. A kind without a format of the store is not read."""
BY_ID = {kind.id: kind for kind in KINDS}
WEIGHTS = ("weight", "weight_packed", "qweight", "q_weight", "trellis", "W_q")
"""Names of the weights themselves, in one format or another."""
INCOMPLETE = ("unknown", "fp8-unscaled")
"""Forms of a matrix of a known format when a tensor of it is missing: the reader names that tensor."""


def _fused(m: Matrix) -> str:
    """Dtype of the fused gate and up; "" where there is none."""
    return next((t.dtype for name, t in m.parts.items() if name.startswith("gate_up_proj")), "")


def kind_of(parts: ExpertParts, config: dict[str, Any]) -> Kind:
    """How a layer's experts are stored, by its first expert or its fused tensors."""
    inputs = {name for triple in MATRICES for name in triple[:2]}
    matrices = [Matrix(found, False, config, name in inputs) for name, found in parts.matrices.items()]
    if not matrices:
        fused = {name.removesuffix(".weight"): tensor for name, tensor in parts.fused.items()}
        return _first(Matrix(fused, True, config))
    found = list(dict.fromkeys(_first(matrix) for matrix in matrices))
    refused = [kind for kind in found if not kind.read and kind.id not in INCOMPLETE]
    whole = [kind for kind in found if kind.read]
    if refused:
        return refused[0]
    if len({kind.format for kind in whole}) > 1:
        names = " and ".join(kind.name for kind in whole)
        return Kind("mixed", f"several formats within one expert ({names})", lambda m: False)
    own = {part for matrix in matrices for part in matrix.parts}
    odd = next((t for part, t in parts.others.items() if part in WEIGHTS and part not in own), None)
    if whole and odd is not None:
        return Kind("mixed", f"{whole[0].name} and others in another format ({odd.name} {odd.dtype})", lambda m: False)
    return whole[0] if whole else found[0]


def _first(matrix: Matrix) -> Kind:
    return next(kind for kind in KINDS if kind.matches(matrix))


def sample(parts: ExpertParts) -> str:
    """Some tensors of the first expert with dtype and shape."""
    tensors = [t for found in parts.matrices.values() for t in found.values()] or list(parts.fused.values())
    tensors = sorted(tensors, key=lambda t: t.name)[:4]
    return ", ".join(f"{t.name} {t.dtype} {list(t.shape)}" for t in tensors)
