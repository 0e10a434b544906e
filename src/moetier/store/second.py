"""A second reader of checkpoints, written apart from the first, that `--check` compares a store with.

It opens config.json, the index and the safetensors files by itself and decodes with plain NumPy in float64. It shares
no code with `sources/`, so a mistake there, or a tensor taken from the wrong file, shows as a difference.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moetier.contract import ExpertMatrices, Matrix
from moetier.errors import CheckpointError

Values = NDArray[np.float64]
Bytes = NDArray[np.uint8]

GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
MIDDLES = (GRID[1:] + GRID[:-1]) / 2
FLOATS = ("F32", "F16")
BYTES = {"BF16": "<u2", "F32": "<f4", "F16": "<f2"}
CHUNK = 1 << 16
"""Weights that are float64 at a time."""
INDEX = ".safetensors.index.json"


class SecondReader:
    """The experts of a checkpoint folder as MXFP4. Safe to call from several threads."""

    def __init__(
        self,
        folder: Path,
        files: Sequence[str] = (),
        hold: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
    ) -> None:
        """files: where there is no index, the shards by name. hold keeps a shard on the disk while it is read."""
        self.folder, self.hold = folder, hold
        self.config = json.loads((folder / "config.json").read_bytes())
        self.headers: dict[str, tuple[int, dict[str, Any]]] = {}
        indexes = sorted(path.name for path in folder.iterdir() if path.name.endswith(INDEX) and path.name[0] != ".")
        usual = "model" + INDEX
        if indexes:
            name = usual if usual in indexes else indexes[0]
            self.where: dict[str, str] = json.loads((folder / name).read_bytes())["weight_map"]
        else:
            self.where = {tensor: file for file in files for tensor in self._header(file)[1]}

    def expert(self, layer: str, number: int) -> ExpertMatrices:
        """gate, up and down of one expert; layer is the name before `.E.`."""
        for gate, up, down in (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")):
            if any(f"{layer}.{number}.{gate}.{part}" in self.where for part in ("weight", "weight_packed")):
                return ExpertMatrices(*(self._matrix(f"{layer}.{number}.{name}") for name in (gate, up, down)))
        if f"{layer}.gate_up_proj_blocks" in self.where:
            return self._blocks(layer, number)
        return self._fused(layer, number)

    def _matrix(self, name: str) -> Matrix:
        if f"{name}.weight_packed" in self.where:
            return self._int4(name)
        dtype, shape, raw = self._tensor(f"{name}.weight")
        rows, raw = shape[0], raw.reshape(shape[0], -1)
        if dtype == "F8_E4M3":
            return self._fp8(name, raw)
        if dtype in ("BF16", *FLOATS):
            return requantized(lambda part: floats(dtype, raw[part]), rows)
        if f"{name}.weight_scale_2" in self.where:
            return self._nvfp4(name, raw)
        return Matrix(raw, self._tensor(f"{name}.scale")[2].reshape(rows, -1))

    def _int4(self, name: str) -> Matrix:
        _, (rows, words), raw = self._tensor(f"{name}.weight_packed")
        dtype, shape, scale = self._tensor(f"{name}.weight_scale")
        word, scales = raw.view("<u4").reshape(rows, words), floats(dtype, scale).reshape(rows, -1, 1)

        def values(part: slice) -> Values:
            integers = np.stack([(word[part] >> np.uint32(4 * place)) & np.uint32(15) for place in range(8)], -1)
            groups = integers.reshape(len(integers), shape[1], -1).astype(np.float64) - 8
            product: Values = groups * scales[part]
            return product.reshape(len(integers), -1)

        return requantized(values, rows)

    def _fp8(self, name: str, raw: Bytes) -> Matrix:
        rows, columns = raw.shape
        kind = next(p for p in ("weight_scale_inv", "weight_scale", "scale") if f"{name}.{p}" in self.where)
        dtype, shape, scale = self._tensor(f"{name}.{kind}")
        scales = np.ldexp(1.0, scale.astype(int) - 127) if dtype == "F8_E8M0" else floats(dtype, scale)
        if scales.size == 1 or shape in ([rows], [rows, 1]):
            each = np.broadcast_to(scales.reshape(-1, 1), (rows, 1))
        else:
            high, wide = self._block(name)
            each = scales.reshape(shape)[np.arange(rows) // high][:, np.arange(columns) // wide]
        return requantized(lambda part: e4m3(raw[part]) * each[part], rows)

    def _block(self, name: str) -> tuple[int, int]:
        """Rows and columns of a block of this matrix's FP8 weights, by config.json."""
        for text in (self.config, self._text()):
            said = _object(text.get("quantization_config")) or _object(text.get("compression_config"))
            shapes = [said.get("weight_block_size")]
            groups = [_object(group) for group in _object(said.get("config_groups")).values()]
            own = [group for group in groups if any(_is_of(target, name) for target in _targets(group))]
            own = own or [group for group in groups if any(map(_is_class, _targets(group)))]
            shapes += [_object(group.get("weights")).get("block_structure") for group in own]
            for shape in shapes:
                if isinstance(shape, list):
                    high, wide = shape
                    return high, wide
        return 128, 128

    def _text(self) -> dict[str, Any]:
        """The part of config.json that describes the language model."""
        parts = (self.config.get(key) for key in ("text_config", "llm_config", "language_config"))
        return next((part for part in parts if isinstance(part, dict)), self.config)

    def _nvfp4(self, name: str, raw: Bytes) -> Matrix:
        rows = len(raw)
        scale = self._tensor(f"{name}.weight_scale")[2].reshape(rows, -1, 1)
        second = np.broadcast_to(floats("F32", self._tensor(f"{name}.weight_scale_2")[2]), rows).reshape(rows, 1, 1)

        def values(part: slice) -> Values:
            groups = e2m1(raw[part]).reshape(*scale[part].shape[:2], 16)
            product: Values = groups * (e4m3(scale[part]) * second[part])
            return product.reshape(len(groups), -1)

        return requantized(values, rows)

    def _blocks(self, layer: str, number: int) -> ExpertMatrices:
        """gpt-oss: rows of gate and up by turns."""
        both, down = (
            [self._tensor(f"{layer}.{name}_{part}", number) for part in ("blocks", "scales")]
            for name in ("gate_up_proj", "down_proj")
        )
        codes, scales = (raw.reshape(shape[0], -1) for _, shape, raw in both)
        gate, up = (Matrix(codes[turn::2].copy(), scales[turn::2].copy()) for turn in (0, 1))
        return ExpertMatrices(gate, up, Matrix(*(raw.reshape(shape[0], -1) for _, shape, raw in down)))

    def _fused(self, layer: str, number: int) -> ExpertMatrices:
        text = self._text()
        hidden = text.get("hidden_size") or text.get("dim")
        parts = []
        for name in ("gate_up_proj", "down_proj"):
            full = f"{layer}.{name}"
            dtype, shape, raw = self._tensor(full if full in self.where else f"{full}.weight", number)
            parts.append(raw.view(BYTES[dtype]).reshape(shape))
        both, down = parts
        if (both.shape[0], down.shape[1]) == (hidden, hidden) and both.shape[1] == 2 * down.shape[0]:
            both, down = both.T, down.T
        half = both.shape[0] // 2
        by_turns = str(text.get("model_type") or self.config.get("model_type")).startswith("gpt_oss")
        gate, up = (both[0::2], both[1::2]) if by_turns else (both[:half], both[half:])

        def matrix(stored: NDArray[Any]) -> Matrix:
            return requantized(lambda part: floats(dtype, np.ascontiguousarray(stored[part])), len(stored))

        return ExpertMatrices(matrix(gate), matrix(up), matrix(down))

    def _tensor(self, name: str, part: int | None = None) -> tuple[str, list[int], Bytes]:
        """dtype, shape and bytes of a tensor, or of tensor[part]."""
        file = self.where.get(name)
        if file is None:
            raise CheckpointError(f"{self.folder}: expected tensor {name} on the second reading, found none")
        with self.hold(file):
            data, header = self._header(file)
            entry = header[name]
            shape, (begin, end) = entry["shape"], entry["data_offsets"]
            if part is not None:
                size = (end - begin) // shape[0]
                begin, end, shape = begin + part * size, begin + (part + 1) * size, shape[1:]
            raw = np.fromfile(self.folder / file, np.uint8, end - begin, offset=data + begin)
        if raw.size != end - begin:
            raise CheckpointError(f"{self.folder / file} ends before tensor {name}; download it again")
        return entry["dtype"], shape, raw

    def _header(self, file: str) -> tuple[int, dict[str, Any]]:
        """Where the data begins, and the header."""
        if file not in self.headers:
            with self.hold(file), (self.folder / file).open("rb") as stream:
                length = int.from_bytes(stream.read(8), "little")
                header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            self.headers[file] = (8 + length, header)
        return self.headers[file]


def _targets(group: dict[str, Any]) -> list[str]:
    targets = group.get("targets")
    return [one for one in targets if isinstance(one, str)] if isinstance(targets, list) else []


def _is_class(target: str) -> bool:
    return target in ("Linear", "LinearBase") or "MoE" in target


def _is_of(target: str, name: str) -> bool:
    """Whether a target of compressed-tensors is a pattern or a part of a module's name."""
    return re.match(target[3:], name) is not None if target.startswith("re:") else target in name


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def floats(dtype: str, raw: NDArray[Any]) -> Values:
    """Values of BF16, FP16 or FP32 by their bytes."""
    stored = raw.view(BYTES[dtype])
    if dtype == "BF16":
        stored = (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return stored.astype(np.float64)


def e4m3(raw: Bytes) -> Values:
    """E4M3 by its fields: sign, 4 bits of exponent, 3 of mantissa; no infinities, and NaN where all of them are set."""
    exponent, mantissa = (raw >> 3 & 15).astype(int), (raw & 7).astype(np.float64)
    value = np.where(exponent == 0, mantissa / 8 * 2.0**-6, np.ldexp(1 + mantissa / 8, exponent - 7))
    return np.where(raw & 127 == 127, np.nan, np.where(raw & 128, -value, value))


def e2m1(raw: Bytes) -> Values:
    """Two E2M1 values a byte, low nibble first."""
    codes = np.stack([raw & 15, raw >> 4], -1).reshape(-1)
    values: Values = np.where(codes & 8, -1.0, 1.0) * GRID[codes & 7]
    return values


def requantized(values: Callable[[slice], Values], rows: int) -> Matrix:
    """A matrix as MXFP4 by docs/store.md: the OCP rule, ties to the even code, zeros of one sign by column parity."""
    step = max(1, CHUNK // max(1, values(slice(0, 1)).shape[1]))
    parts = [_round(values(slice(start, min(start + step, rows)))) for start in range(0, rows, step)]
    nibbles, scales, zero = (np.concatenate(of) for of in zip(*parts, strict=True))
    negative = nibbles >= 8
    if min((zero & negative).sum(), (zero & ~negative).sum()) < 0.05 * zero.sum():
        odd = np.arange(nibbles.shape[1], dtype=np.uint8) % 2
        nibbles = np.where(zero, odd << np.uint8(3), nibbles)
    return Matrix(nibbles[:, 0::2] | nibbles[:, 1::2] << 4, scales)


def _round(values: Values) -> tuple[Bytes, Bytes, NDArray[np.bool_]]:
    """Rows to codes, E8M0 scales, and which values are exactly zero."""
    rows, columns = values.shape
    blocks = np.abs(values).reshape(rows, -1, 32)
    largest = blocks.max(-1)
    if not np.isfinite(largest).all():
        raise CheckpointError("expected finite weights on the second reading, found a NaN or infinity; download again")
    exponent = np.full(largest.shape, -127)
    for power in range(-127, 128):  # the largest that holds, by comparing alone
        exponent[largest >= np.ldexp(1.0, power + 2)] = power
    scaled = np.minimum(blocks / np.ldexp(1.0, exponent)[..., None], 6).reshape(rows, columns)
    code = np.searchsorted(MIDDLES, scaled, "left")
    code += (np.append(MIDDLES, np.inf)[code] == scaled) & (code % 2 == 1)
    nibbles = code.astype(np.uint8) | (np.signbit(values).astype(np.uint8) << 3)
    return nibbles, (exponent + 127).astype(np.uint8), values == 0
