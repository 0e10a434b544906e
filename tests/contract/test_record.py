"""The record: every byte has one place, stated here a second time with loops instead of array views."""

import numpy as np
import pytest

from moetier.contract import BLOCK, ExpertMatrices, LayerGeometry, Matrix, RecordLayout
from moetier.errors import UnsupportedModelError

SHAPES = [(32, 32), (64, 32), (32, 64), (96, 128), (256, 64), (160, 384)]


def random_expert(hidden, intermediate, seed=0):
    rng = np.random.default_rng(seed)

    def matrix(rows, k):
        return Matrix(rng.integers(0, 256, (rows, k // 2), np.uint8), rng.integers(0, 255, (rows, k // 32), np.uint8))

    return ExpertMatrices(matrix(intermediate, hidden), matrix(intermediate, hidden), matrix(hidden, intermediate))


def by_loops(expert, hidden, intermediate, slices):
    """The record of docs/design.md, written with the plainest loops."""
    inner = intermediate // slices
    record = bytearray()
    for s in range(slices):
        cut = []
        for matrix, axis in ((expert.gate, 0), (expert.up, 0), (expert.down, 1)):
            width = inner if axis == 0 else inner // 2
            codes = matrix.codes.take(range(s * width, (s + 1) * width), axis)
            width = inner if axis == 0 else inner // BLOCK
            cut.append((codes, matrix.scales.take(range(s * width, (s + 1) * width), axis)))
        for part, width in ((0, 16), (1, 1)):
            for pair in cut:
                rows = pair[part]
                for row_tile in range(rows.shape[0] // 16):
                    for block in range(rows.shape[1] // width):
                        for row in range(16):
                            record += rows[16 * row_tile + row, block * width : (block + 1) * width].tobytes()
        record += bytes(-len(record) % 64)
    record += bytes(-len(record) % 4096)
    return bytes(record)


CASES = [
    pytest.param(hidden, intermediate, slices, id=f"h{hidden}-i{intermediate}-s{slices}")
    for hidden, intermediate in SHAPES
    for slices in (1, 2, 4)
    if intermediate % (32 * slices) == 0
]


def same(a, b):
    return all(
        np.array_equal(getattr(getattr(a, m), p), getattr(getattr(b, m), p))
        for m in ("gate", "up", "down")
        for p in ("codes", "scales")
    )


@pytest.mark.parametrize(("hidden", "intermediate", "slices"), CASES)
def test_pack_writes_the_bytes_of_the_specification(hidden, intermediate, slices):
    expert = random_expert(hidden, intermediate)
    layout = RecordLayout(hidden, intermediate, slices)
    record = np.full(layout.stride, 0xAA, np.uint8)
    layout.pack(expert, record)
    assert record.tobytes() == by_loops(expert, hidden, intermediate, slices)


@pytest.mark.parametrize(("hidden", "intermediate", "slices"), CASES)
def test_unpack_is_the_inverse_of_pack(hidden, intermediate, slices):
    expert = random_expert(hidden, intermediate, seed=1)
    layout = RecordLayout(hidden, intermediate, slices)
    record = np.empty(layout.stride, np.uint8)
    layout.pack(expert, record)
    assert same(layout.unpack(record), expert)


@pytest.mark.parametrize(("hidden", "intermediate", "slices"), CASES)
def test_sizes_are_aligned_and_hold_the_payload(hidden, intermediate, slices):
    layout = RecordLayout(hidden, intermediate, slices)
    assert layout.payload_bytes * slices == 3 * hidden * intermediate * 17 // 32
    assert layout.slice_bytes % 64 == 0
    assert 0 <= layout.slice_bytes - layout.payload_bytes < 64
    assert layout.stride % 4096 == 0
    assert 0 <= layout.stride - slices * layout.slice_bytes < 4096


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": 48}, "hidden size 48 is no multiple of 32"),
        ({"intermediate": 40}, "intermediate size 40 cannot be cut"),
        ({"slices": 3}, "slices must be a power of two"),
        ({"slices": 4}, "cannot be cut into 4 slices"),
        ({"top_k": 9}, "top-k 9 is larger than the number of experts 8"),
        ({"experts": 0}, "experts must be at least 1"),
    ],
)
def test_geometry_that_cannot_be_is_refused(change, message):
    with pytest.raises(UnsupportedModelError, match=message):
        LayerGeometry(**{"hidden": 64, "intermediate": 64, "experts": 8, "top_k": 2, **change})
