"""`plan`, `doctor` and `store build` say the same of what config.json and the experts' tensors say of each other."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from moetier.cli import app
from moetier.errors import MoetierError
from moetier.plan.headers import folder_headers
from moetier.store.build import build_store
from tests.store import mutants

INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
BLOCK = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "block"}
Encode = Callable[[np.random.Generator, int, int], Any]


def made(
    folder: Path, kind: str, quantization: dict[str, Any] | None = None, encode: Encode | None = None, **more: Any
):
    mutant = mutants.made(np.random.default_rng(0), kind, encode=encode)
    mutant.config |= {"head_dim": 32, "vocab_size": 4, "max_position_embeddings": 128, **more}
    if quantization is not None:
        mutant.config["quantization_config"] = quantization
    mutant.write(folder)
    return mutant


def packed(**weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {**INT4, **weights}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "asymmetric": ("int4", packed(symmetric=False), "asymmetric"),
    "asymmetric as a number": ("int4", packed(symmetric=0), "asymmetric"),
    "asymmetric as text": ("int4", packed(symmetric="False"), "asymmetric"),
    "order of columns": ("int4", packed(actorder="group"), "another order"),
    "order in capitals": ("int4", packed(actorder="GROUP"), "another order"),
    "order as a switch": ("int4", packed(actorder=True), "another order"),
    "eight bits": ("int4", packed(num_bits=8), "8 bits"),
    "groups of 16": ("int4", packed(group_size=16), "1 x 16"),
    "Quark's rotation": ("bf16", {"quant_method": "quark", "algo_config": [{"name": "rotation"}]}, "input stays"),
    "an inner algorithm": ("fp8 row", {"quant_method": "modelopt", "quantization": {"quant_algo": "W4A8_AWQ"}}, "AWQ"),
}


@pytest.mark.parametrize(("kind", "quantization", "words"), REFUSED.values(), ids=REFUSED)
def test_what_config_says_of_the_experts_is_refused_through_every_door(kind, quantization, words, tmp_path):
    made(tmp_path / "model", kind, quantization)
    said = set()
    for door in (lambda p: build_store(p, tmp_path / "store"), lambda p: folder_headers(p).geometry(1.0)):
        with pytest.raises(MoetierError, match=words) as error:
            door(tmp_path / "model")
        said.add(str(error.value))
    result = CliRunner().invoke(app, ["doctor", str(tmp_path / "model")])
    assert isinstance(result.exception, MoetierError)
    said.add(str(result.exception))
    assert len(said) == 1
    assert "can be served" not in result.output


def blocks(*sizes: int, order: int = 1) -> dict[str, Any]:
    """Groups of FP8 blocks: the experts' of so many rows and columns, then another module's."""
    groups = [
        {"targets": [target], "weights": {**BLOCK, "block_structure": [size, size]}}
        for target, size in zip(("re:.*experts.*", "re:.*self_attn.*"), sizes, strict=True)
    ]
    named = {f"group_{at}": group for at, group in enumerate(groups[::order])}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": named}


@pytest.mark.parametrize("order", [1, -1], ids=["experts first", "experts last"])
def test_blocks_of_other_modules_are_not_those_of_the_experts(order, tmp_path):
    """Blocks of 32 and of 48 give scales of the same shape here, so only the values tell."""
    encode = mutants.fp8((32, 32), "weight_scale")
    mutant = made(tmp_path / "model", "fp8", blocks(32, 48, order=order), encode)
    build_store(tmp_path / "model", tmp_path / "store", check=mutants.E)
    assert mutants.same(mutants.stored_values(tmp_path / "store"), mutant)


TWICE: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "beside groups": lambda c: {
        **c, "quantization_config": {**blocks(32, 48), "weight_block_size": [48, 48]},
    },
    "in two keys": lambda c: {**c, "compression_config": {"quant_method": "fp8", "weight_block_size": [48, 48]}},
    "in two parts": lambda c: {
        **c, "text_config": {**c, "quantization_config": {"quant_method": "fp8", "weight_block_size": [48, 48]}},
    },
}  # fmt: skip


@pytest.mark.parametrize("case", TWICE)
def test_two_sizes_of_the_experts_blocks_are_refused(case, tmp_path):
    whole = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    made(tmp_path / "model", "fp8", whole, mutants.fp8((32, 32)))
    build_store(tmp_path / "model", tmp_path / "fits")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(TWICE[case](json.loads(path.read_text()))))
    with pytest.raises(
        MoetierError, match=r"expected one size of the blocks .* found (?=.*\[32, 32\])(?=.*\[48, 48\])"
    ):
        build_store(tmp_path / "model", tmp_path / "store")


@pytest.mark.parametrize("value", [["a"], {"a": 1}, 4, True], ids=["list", "object", "number", "true"])
def test_a_model_type_that_is_no_name_is_one_error(value, tmp_path):
    made(tmp_path / "model", "bf16", model_type=value)
    for door in (lambda p: build_store(p, tmp_path / "store"), lambda p: folder_headers(p).geometry(1.0)):
        with pytest.raises(MoetierError, match="expected a name for model_type"):
            door(tmp_path / "model")


def test_a_drafter_of_an_unknown_name_is_not_a_layer_of_the_model(tmp_path):
    mutant = mutants.made(np.random.default_rng(0), "bf16")
    mutant.config["num_nextn_predict_layers"] = 1
    more, _ = mutants.layer_tensors(mutant.rng, mutants.ENCODERS["bf16"], "eagle.layers.0.mlp.experts")
    for name, tensor in more.items():
        mutant.add(name, tensor)
    mutant.write(tmp_path / "model")
    assert folder_headers(tmp_path / "model").geometry(1.0).moe_layers == 2
    build_store(tmp_path / "model", tmp_path / "store")


@pytest.mark.parametrize("kind", ["fp8", "nvfp4"])
def test_a_product_beyond_float32_is_an_infinity(kind, tmp_path):
    part, of = (
        ("weight_scale", mutants.fp8("row", "weight_scale")) if kind == "fp8" else ("weight_scale_2", mutants.nvfp4)
    )

    def encode(rng, n, k):
        parts, values = of(rng, n, k)
        dtype, shape, raw = parts[part]
        parts[part] = dtype, shape, np.full(len(raw) // 4, 3e38, "<f4").tobytes()
        return parts, values

    made(tmp_path / "model", kind, encode=encode)
    with pytest.raises(MoetierError, match="expected finite weights, found"):
        build_store(tmp_path / "model", tmp_path / "store")
