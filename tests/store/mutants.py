"""Tiny checkpoints whose every value is known, and a store's values, decoded by docs/design.md alone."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

H, J, E, K = 64, 32, 3, 2
"""Hidden size, intermediate size, experts, experts a token."""
GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
PROJ = ("gate_proj", "up_proj", "down_proj")
SHAPES = ((J, H), (J, H), (H, J))
INDEX = "model.safetensors.index.json"
Tensor = tuple[str, tuple[int, ...], bytes]


def tensor(dtype: str, array: np.ndarray) -> Tensor:
    return dtype, array.shape, np.ascontiguousarray(array).tobytes()


def bf16(x) -> tuple[Tensor, np.ndarray]:
    bits = (np.asarray(x, "<f4").view("<u4") >> 16).astype("<u2")
    return tensor("BF16", bits), (bits.astype("<u4") << 16).view("<f4").astype(float)


def e4m3_values() -> np.ndarray:
    values = []
    for byte in range(256):
        exponent, mantissa = byte >> 3 & 15, byte & 7
        value = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        values.append(np.nan if byte & 127 == 127 else -value if byte & 128 else value)
    return np.array(values)


E4M3 = e4m3_values()


def codes_of(raw: np.ndarray) -> np.ndarray:
    """Packed nibbles, low first, to codes."""
    return np.stack([raw & 15, raw >> 4], -1).reshape(*raw.shape[:-1], -1)


def e2m1(codes: np.ndarray) -> np.ndarray:
    return np.where(codes & 8, -1, 1) * GRID[codes & 7]


def plain(dtype):
    def encode(rng, n, k):
        w = (rng.standard_normal((n, k)) * 0.1).astype("<f4")
        if dtype == "BF16":
            stored, values = bf16(w)
        else:
            w = w.astype("<f2" if dtype == "F16" else "<f4")
            stored, values = tensor(dtype, w), w.astype(float)
        return {"weight": stored}, values

    return encode


def fp8(kind, suffix="weight_scale_inv", dtype="F32"):
    """kind: "tensor", "row", or (rows, columns)."""

    def encode(rng, n, k):
        raw = rng.integers(0, 256, (n, k)).astype(np.uint8)
        raw[raw & 127 == 127] = 1
        high, wide = {"tensor": (n, k), "row": (1, k)}.get(kind, kind) if isinstance(kind, str) else kind
        shape = (-(-n // high), -(-k // wide))
        if dtype == "F8_E8M0":
            byte = rng.integers(118, 128, shape).astype(np.uint8)
            scale, stored = np.ldexp(1.0, byte.astype(int) - 127), tensor(dtype, byte)
        elif dtype == "BF16":
            stored, scale = bf16(rng.random(shape) / 900 + 1e-4)
        else:
            f = (rng.random(shape) / 900 + 1e-4).astype("<f4")
            stored, scale = tensor("F32", f), f.astype(float)
        if kind == "tensor":
            stored = (stored[0], (), stored[2])
        values = E4M3[raw] * scale[np.arange(n) // high][:, np.arange(k) // wide]
        return {"weight": tensor("F8_E4M3", raw), suffix: stored}, values

    return encode


def mxfp4(weight="I8", scale="F8_E8M0"):
    def encode(rng, n, k):
        raw = rng.integers(0, 256, (n, k // 2)).astype(np.uint8)
        byte = rng.integers(110, 130, (n, k // 32)).astype(np.uint8)
        values = e2m1(codes_of(raw)) * np.repeat(np.ldexp(1.0, byte.astype(int) - 127), 32, 1)
        packed = tensor(weight, raw)
        return {
            "weight": (weight, (n, k), packed[2]) if weight == "F4" else packed,
            "scale": tensor(scale, byte),
        }, values

    return encode


def nvfp4(rng, n, k):
    raw = rng.integers(0, 256, (n, k // 2)).astype(np.uint8)
    scale = rng.integers(0x20, 0x78, (n, k // 16)).astype(np.uint8)
    second = np.array(rng.random() / 3000 + 1e-5, "<f4")
    values = e2m1(codes_of(raw)) * np.repeat(E4M3[scale] * float(second), 16, 1)
    return {
        "weight": tensor("U8", raw),
        "weight_scale": tensor("F8_E4M3", scale),
        "weight_scale_2": tensor("F32", second),
    }, values


def int4(group=32, dtype="BF16", shape=True):
    def encode(rng, n, k):
        q = rng.integers(-8, 8, (n, k))
        words = np.zeros((n, k // 8), "<u4")
        for place in range(8):
            words |= (q[:, place::8] + 8).astype("<u4") << np.uint32(4 * place)
        wide = group or k
        f = (rng.random((n, k // wide)) / 50 + 1e-3).astype("<f4")
        stored, scale = bf16(f) if dtype == "BF16" else (tensor("F32", f), f.astype(float))
        parts = {"weight_packed": tensor("I32", words.view("<i4")), "weight_scale": stored}
        if shape:
            parts["weight_shape"] = tensor("I64", np.array([n, k], "<i8"))
        return parts, q * np.repeat(scale, wide, 1)

    return encode


ENCODERS = {
    "bf16": plain("BF16"), "fp16": plain("F16"), "fp32": plain("F32"), "fp8 block": fp8((128, 128)),
    "fp8 row": fp8("row", "weight_scale"), "fp8 tensor": fp8("tensor", "weight_scale"), "mxfp4": mxfp4(),
    "nvfp4": nvfp4, "int4": int4(),
}  # fmt: skip


@dataclass
class Mutant:
    """A checkpoint before it is written: what its files hold, and the values that its store must have."""

    rng: np.random.Generator
    kind: str
    config: dict[str, Any]
    values: dict[int, list[list[np.ndarray]]] = field(default_factory=dict)
    files: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    index: dict[str, str] | None = None
    more: dict[str, bytes] = field(default_factory=dict)
    """Other files, or bytes that replace a written one."""
    after: list[Any] = field(default_factory=list)
    """Called with the folder once all is written."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: t for tensors in self.files.values() for name, t in tensors.items()}

    def file_of(self, name: str) -> str:
        return next(file for file, tensors in self.files.items() if name in tensors)

    def spread(self, count: int, index: bool = True) -> None:
        """All tensors over so many numbered files, in random order."""
        names = list(self.tensors)
        self.rng.shuffle(names)
        every, self.files = self.tensors, {}
        for number in range(count):
            part = names[number * len(names) // count : (number + 1) * len(names) // count]
            self.files[f"model-{number + 1:05d}-of-{count:05d}.safetensors"] = {name: every[name] for name in part}
        self.index = {name: file for file, tensors in self.files.items() for name in tensors} if index else None

    def single(self) -> None:
        self.files, self.index = {"model.safetensors": self.tensors}, None

    def experts(self, layer: int | None = None) -> list[str]:
        """Names of the experts' tensors; of the layer that has this number."""
        part = "" if layer is None else f"layers.{layer}."
        return [name for name in self.tensors if ".experts." in name and part in name]

    def pick(self, names: list[str]) -> str:
        return names[int(self.rng.integers(len(names)))]

    def edit(self, name: str, new: str | None = None, value: Tensor | None = None) -> None:
        """Rename, replace or (without both) remove a tensor, in its file and in the index."""
        file = self.file_of(name)
        old = self.files[file].pop(name)
        if self.index is not None:
            self.index.pop(name, None)
        if new is not None or value is not None:
            self.add(new or name, value or old, file)

    def add(self, name: str, value: Tensor, file: str | None = None) -> None:
        file = file or next(iter(self.files))
        self.files[file][name] = value
        if self.index is not None:
            self.index[name] = file

    def meaningless(self) -> Mutant:
        """No store is right for it: it must be refused."""
        self.values = {}
        return self

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        for file, tensors in self.files.items():
            (folder / file).write_bytes(safetensors(tensors))
        if self.index is not None:
            (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": self.index}))
        for name, raw in self.more.items():
            (folder / name).write_bytes(raw)
        for change in self.after:
            change(folder)


def safetensors(tensors: dict[str, Tensor]) -> bytes:
    header, offset = {}, 0
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + len(raw)]}
        offset += len(raw)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(raw for _, _, raw in tensors.values())


def layer_tensors(rng, encode, prefix, proj=PROJ, experts=E):
    """Tensors of a layer's experts, and their values."""
    tensors, values = {}, []
    for expert in range(experts):
        values.append([])
        for name, shape in zip(proj, SHAPES, strict=True):
            parts, value = encode(rng, *shape)
            tensors |= {f"{prefix}.{expert}.{name}.{part}": stored for part, stored in parts.items()}
            values[-1].append(value)
    return tensors, values


def made(
    rng: np.random.Generator, kind: str, *, template="model.layers.{}.mlp.experts", proj=PROJ, encode=None
) -> Mutant:
    """A right checkpoint of two MoE layers."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": H, "num_hidden_layers": 2,
        "num_experts": E, "num_experts_per_tok": K, "moe_intermediate_size": J, "intermediate_size": 2 * J,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "num_attention_heads": 2, "num_key_value_heads": 1,
    }  # fmt: skip
    mutant = Mutant(rng, kind, config)
    tensors: dict[str, Tensor] = {"lm_head.weight": bf16(np.ones((4, H)))[0]}
    for layer in range(2):
        parts, mutant.values[layer] = layer_tensors(rng, encode or ENCODERS[kind], template.format(layer), proj)
        tensors |= parts
        gate = template.format(layer).removesuffix("experts") + "gate.weight"
        tensors[gate] = bf16(np.ones((E, H)))[0]
    mutant.files = {"model.safetensors": tensors}
    if rng.random() < 0.6:
        mutant.spread(int(rng.integers(1, 4)))
    return mutant


def rounded(w: np.ndarray) -> np.ndarray:
    """Values by the OCP rule, ties to the even code; zeros are equal whatever their sign."""
    blocks = w.reshape(len(w), -1, 32)
    largest = np.abs(blocks).max(-1)
    exponent = np.where(largest == 0, -127, np.frexp(largest)[1] - 3)
    scale = np.ldexp(1.0, exponent)[..., None]
    x = np.minimum(np.abs(blocks) / scale, 6)
    low = np.clip(np.searchsorted(GRID, x, "right") - 1, 0, 6)
    down, up = x - GRID[low], GRID[low + 1] - x
    code = np.where((down < up) | ((down == up) & (low % 2 == 0)), low, low + 1)
    return (np.sign(blocks) * GRID[code] * scale).reshape(w.shape)


def stored_values(folder: Path) -> dict[int, list[list[np.ndarray]]]:
    """Every value of a store of one slice: codes of gate, up, down in tiles of 16 rows and 32 columns, then scales."""
    manifest, found = json.loads((folder / "store.json").read_text()), {}
    for layer in manifest["layers"]:
        records = np.fromfile(folder / layer["records"], np.uint8).reshape(-1, manifest["record_stride"])
        found[layer["number"]] = [_values(record) for record in records]
    return found


def _values(record: np.ndarray) -> list[np.ndarray]:
    matrices, at, scale_at = [], 0, sum(n * k // 2 for n, k in SHAPES)
    for n, k in SHAPES:
        tiles = (n // 16, k // 32, 16)
        raw = record[at : at + n * k // 2].reshape(*tiles, 16).transpose(0, 2, 1, 3).reshape(n, -1)
        scales = record[scale_at : scale_at + n * k // 32].reshape(tiles).transpose(0, 2, 1).reshape(n, -1)
        at, scale_at = at + n * k // 2, scale_at + n * k // 32
        matrices.append(e2m1(codes_of(raw)) * np.repeat(np.ldexp(1.0, scales.astype(int) - 127), 32, 1))
    return matrices


def same(found: dict[int, list[list[np.ndarray]]], mutant: Mutant) -> bool:
    """Whether a store has the values that the mutant should give, and those of no other layer."""
    if set(found) != set(mutant.values):
        return False
    for layer, experts in mutant.values.items():
        if len(found[layer]) != len(experts):
            return False
        for have, want in zip(found[layer], experts, strict=True):
            if not all(np.array_equal(a, rounded(b)) for a, b in zip(have, want, strict=True)):
                return False
    return True


def link(target: Path, path: Path) -> None:
    path.symlink_to(os.path.relpath(target, path.parent))
