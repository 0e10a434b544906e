"""What the reader of checkpoints tells its reader to do, done: each message is provoked, its advice followed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moetier.checkpoint.json_files import QUANTIZATION
from moetier.engine.naming import layer_number
from moetier.errors import UnsupportedModelError
from moetier.store.build import build_store
from moetier.store.checkpoint import Checkpoint
from moetier.store.second import SecondReader
from tests.remedies.trouble import Trouble
from tests.store.mutants import INDEX, E, Mutant, made, safetensors, tensor
from tests.store.mutate_files import with_draft
from tests.store.mutate_weights import compressed

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
WEIGHT = "model.layers.1.mlp.experts.0.up_proj"
remedy = pytest.mark.remedy


def right(kind: str = "int4", index: bool = True) -> Mutant:
    mutant = made(np.random.default_rng(0), kind)
    mutant.spread(2, index)
    return mutant


def consolidated(mutant: Mutant) -> None:
    mutant.index = None
    mutant.more["model.safetensors"] = b""


def gap(mutant: Mutant) -> None:
    mutant.index = None
    del mutant.files[SECOND]


def lost_shard(mutant: Mutant) -> None:
    del mutant.files[SECOND]


def misplaced(mutant: Mutant) -> None:
    assert mutant.index is not None
    mutant.index["x"] = FIRST


def other_index(mutant: Mutant) -> None:
    other = {"weight_map": {f"{WEIGHT}.weight_packed": "other.safetensors"}}
    mutant.more["other.safetensors.index.json"] = json.dumps(other).encode()


def no_layer(mutant: Mutant) -> None:
    for name in mutant.experts(1):
        mutant.edit(name)


def config(**keys: Any) -> Callable[[Mutant], None]:
    return lambda mutant: mutant.config.update(keys)


def said(**keys: Any) -> Callable[[Mutant], None]:
    return config(quantization_config=keys)


def companion(part: str) -> Callable[[Mutant], None]:
    return lambda mutant: mutant.add(f"{WEIGHT}.{part}", tensor("F32", np.ones(1, "<f4")))


def broken_json(mutant: Mutant) -> None:
    mutant.more[INDEX] = b"{"


def beside_config(**keys: Any) -> Callable[[Mutant], None]:
    return lambda mutant: mutant.more.update({QUANTIZATION: json.dumps(keys).encode()})


def two_algorithms(mutant: Mutant) -> None:
    said(quant_method="modelopt", quant_algo="FP8")(mutant)
    beside_config(quantization={"quant_algo": "NVFP4"})(mutant)


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
CASES = [
    ("config.py", "expected a name for model_type", config(model_type=["qwen3_moe"])),
    ("config.py", "expected an object for", config(quantization_config="fp8")),
    ("config.py", "which mean the same", config(n_routed_experts=1000)),
    ("index.py", "expected one set of weights", consolidated),
    ("index.py", "and no index", gap),
    ("index.py", "is missing, {} names it", lost_shard),
    ("index.py", "which does not hold it", misplaced),
    ("index.py", "place tensors in different files", other_index),
    ("json_files.py", "expected JSON", broken_json),
    ("json_files.py", "expected an object for quantization", beside_config(quantization="NVFP4")),
    ("json_files.py", "as config.json says, found", two_algorithms),
    ("layers.py", "expected an integer for", config(first_k_dense_replace="1")),
    ("layers.py", "expected numbers of layers", config(mlp_only_layers="0")),
    ("layers.py", "expected routed experts in layer", no_layer),
    ("layers.py", "is dense by config.json", config(mlp_only_layers=[1])),
    ("layers.py", "layers, but there are experts", config(num_hidden_layers=1)),
    ("sources/companions.py", "take a release of the model without it", companion("pre_quant_scale")),
    ("sources/said.py", "experts by config.json ({})", said(quant_method="fp8")),
    ("sources/said.py", "whose input stays as it is", said(quant_method="quarot")),
    ("sources/said.py", "config.json says {} {}: {}", said(**compressed({**INT4, "symmetric": False}))),
    ("sources/said.py", "expected a scale for", said(**compressed({**INT4, "group_size": 64}))),
]


@pytest.mark.parametrize(
    "change", [pytest.param(change, id=part, marks=remedy(f"checkpoint/{path}", part)) for path, part, change in CASES]
)
def test_what_is_wrong_with_a_checkpoint_is_put_right(trouble: Trouble, tmp_path: Path, change: Any) -> None:
    """The advice is to have the files as they were released: downloaded again, or without what is not theirs."""
    mutant = right()
    change(mutant)
    mutant.write(tmp_path / "wrong")
    with trouble:
        Checkpoint.open(tmp_path / "wrong")
    right().write(tmp_path / "right")
    for path in (tmp_path / "right").iterdir():
        shutil.copy(path, tmp_path / "wrong")
    for path in (tmp_path / "wrong").iterdir():
        if not (tmp_path / "right" / path.name).exists():
            path.unlink()
    Checkpoint.open(tmp_path / "wrong")
    trouble.gone()


@remedy("checkpoint/sources/fp8.py", "expected one size of the blocks")
def test_two_sizes_of_blocks_are_downloaded_again(trouble: Trouble, tmp_path: Path) -> None:
    mutant = right("fp8 block")
    said_twice = [{"quant_method": "fp8", "weight_block_size": [rows, rows]} for rows in (128, 64)]
    mutant.config |= dict(zip(("quantization_config", "compression_config"), said_twice, strict=True))
    mutant.write(tmp_path / "c")
    with trouble:
        Checkpoint.open(tmp_path / "c")
    right("fp8 block").write(tmp_path / "d")
    Checkpoint.open(tmp_path / "d")
    trouble.gone()


@remedy("checkpoint/sources/int4.py", "the shape of what is packed")
def test_a_wrong_shape_is_downloaded_again(trouble: Trouble, tmp_path: Path) -> None:
    mutant = right()
    mutant.edit(f"{WEIGHT}.weight_shape", value=tensor("I64", np.array([1, 2], "<i8")))
    mutant.write(tmp_path / "c")
    with trouble:
        build_store(tmp_path / "c", tmp_path / "s")
    right().write(tmp_path / "d")
    build_store(tmp_path / "d", tmp_path / "t")
    trouble.gone()


@remedy("store/second.py", "on the second reading, found a NaN")
def test_a_nan_on_the_second_reading(trouble: Trouble, tmp_path: Path) -> None:
    mutant = right("fp32")
    name = f"{WEIGHT}.weight"
    mutant.edit(name, value=("F32", (32, 64), b"\0\0\xc0\x7f" * 2048))
    mutant.write(tmp_path / "c")
    with trouble:
        SecondReader(tmp_path / "c").expert("model.layers.1.mlp.experts", 0)
    right("fp32").write(tmp_path / "d")
    SecondReader(tmp_path / "d").expert("model.layers.1.mlp.experts", 0)
    trouble.gone()


@remedy("store/second.py", "ends before tensor")
def test_a_shard_that_was_cut_since(trouble: Trouble, tmp_path: Path) -> None:
    mutant = right()
    mutant.write(tmp_path / "c")
    reader = SecondReader(tmp_path / "c")
    for expert in range(E):
        reader.expert("model.layers.1.mlp.experts", expert)
    for file in (FIRST, SECOND):
        with (tmp_path / "c" / file).open("r+b") as shard:
            shard.truncate(8 + int.from_bytes(shard.read(8), "little"))
    with trouble:
        for expert in range(E):
            reader.expert("model.layers.1.mlp.experts", expert)
    for file in (FIRST, SECOND):
        (tmp_path / "c" / file).write_bytes(safetensors(mutant.files[file]))
    for expert in range(E):
        reader.expert("model.layers.1.mlp.experts", expert)
    trouble.gone()


@remedy("store/store.py", "which was left out when it was built")
def test_a_drafter_that_was_left_out(trouble: Trouble, tmp_path: Path) -> None:
    from moetier.store.store import Store

    with_draft(right("mxfp4"), experts=E + 1).write(tmp_path / "c")
    build_store(tmp_path / "c", tmp_path / "s")
    with Store.open(tmp_path / "s") as store:
        with trouble:
            store.layer_index(2)
        assert [store.layer_index(layer) for layer in (0, 1)] == [0, 1]  # what runs without speculation
    trouble.gone()


@remedy("engine/naming.py", "cannot tell which layer")
def test_a_module_of_an_unknown_name(trouble: Trouble) -> None:
    with trouble:
        layer_number("draft.layers.0.mlp.experts", 4)
    with pytest.raises(UnsupportedModelError, match="use vLLM without moetier"):
        layer_number("draft.layers.0.mlp.experts", 4)
    trouble.gone()
