"""Every number format and layout that a store is built from: made checkpoints of two layers, every value compared."""

import json
import math
import re

import numpy as np
import pytest

from moetier.checkpoint.layers import LeftOut
from moetier.contract import E2M1_VALUES, ExpertMatrices, Matrix, unpack_codes
from moetier.contract.requantize import requantize
from moetier.errors import CheckpointError, UnsupportedModelError
from moetier.store.build import build_store
from moetier.store.check import first_difference
from moetier.store.checkpoint import Checkpoint, is_expert_tensor
from moetier.store.store import Store
from tests.store.checkpoints import base_config, common_tensors, random_expert, write_shards

LAYERS, EXPERTS = (1, 2), 3
SIZES = [
    pytest.param(64, 32, id="h64-i32"),
    pytest.param(96, 160, id="h96-i160"),
    pytest.param(160, 288, id="h160-i288"),
]
MATRICES = ("gate_proj", "up_proj", "down_proj")


def e4m3(byte):
    """Value of an E4M3 byte by its fields."""
    sign, exponent, mantissa = byte >> 7, (byte >> 3) & 15, byte & 7
    if byte & 0x7F == 0x7F:
        return math.nan
    return (-1) ** sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


E4M3 = np.array([e4m3(byte) for byte in range(256)])


def shapes(hidden, intermediate):
    return ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))


def converted(values):
    """Three float64 matrices -> what the store must hold."""
    return ExpertMatrices(*(requantize(lambda a, b, w=w: w[a:b], *w.shape)[0] for w in values))


def bf16_bits(x):
    return (np.asarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def bf16_values(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def floats(dtype):
    """Per-expert BF16, F16 or F32."""

    def make(rng, name, rows, k):
        w = rng.standard_normal((rows, k)).astype(np.float32) * 0.05
        data = {"BF16": bf16_bits(w), "F16": w.astype(np.float16), "F32": w}[dtype]
        values = bf16_values(data) if dtype == "BF16" else data.astype(np.float64)
        return {f"{name}.weight": (dtype, (rows, k), data)}, values

    return make


def fp8(block, suffix="weight_scale_inv", dtype="F32"):
    """E4M3 with a scale per block (rows, columns); 0 stands for all of them."""

    def make(rng, name, rows, k):
        codes = rng.integers(0, 256, (rows, k)).astype(np.uint8)
        codes[codes & 0x7F == 0x7F] = 0x3C
        block_rows, block_columns = block[0] or rows, block[1] or k
        scale_shape = (math.ceil(rows / block_rows), math.ceil(k / block_columns))
        if dtype == "F8_E8M0":
            data = rng.integers(110, 130, scale_shape).astype(np.uint8)
            scales = 2.0 ** (data.astype(np.float64) - 127)
        else:
            data = (rng.random(scale_shape) + 0.5).astype(np.float32) / 1000
            scales = data.astype(np.float64)
        values = np.empty((rows, k))
        for r in range(rows):
            for c in range(k):
                values[r, c] = E4M3[codes[r, c]] * scales[r // block_rows, c // block_columns]
        shape = () if block == (0, 0) else scale_shape
        return {
            f"{name}.weight": ("F8_E4M3", (rows, k), codes),
            f"{name}.{suffix}": (dtype, shape, data),
        }, values

    return make


def nvfp4(second_shape):
    """NVFP4 of modelopt; second_shape is that of weight_scale_2, -1 standing for the rows."""

    def make(rng, name, rows, k):
        codes = rng.integers(0, 256, (rows, k // 2)).astype(np.uint8)
        scales = rng.integers(0x20, 0x78, (rows, k // 16)).astype(np.uint8)
        shape = tuple(rows if size == -1 else size for size in second_shape)
        second = (rng.random(shape) / 3000 + 1e-5).astype(np.float32)
        per_row = np.broadcast_to(second.reshape(-1, 1), (rows, 1)).astype(np.float64)
        values = E2M1_VALUES.astype(np.float64)[unpack_codes(codes)] * np.repeat(E4M3[scales], 16, axis=1) * per_row
        return {
            f"{name}.weight": ("U8", codes.shape, codes),
            f"{name}.weight_scale": ("F8_E4M3", scales.shape, scales),
            f"{name}.weight_scale_2": ("F32", shape, second),
            f"{name}.input_scale": ("F32", (), np.float32(1)),
        }, values

    return make


def int4(group, dtype="BF16"):
    """Packed INT4 of compressed-tensors; group columns share a scale."""

    def make(rng, name, rows, k):
        integers = rng.integers(-8, 8, (rows, k))
        words = np.zeros((rows, k // 8), np.uint32)
        for place in range(8):
            words |= (integers[:, place::8] + 8).astype(np.uint32) << np.uint32(4 * place)
        scales = (rng.random((rows, k // (group or k))) / 100).astype(np.float32)
        data = bf16_bits(scales) if dtype == "BF16" else scales
        exact = bf16_values(data) if dtype == "BF16" else scales.astype(np.float64)
        values = integers * np.repeat(exact, group or k, axis=1)
        return {
            f"{name}.weight_packed": ("I32", words.shape, words),
            f"{name}.weight_scale": (dtype, scales.shape, data),
            f"{name}.weight_shape": ("I64", (2,), np.array([rows, k], np.int64)),
        }, values

    return make


PER_EXPERT = {
    "bf16": (floats("BF16"), "bf16", {}),
    "fp16": (floats("F16"), "fp16", {}),
    "fp32": (floats("F32"), "fp32", {}),
    "fp8 128x128 f32": (fp8((128, 128)), "fp8", {}),
    "fp8 32x32 ue8m0": (fp8((32, 32), "scale", "F8_E8M0"), "fp8", {"weight_block_size": [32, 32]}),
    "fp8 64x16 f32": (fp8((64, 16)), "fp8", {"weight_block_size": [64, 16]}),
    "fp8 1x128 f32": (fp8((1, 128)), "fp8", {"weight_block_size": [1, 128]}),
    "fp8 per row": (fp8((1, 0), "weight_scale"), "fp8", {}),
    "fp8 per matrix": (fp8((0, 0), "weight_scale"), "fp8", {}),
    "nvfp4": (nvfp4(()), "nvfp4", {}),
    "nvfp4, scale_2 of one element": (nvfp4((1,)), "nvfp4", {}),
    "nvfp4, scale_2 per row": (nvfp4((-1,)), "nvfp4", {}),
    "int4, groups of 32": (int4(32), "int4", {}),
    "int4, groups of 16 in fp32": (int4(16, "F32"), "int4", {}),
    "int4, a scale per row": (int4(0), "int4", {}),
}


def write(path, tensors, hidden, intermediate, **overrides):
    write_shards(path, tensors, shards=2)
    config = base_config(layers=LAYERS, experts=EXPERTS, hidden=hidden, intermediate=intermediate, top_k=2, **overrides)
    (path / "config.json").write_text(json.dumps(config))


def per_expert(path, kind, hidden, intermediate, seed=0):
    """Write a checkpoint of one kind; what the store must hold, by (layer number, expert)."""
    make, _, quantization = PER_EXPERT[kind]
    rng, tensors, wanted = np.random.default_rng(seed), {}, {}
    for layer in LAYERS:
        prefix = f"model.layers.{layer}.mlp"
        tensors.update(common_tensors(prefix, hidden, EXPERTS))
        for expert in range(EXPERTS):
            values = []
            for matrix, (rows, k) in zip(MATRICES, shapes(hidden, intermediate), strict=True):
                part, value = make(rng, f"{prefix}.experts.{expert}.{matrix}", rows, k)
                tensors.update(part)
                values.append(value)
            wanted[layer, expert] = converted(values)
    write(path, tensors, hidden, intermediate, quantization_config=quantization or None)
    return wanted


def compare(path, wanted, format_name, requantized, served=True):
    """Every value as the checkpoint's reader gives it, and as it lies in a store that was built from it."""
    checkpoint = Checkpoint.open(path)
    assert (checkpoint.source_format, checkpoint.requantized) == (format_name, requantized)
    report = build_store(path, path.parent / "store", check=EXPERTS, served=served)
    assert set(report.losses) == (set(LAYERS) if requantized else set())
    with Store.open(path.parent / "store", checkpoint.identity()) as store:
        assert store.manifest.checkpoint.requantized is requantized
        assert {layer.source for layer in store.manifest.layers} == {format_name}
        record = np.empty(store.manifest.record_stride, np.uint8)
        for (number, expert), matrices in wanted.items():
            layer = LAYERS.index(number)
            assert first_difference(checkpoint.read_expert(layer, expert), matrices) is None
            store.read_record(layer, expert, record)
            assert first_difference(store.layout.unpack(record), matrices) is None
    return report


@pytest.mark.parametrize("kind", PER_EXPERT)
@pytest.mark.parametrize(("hidden", "intermediate"), SIZES)
def test_per_expert_formats(tmp_path, kind, hidden, intermediate):
    wanted = per_expert(tmp_path / "c", kind, hidden, intermediate)
    report = compare(tmp_path / "c", wanted, PER_EXPERT[kind][1], True)
    for loss in report.losses.values():
        assert 0.01 < loss["relative_rms"] < 0.3
        assert abs(loss["sign_bias"]) < 0.05
        assert 0 <= loss["saturated_share"] < 0.2


FUSED = {
    "out-in bf16": ("BF16", False, False),
    "in-out bf16": ("BF16", True, False),
    "in-out fp16": ("F16", True, False),
    "out-in fp32, names with .weight": ("F32", False, False),
    "in-out bf16 by turns": ("BF16", True, True),
}
FUSED_SIZES = [*SIZES, pytest.param(64, 64, id="h64-i64"), pytest.param(128, 64, id="h128-i64")]


@pytest.mark.parametrize("kind", FUSED)
@pytest.mark.parametrize(("hidden", "intermediate"), FUSED_SIZES)
def test_fused_layouts(tmp_path, kind, hidden, intermediate):
    dtype, transposed, by_turns = FUSED[kind]
    rng, tensors, wanted = np.random.default_rng(1), {}, {}
    ending = ".weight" if "names" in kind else ""
    for layer in LAYERS:
        parts = []
        for expert in range(EXPERTS):
            values = [rng.standard_normal(s).astype(np.float32) for s in shapes(hidden, intermediate)]
            data = [
                {"BF16": bf16_bits, "F16": lambda w: w.astype(np.float16), "F32": lambda w: w}[dtype](w) for w in values
            ]
            parts.append(data)
            exact = [bf16_values(w) if dtype == "BF16" else w.astype(np.float64) for w in data]
            wanted[layer, expert] = converted(exact)
        both = np.stack(
            [np.stack([g, u], 1).reshape(-1, hidden) if by_turns else np.concatenate([g, u]) for g, u, _ in parts]
        )
        down = np.stack([d for _, _, d in parts])
        for name, tensor in (("gate_up_proj", both), ("down_proj", down)):
            data = np.ascontiguousarray(tensor.transpose(0, 2, 1) if transposed else tensor)
            tensors[f"model.layers.{layer}.mlp.experts.{name}{ending}"] = (dtype, data.shape, data)
    overrides = {"model_type": "gpt_oss"} if by_turns else {}
    write(tmp_path / "c", tensors, hidden, intermediate, **overrides)
    format_name = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}[dtype]
    compare(tmp_path / "c", wanted, format_name, True, served=not by_turns)
    assert all(is_expert_tensor(name) for name in tensors)


def test_gpt_oss_blocks_are_taken_value_for_value(tmp_path):
    rng, tensors, wanted = np.random.default_rng(2), {}, {}
    hidden, intermediate = 96, 160
    for layer in LAYERS:
        experts = [random_expert(rng, hidden, intermediate) for _ in range(EXPERTS)]
        wanted.update({(layer, e): expert for e, expert in enumerate(experts)})
        prefix = f"model.layers.{layer}.mlp.experts"
        for part, width in (("codes", 16), ("scales", 1)):
            both = np.empty((EXPERTS, 2 * intermediate, hidden // 32, width), np.uint8)
            for e, expert in enumerate(experts):
                for row in range(intermediate):
                    both[e, 2 * row] = getattr(expert.gate, part)[row].reshape(-1, width)
                    both[e, 2 * row + 1] = getattr(expert.up, part)[row].reshape(-1, width)
            down = np.stack([getattr(x.down, part).reshape(hidden, -1, width) for x in experts])
            name = "blocks" if part == "codes" else "scales"
            for matrix, data in (("gate_up_proj", both), ("down_proj", down)):
                data = data if part == "codes" else data[..., 0]
                tensors[f"{prefix}.{matrix}_{name}"] = ("U8", data.shape, data)
        tensors[f"{prefix}.gate_up_proj_bias"] = ("BF16", (EXPERTS, 320), np.zeros((EXPERTS, 320), np.uint16))
    write(tmp_path / "c", tensors, hidden, intermediate, model_type="gpt_oss", intermediate_size=intermediate)
    compare(tmp_path / "c", wanted, "mxfp4", False, served=False)


def test_layers_may_differ_in_format(tmp_path):
    """Exports often leave the draft layer unquantized."""
    wanted = per_expert(tmp_path / "a", "nvfp4", 64, 32)
    other = per_expert(tmp_path / "b", "bf16", 64, 32)
    first, second = (Checkpoint.open(tmp_path / name) for name in "ab")
    tensors = {}
    for checkpoint, layer in ((first, 1), (second, 2)):
        for name, t in checkpoint.tensors.items():
            if f"layers.{layer}." in name:
                tensors[name] = (t.dtype, t.shape, checkpoint.shards.read(t))
    write(tmp_path / "c", tensors, 64, 32)
    checkpoint = Checkpoint.open(tmp_path / "c")
    assert checkpoint.source_format == "bf16+nvfp4"
    for expert in range(EXPERTS):
        assert first_difference(checkpoint.read_expert(0, expert), wanted[1, expert]) is None
        assert first_difference(checkpoint.read_expert(1, expert), other[2, expert]) is None


def test_nanos_bf16_export_becomes_the_values_of_its_mxfp4(nano, shared_models):
    packed, exported = Checkpoint.open(nano), Checkpoint.open(shared_models / "nano-bf16")
    for layer, expert in ((0, 0), (3, 31), (4, 7)):
        converted_expert = exported.convert(layer, expert)
        assert converted_expert.loss.square_error == 0
        for name in ("gate", "up", "down"):
            a, b = (getattr(x, name) for x in (converted_expert.expert, packed.read_expert(layer, expert)))
            assert np.array_equal(values_of(a), values_of(b))


def values_of(matrix: Matrix):
    codes = E2M1_VALUES.astype(np.float64)[unpack_codes(matrix.codes)]
    return codes * np.repeat(np.ldexp(1.0, matrix.scales.astype(np.int32) - 127), 32, axis=1)


def poke(path, name, byte, value):
    """Set one byte of a tensor."""
    tensor = Checkpoint.open(path).tensors[name]
    raw = bytearray(tensor.file.read_bytes())
    raw[tensor.offset + byte] = value
    tensor.file.write_bytes(raw)


@pytest.mark.parametrize(
    ("kind", "part", "value"),
    [
        ("fp8 128x128 f32", "weight", 0x7F),
        ("fp8 32x32 ue8m0", "scale", 255),
        ("nvfp4", "weight_scale", 0xFF),
    ],
)
def test_a_nan_is_refused_with_its_expert(tmp_path, kind, part, value):
    per_expert(tmp_path / "c", kind, 64, 32)
    poke(tmp_path / "c", f"model.layers.2.mlp.experts.1.up_proj.{part}", 0, value)
    checkpoint = Checkpoint.open(tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"(expert 1, up: .*NaN)|(experts.1.up_proj.scale.*255 \(NaN\))"):
        checkpoint.read_expert(1, 1)
    checkpoint.read_expert(1, 0)


REFUSED = {
    "scale of another shape": ("fp8 64x16 f32", [32, 32], "expected shape"),
    "block of zero": ("fp8 64x16 f32", [0, 16], "two positive integers for weight_block_size"),
    "negative block": ("fp8 64x16 f32", [-64, 16], "two positive integers for weight_block_size"),
    "block of one number": ("fp8 64x16 f32", [64], "two positive integers for weight_block_size"),
}


@pytest.mark.parametrize(("kind", "block", "message"), REFUSED.values(), ids=REFUSED)
def test_wrong_fp8_blocks_are_refused(tmp_path, kind, block, message):
    per_expert(tmp_path / "c", kind, 96, 160)
    config = json.loads((tmp_path / "c" / "config.json").read_text())
    config["quantization_config"] = {"weight_block_size": block}
    (tmp_path / "c" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(tmp_path / "c")


def test_a_format_that_is_not_known_is_refused_with_what_was_found(tmp_path):
    tensors = {}
    for layer in LAYERS:
        for expert in range(EXPERTS):
            for matrix, shape in zip(MATRICES, shapes(64, 32), strict=True):
                name = f"model.layers.{layer}.mlp.experts.{expert}.{matrix}.weight"
                tensors[name] = ("I16", shape, np.zeros(shape, np.int16))
    write(tmp_path / "c", tensors, 64, 32)
    with pytest.raises(CheckpointError, match=re.escape("experts.0.down_proj.weight I16 [64, 32]")):
        Checkpoint.open(tmp_path / "c")


def test_int4_is_packed_as_compressed_tensors_does():
    torch = pytest.importorskip("torch")
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    parts, _ = int4(32)(np.random.default_rng(0), "x", 32, 64)
    words = parts["x.weight_packed"][2]
    integers = (unpack_codes(words.view(np.uint8)).astype(np.int8) - 8).astype(np.int8)
    assert np.array_equal(helpers.pack_to_int32(torch.from_numpy(integers), 4).numpy(), words.view(np.int32))


def test_int4_with_zero_points_is_refused(tmp_path):
    per_expert(tmp_path / "a", "int4, groups of 32", 64, 32)
    checkpoint = Checkpoint.open(tmp_path / "a")
    tensors = {name: (t.dtype, t.shape, checkpoint.shards.read(t)) for name, t in checkpoint.tensors.items()}
    tensors["model.layers.2.mlp.experts.1.up_proj.weight_zero_point"] = ("I32", (1,), np.zeros(1, np.int32))
    write(tmp_path / "c", tensors, 64, 32)
    with pytest.raises(
        UnsupportedModelError, match=r"experts.1.up_proj.weight_zero_point .*zero points; take a release"
    ):
        Checkpoint.open(tmp_path / "c")


NAMES = {
    "deepseek v3": ("model.layers.{}.mlp.experts", MATRICES),
    "deepseek v4": ("layers.{}.ffn.experts", ("w1", "w3", "w2")),
    "mixtral": ("model.layers.{}.block_sparse_moe.experts", ("w1", "w3", "w2")),
    "qwen vl": ("model.language_model.layers.{}.mlp.experts", MATRICES),
    "kimi k2.5": ("language_model.model.layers.{}.mlp.experts", MATRICES),
}


@pytest.mark.parametrize(("prefix", "matrices"), NAMES.values(), ids=NAMES)
def test_names_of_model_families(tmp_path, prefix, matrices):
    rng, tensors, wanted = np.random.default_rng(3), {}, {}
    for layer in LAYERS:
        for expert in range(EXPERTS):
            wanted[layer, expert] = random_expert(rng, 64, 32)
            for name, part in zip(matrices, ("gate", "up", "down"), strict=True):
                matrix = getattr(wanted[layer, expert], part)
                base = f"{prefix.format(layer)}.{expert}.{name}"
                tensors[f"{base}.weight"] = ("I8", matrix.codes.shape, matrix.codes)
                tensors[f"{base}.scale"] = ("F8_E8M0", matrix.scales.shape, matrix.scales)
    write(tmp_path / "c", tensors, 64, 32)
    compare(tmp_path / "c", wanted, "mxfp4", False)


def test_draft_layers_count_on_from_the_last_hidden_layer(tmp_path):
    rng, tensors = np.random.default_rng(4), {}
    for prefix in ("layers.0.ffn.experts", "layers.1.ffn.experts", "mtp.0.ffn.experts"):
        for expert in range(EXPERTS):
            made = random_expert(rng, 64, 32)
            for name, matrix in (("w1", made.gate), ("w3", made.up), ("w2", made.down)):
                tensors[f"{prefix}.{expert}.{name}.weight"] = ("I8", matrix.codes.shape, matrix.codes)
                tensors[f"{prefix}.{expert}.{name}.scale"] = ("F8_E8M0", matrix.scales.shape, matrix.scales)
    write(tmp_path / "c", tensors, 64, 32, num_hidden_layers=2, mlp_layer_types=None)
    found = [(layer.number, layer.name) for layer in Checkpoint.open(tmp_path / "c").moe_layers]
    assert found == [(0, "layers.0.ffn.experts"), (1, "layers.1.ffn.experts"), (2, "mtp.0.ffn.experts")]
    smaller = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.0.ffn.experts.2.")}
    write(tmp_path / "d", smaller, 64, 32, num_hidden_layers=2, mlp_layer_types=None)
    checkpoint = Checkpoint.open(tmp_path / "d")
    assert [layer.number for layer in checkpoint.moe_layers] == [0, 1]
    assert checkpoint.left_out == (LeftOut(2, "mtp.0.ffn.experts", "it has 2 experts and the model 3"),)
