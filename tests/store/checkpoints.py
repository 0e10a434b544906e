"""Checkpoints made for tests, written byte by byte: no library writes F8_E8M0, and tests want wrong files too."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moetier.contract import BLOCK, ExpertMatrices, Matrix

Tensors = dict[str, tuple[str, tuple[int, ...], np.ndarray]]
"""name -> dtype, shape, and the bytes as an array of any type."""

NAMINGS = {
    "hf": ("model.layers.{layer}.mlp", ("gate_proj", "up_proj", "down_proj")),
    "deepseek_v4": ("layers.{layer}.ffn", ("w1", "w3", "w2")),
}


@dataclass(frozen=True)
class Made:
    """A checkpoint and what is in it: experts[layer number, expert]."""

    path: Path
    layers: tuple[int, ...]
    experts: dict[tuple[int, int], ExpertMatrices]


def random_matrix(rng: np.random.Generator, rows: int, k: int, scales: tuple[int, int] = (110, 130)) -> Matrix:
    """Random codes and E8M0 scales in [low, high)."""
    return Matrix(rng.integers(0, 256, (rows, k // 2), np.uint8), rng.integers(*scales, (rows, k // BLOCK), np.uint8))


def random_expert(
    rng: np.random.Generator, hidden: int, intermediate: int, scales: tuple[int, int] = (110, 130)
) -> ExpertMatrices:
    shapes = ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
    return ExpertMatrices(*(random_matrix(rng, *shape, scales) for shape in shapes))


def write_safetensors(path: Path, tensors: Tensors, header: dict[str, Any] | None = None) -> None:
    """Write one file; `header` replaces the right one."""
    right: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape, data) in tensors.items():
        right[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + data.nbytes]}
        offset += data.nbytes
    text = json.dumps(right if header is None else header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, _, data in tensors.values():
            file.write(np.ascontiguousarray(data).tobytes())


def write_shards(path: Path, tensors: Tensors, shards: int = 1) -> None:
    """Write the tensors over some files with their index."""
    path.mkdir(parents=True, exist_ok=True)
    names = list(tensors)
    weight_map = {}
    for index in range(shards):
        file = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        part = names[index * len(names) // shards : (index + 1) * len(names) // shards]
        write_safetensors(path / file, {name: tensors[name] for name in part})
        weight_map.update(dict.fromkeys(part, file))
    index_text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (path / "model.safetensors.index.json").write_text(index_text)


def base_config(
    *, layers: Iterable[int], experts: int, hidden: int, intermediate: int, top_k: int, **overrides: Any
) -> dict[str, Any]:
    """A config.json; an override of None removes the key."""
    layers = tuple(layers)
    config = {
        "model_type": "glm4_moe",
        "num_hidden_layers": max(layers) + 1,
        "mlp_layer_types": ["sparse" if layer in layers else "dense" for layer in range(max(layers) + 1)],
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "moe_intermediate_size": intermediate,
        "n_routed_experts": experts,
        "num_experts_per_tok": top_k,
        **overrides,
    }
    return {key: value for key, value in config.items() if value is not None}


def common_tensors(prefix: str, hidden: int, experts: int) -> Tensors:
    """What is not a routed expert: a router and a shared expert."""
    return {
        f"{prefix}.gate.weight": ("BF16", (experts, hidden), np.zeros((experts, hidden), np.uint16)),
        f"{prefix}.shared_experts.gate_proj.weight": ("BF16", (32, hidden), np.ones((32, hidden), np.uint16)),
    }


def write_checkpoint(
    path: Path,
    *,
    layers: tuple[int, ...] = (1, 2),
    experts: int = 4,
    hidden: int = 64,
    intermediate: int = 32,
    naming: str = "hf",
    shards: int = 1,
    seed: int = 0,
    top_k: int = 2,
    scales: tuple[int, int] = (110, 130),
    config_overrides: dict[str, Any] | None = None,
) -> Made:
    """Write an MXFP4 checkpoint of random experts. layers are the numbers of its MoE layers."""
    rng = np.random.default_rng(seed)
    prefix, matrices = NAMINGS[naming]
    tensors: Tensors = {}
    made = {}
    for layer in layers:
        name = prefix.format(layer=layer)
        tensors.update(common_tensors(name, hidden, experts))
        for e in range(experts):
            made[layer, e] = expert = random_expert(rng, hidden, intermediate, scales)
            for matrix, part in zip(matrices, (expert.gate, expert.up, expert.down), strict=True):
                weight = f"{name}.experts.{e}.{matrix}"
                tensors[f"{weight}.scale"] = ("F8_E8M0", part.scales.shape, part.scales)
                tensors[f"{weight}.weight"] = ("I8", part.codes.shape, part.codes)
    write_shards(path, tensors, shards)
    sizes = {"experts": experts, "hidden": hidden, "intermediate": intermediate, "top_k": top_k}
    config = base_config(layers=layers, **sizes, **(config_overrides or {}))
    (path / "config.json").write_text(json.dumps(config))
    return Made(path, layers, made)
