"""Made experts, records and inputs for the kernel tests, and the oracle's view of a rank that holds some slices."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from moetier.contract import ExpertMatrices, Family, LayerGeometry, Matrix, RecordLayout, oracle
from moetier.kernels.cpu import CpuExperts

ALIGNMENT = 64


@dataclass
class Layer:
    """Experts of one layer, as matrices for the oracle and as records for a kernel."""

    geometry: LayerGeometry
    experts: list[ExpertMatrices]
    memory: NDArray[np.uint8] = field(init=False)
    addresses: NDArray[np.uint64] = field(init=False)

    def __post_init__(self) -> None:
        layout = RecordLayout.of(self.geometry)
        raw = np.zeros(len(self.experts) * layout.stride + ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        self.memory = raw[start : start + len(self.experts) * layout.stride].reshape(-1, layout.stride)
        for record, expert in zip(self.memory, self.experts, strict=True):
            layout.pack(expert, record)
        self.addresses = np.array([record.ctypes.data for record in self.memory], np.uint64)


def make_matrix(rng: np.random.Generator, n: int, k: int, scales: tuple[int, int]) -> Matrix:
    """Random codes; E8M0 bytes drawn from lo to hi, both included."""
    lo, hi = scales
    return Matrix(
        rng.integers(0, 256, (n, k // 2), dtype=np.uint8),
        rng.integers(lo, hi + 1, (n, k // 32), dtype=np.uint8),
    )


def make_layer(
    rng: np.random.Generator,
    geometry: LayerGeometry,
    scales: tuple[int, int] = (118, 124),
    down_scales: tuple[int, int] | None = None,
) -> Layer:
    hidden, inner = geometry.hidden, geometry.intermediate
    return Layer(
        geometry,
        [
            ExpertMatrices(
                make_matrix(rng, inner, hidden, scales),
                make_matrix(rng, inner, hidden, scales),
                make_matrix(rng, hidden, inner, down_scales or scales),
            )
            for _ in range(geometry.experts)
        ],
    )


def make_inputs(
    rng: np.random.Generator, geometry: LayerGeometry, tokens: int, scale: float = 1.0
) -> tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.float32]]:
    """Random x [T, hidden] with bf16 values, ids [T, top_k] without repeats in a row, weights [T, top_k]."""
    x = rng.standard_normal((tokens, geometry.hidden)).astype(np.float32) * np.float32(scale)
    x = oracle.from_bf16(oracle.to_bf16(x))
    ids = np.argsort(rng.random((tokens, geometry.experts)), axis=1)[:, : geometry.top_k].astype(np.int32)
    weights = rng.random((tokens, geometry.top_k)).astype(np.float32) + np.float32(0.05)
    return x, ids, weights


def expected(
    layer: Layer,
    x: NDArray[np.float32],
    ids: NDArray[np.int32],
    weights: NDArray[np.float32],
    family: Family,
    first_slice: int = 0,
    slice_count: int | None = None,
) -> NDArray[np.uint16]:
    """bf16 bits of the oracle, for the slices that a rank holds."""
    geometry = layer.geometry
    count = geometry.slices if slice_count is None else slice_count
    experts = dict(enumerate(layer.experts))
    if count != geometry.slices:
        experts = {index: part_of(expert, geometry, first_slice, count) for index, expert in experts.items()}
    return oracle.moe_layer(x, ids, weights, experts, geometry.experts, family, count)


def part_of(expert: ExpertMatrices, geometry: LayerGeometry, first: int, count: int) -> ExpertMatrices:
    """The narrower expert of slices first .. first + count - 1."""
    inner = geometry.slice_intermediate
    rows = slice(first * inner, (first + count) * inner)
    columns, blocks = slice(rows.start // 2, rows.stop // 2), slice(rows.start // 32, rows.stop // 32)
    down = Matrix(expert.down.codes[:, columns], expert.down.scales[:, blocks])
    gate, up = (Matrix(matrix.codes[rows], matrix.scales[rows]) for matrix in (expert.gate, expert.up))
    return ExpertMatrices(gate, up, down)


def run_forward(kernel: CpuExperts, layer: Layer, x: NDArray, ids: NDArray, weights: NDArray) -> NDArray[np.uint16]:
    out = np.full((x.shape[0], layer.geometry.hidden), 0xDEAD, np.uint16)
    kernel.forward(x, ids, weights, layer.addresses, out)
    return out


def run_split(
    kernel: CpuExperts, layer: Layer, x: NDArray, ids: NDArray, weights: NDArray, rng: np.random.Generator
) -> NDArray[np.uint16]:
    """gate_up in random order and pieces, down as soon as its turn has come."""
    listed, _ = kernel.begin(x, ids, weights)
    order = rng.permutation(listed.size).astype(np.int32)
    gated: set[int] = set()
    downed = 0
    while order.size:
        take = int(rng.integers(1, order.size + 1))
        piece, order = order[:take], order[take:]
        kernel.gate_up(piece, layer.addresses[listed[piece]])
        gated.update(piece.tolist())
        ready = next((i for i in range(downed, listed.size) if i not in gated), listed.size)
        kernel.down(downed, layer.addresses[listed[downed:ready]])
        downed = ready
    out = np.full((x.shape[0], layer.geometry.hidden), 0xDEAD, np.uint16)
    kernel.finish(out)
    return out


def assert_same_bits(found: NDArray[np.uint16], wanted: NDArray[np.uint16]) -> None:
    differ = np.argwhere(found != wanted)
    assert not differ.size, (
        f"{len(differ)} of {found.size} values differ, first at {differ[0]}: {found[tuple(differ[0])]:#06x} "
        f"instead of {wanted[tuple(differ[0])]:#06x}"
    )
