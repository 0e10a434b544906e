"""The Triton kernels under the interpreter equal the oracle, bit for bit."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from moetier.contract import ExpertMatrices, Family, LayerGeometry, Matrix, RecordLayout, oracle
from moetier_reference.experts import DeviceExperts

V4 = Family(swiglu_limit=10.0, route_weight_before_down=True)
TIGHT = Family(swiglu_limit=0.5)


@dataclass
class Case:
    """A layer on the host: experts, their records in slots in random places, and inputs."""

    hidden: int
    inner: int
    experts: int = 4
    top_k: int = 2
    slices: int = 1
    family: Family = field(default_factory=Family)
    tokens: int = 3
    scales: tuple[int, int] = (110, 126)
    seed: int = 0

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        self.geometry = LayerGeometry(self.hidden, self.inner, self.experts, self.top_k, self.slices)
        layout = RecordLayout.of(self.geometry)

        def matrix(n: int, k: int) -> Matrix:
            codes = rng.integers(0, 256, (n, k // 2), np.uint8)
            return Matrix(codes, rng.integers(*self.scales, (n, k // 32)).astype(np.uint8))

        i, h = self.inner, self.hidden
        self.matrices = {e: ExpertMatrices(matrix(i, h), matrix(i, h), matrix(h, i)) for e in range(self.experts)}
        self.table = rng.permutation(self.experts).astype(np.int32)
        self.slots = np.zeros((self.experts, layout.stride), np.uint8)
        for e, slot in enumerate(self.table):
            layout.pack(self.matrices[e], self.slots[slot])
        self.x = oracle.from_bf16(oracle.to_bf16(rng.standard_normal((self.tokens, h)).astype(np.float32)))
        self.ids = np.stack([rng.permutation(self.experts)[: self.top_k] for _ in range(self.tokens)]).astype(np.int32)
        self.weights = rng.random((self.tokens, self.top_k)).astype(np.float32)

    def expected(self) -> np.ndarray:
        with np.errstate(all="ignore"):
            return oracle.moe_layer(
                self.x, self.ids, self.weights, self.matrices, self.experts, self.family, self.slices
            )

    def device(self) -> tuple[DeviceExperts, tuple[torch.Tensor, ...]]:
        experts = DeviceExperts(self.geometry, self.family, self.tokens, device="cpu", backend="triton")
        x = torch.from_numpy(oracle.to_bf16(self.x).view(np.int16)).view(torch.bfloat16)
        return experts, (x, *(torch.from_numpy(a) for a in (self.ids, self.weights, self.table, self.slots)))

    def found(self) -> np.ndarray:
        experts, tensors = self.device()
        return bits(experts.forward(*tensors, out=torch.full_like(tensors[0], 7.0)))


def bits(x: torch.Tensor) -> np.ndarray:
    return x.view(torch.int16).numpy().view(np.uint16)


def assert_same(found: np.ndarray, expected: np.ndarray) -> None:
    assert int((found != expected).sum()) == 0, f"{(found != expected).sum()} of {expected.size} values differ"


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(32, 32), id="one block"),
        pytest.param(Case(64, 32), id="2 and 1 segments"),
        pytest.param(Case(128, 64), id="4 and 2 segments"),
        pytest.param(Case(256, 96), id="8 and 1 segments of 3"),
        pytest.param(Case(576, 160, tokens=1), id="K of 18 blocks, one token"),
        pytest.param(Case(96, 64, experts=9, top_k=3, tokens=20), id="several pairs an expert"),
        pytest.param(Case(64, 64, family=V4), id="clamp, weight before down"),
        pytest.param(Case(64, 64, family=TIGHT), id="clamp at work, weight after down"),
        pytest.param(Case(64, 64, slices=2, family=V4), id="2 slices"),
        pytest.param(Case(64, 256, slices=4), id="4 slices"),
        pytest.param(Case(64, 64, scales=(0, 255), seed=3), id="every scale byte"),
        pytest.param(Case(64, 64, scales=(140, 160)), id="large scales"),
    ],
)
def test_layer(case: Case) -> None:
    assert_same(case.found(), case.expected())


@pytest.mark.parametrize("slices", [1, 2])
def test_nan_infinity_zero_and_extreme_rows(slices: int) -> None:
    case = Case(64, 64, tokens=7, slices=slices)
    case.x[0, 5] = np.nan
    case.x[1, 40] = np.inf
    case.x[2] = 0
    case.x[3] *= np.float32(2.0**110)
    case.x[4] *= np.float32(2.0**-104)  # partly flushed
    case.x[5, :32] *= np.float32(2.0**60)
    assert_same(case.found(), case.expected())


def test_ids_outside_and_repeated_and_one_expert_for_all() -> None:
    case = Case(64, 32, experts=5, top_k=3, tokens=18)
    case.ids[:, 0] = 2  # one expert takes all; experts may have none
    case.ids[1] = [-1, 5, 2**31 - 1]
    case.ids[2] = [4, 4, 4]
    assert_same(case.found(), case.expected())


def test_an_expert_without_a_slot_makes_its_tokens_nan() -> None:
    case = Case(64, 32, experts=4, top_k=2, tokens=4)
    case.ids[:] = [[0, 1], [2, 3], [1, 2], [3, 0]]
    expected = case.expected()
    case.table[3] = -1
    expected[[1, 3]] = 0x7FC0
    assert_same(case.found(), expected)


def test_rows_and_combine_are_the_layer_in_two_parts() -> None:
    """Rows of two halves of the experts, computed apart, combine to the same bits; other rows are left alone."""
    case = Case(64, 64, experts=6, top_k=3, tokens=5)
    experts, (x, ids, weights, table, slots) = case.device()
    rows = torch.full((5, 3, 64), 3.5)
    first, second = table.clone(), table.clone()
    first[3:], second[:3] = -1, -1
    experts.rows(x, ids, weights, first, slots, rows)
    assert (rows[ids >= 3] == 3.5).all()
    experts.rows(x, ids, weights, second, slots, rows)
    assert_same(bits(experts.combine(rows, ids, weights)), case.expected())


def test_calls_longer_than_the_buffers_are_cut() -> None:
    case = Case(64, 32, tokens=7)
    tensors = case.device()[1]
    experts = DeviceExperts(case.geometry, case.family, 3, device="cpu", backend="triton")
    assert_same(bits(experts.forward(*tensors)), case.expected())


def test_quantize_equals_the_oracle_over_every_exponent() -> None:
    """All of bf16's finite exponents, and mantissas around the step from 127/128."""
    rng = np.random.default_rng(1)
    x = rng.integers(0, 1 << 16, (512, 64), np.uint16)
    x[:, 32:] = (x[:, :1] & 0x7F80) | rng.integers(0x78, 0x80, (512, 32), np.uint16)  # one exponent, mantissas near 2
    x[(x & 0x7F80) == 0x7F80] = 0x7F00
    case = Case(64, 32, tokens=512)
    case.x = oracle.from_bf16(x)
    experts, (tensor, *_) = case.device()
    q, e = oracle.quantize(case.x)
    path = experts.path
    path._quantize(tensor, 512)  # type: ignore[attr-defined]
    assert np.array_equal(path.q.numpy(), q)  # type: ignore[attr-defined]
    assert np.array_equal(path.e.numpy(), e)  # type: ignore[attr-defined]


@pytest.mark.parametrize("limit", [None, 2.0])
def test_swiglu_equals_the_oracle_on_extremes(limit: float | None) -> None:
    """Through a whole layer: gates from huge to tiny, by activations scaled over 2^-60 to 2^60."""
    case = Case(64, 64, tokens=24, family=Family(swiglu_limit=limit), seed=5)
    case.x *= np.exp2(np.linspace(-60, 60, 24).round()).astype(np.float32)[:, None]
    assert_same(case.found(), case.expected())
