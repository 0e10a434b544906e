"""The CUDA decode kernels, their threads emulated on the CPU, equal the oracle bit for bit: no GPU runs in CI."""

import shutil
from dataclasses import dataclass, field

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the device tier wants torch")

from moetier.contract import (  # noqa: E402
    Family,
    LayerGeometry,
    RecordLayout,
    oracle,
)
from moetier.kernels.cuda import nvrtc  # noqa: E402
from moetier.kernels.cuda.base import Call, Sizes  # noqa: E402
from moetier.kernels.cuda.decode import NOT_HYBRID, Activations, FewTokens, OneToken  # noqa: E402
from tests.gpu.emulated.emulation import MULTIPROCESSORS, SHARED_BYTES_A_BLOCK, Emulation  # noqa: E402

pytestmark = pytest.mark.skipif(not shutil.which("c++"), reason="compiles the kernels with the C++ compiler")

V4 = Family(swiglu_limit=0.5, route_weight_before_down=True)
CPU = torch.device("cpu")
SHAPES = {
    "8 segments": (LayerGeometry(256, 256, 8, 4), Family()),
    "8 segments in 4 slices": (LayerGeometry(512, 1024, 4, 2, 4), V4),
    "4 and 2 segments, stages of one block": (LayerGeometry(384, 320, 4, 2), V4),
    "1 segment, 1 expert a token": (LayerGeometry(96, 32, 4, 1), Family()),
    "2 slices of 1 segment": (LayerGeometry(64, 192, 4, 3, 2), V4),
}


@pytest.fixture(scope="module")
def emulation(tmp_path_factory: pytest.TempPathFactory) -> Emulation:
    return Emulation(tmp_path_factory.mktemp("emulated"))


@pytest.fixture(autouse=True)
def emulated(emulation: Emulation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "load", emulation.load)
    monkeypatch.setattr(nvrtc, "shared_memory_a_block", lambda device: SHARED_BYTES_A_BLOCK)
    monkeypatch.setattr(nvrtc, "multiprocessors", lambda device: MULTIPROCESSORS)
    monkeypatch.setattr(nvrtc, "architecture", lambda device: "sm_90a")


@dataclass
class Case:
    """A layer whose experts are all in slots, and tokens."""

    geometry: LayerGeometry
    family: Family
    tokens: int
    scales: tuple[int, int] = (112, 124)
    exponent: int = 0
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(7))

    def __post_init__(self) -> None:
        g, layout = self.geometry, RecordLayout.of(self.geometry)
        self.sizes = Sizes(g, self.family)
        self.slots = torch.randint(0, 256, (g.experts, layout.stride), dtype=torch.uint8)
        for index in range(layout.slices):
            for section in layout.sections:
                start = index * layout.slice_bytes + section.scales
                part = self.slots[:, start : start + section.scale_bytes]
                part.copy_(torch.from_numpy(self.rng.integers(*self.scales, tuple(part.shape), np.uint8)))
        self.table = torch.from_numpy(self.rng.permutation(g.experts).astype(np.int32))
        x = self.rng.standard_normal((self.tokens, g.hidden)).astype(np.float32) * np.float32(2.0) ** self.exponent
        self.x = torch.from_numpy(oracle.to_bf16(x).view(np.int16)).view(torch.bfloat16)
        ids = [self.rng.permutation(g.experts)[: g.top_k] for _ in range(self.tokens)]
        self.ids = torch.from_numpy(np.stack(ids).astype(np.int32))
        self.weights = torch.from_numpy(self.rng.random((self.tokens, g.top_k)).astype(np.float32) + np.float32(0.1))
        self.rows = torch.zeros(self.tokens, g.top_k, g.hidden)

    def call(self) -> Call:
        return Call(self.x, self.ids, self.weights, self.table, self.slots, self.rows)

    def expected(self) -> np.ndarray:
        g, layout = self.geometry, RecordLayout.of(self.geometry)
        used = {int(e) for e in self.ids.flatten() if 0 <= e < g.experts}
        matrices = {e: layout.unpack(self.slots[self.table[e]].numpy()) for e in used}
        x = self.x.float().numpy()
        with np.errstate(all="ignore"):
            return oracle.moe_layer(
                x, self.ids.numpy(), self.weights.numpy(), matrices, g.experts, self.family, g.slices
            )

    def one(self) -> OneToken:
        one = OneToken.fitting(self.sizes, CPU, 0)
        assert one
        return one

    def run(self, kernels: OneToken | FewTokens) -> np.ndarray:
        out = torch.full_like(self.x, 7.0)
        kernels.run(self.call(), out, Activations.of(self.sizes, self.tokens, CPU), NOT_HYBRID)
        return out.view(torch.int16).numpy().view(np.uint16)


def assert_equal(case: Case, kernels: OneToken | FewTokens) -> None:
    np.testing.assert_array_equal(case.run(kernels), case.expected().view(np.uint16))


@pytest.mark.parametrize("shape", SHAPES)
def test_one_token(shape: str) -> None:
    case = Case(*SHAPES[shape], tokens=1)
    kernels = case.one()
    assert_equal(case, kernels)
    case.ids[0, 0] = -1
    assert_equal(case, kernels)  # nothing is left of the call before


@pytest.mark.parametrize("shape", ["8 segments", "4 and 2 segments, stages of one block"])
def test_few_tokens(shape: str) -> None:
    case = Case(*SHAPES[shape], tokens=3)
    case.ids[1:, 0] = case.ids[0, 0]
    assert_equal(case, FewTokens(case.sizes, CPU, 0))


@pytest.mark.parametrize(
    ("scales", "exponent"),
    [((0, 255), 0), ((40, 255), 0), ((112, 124), -70), ((112, 124), 70)],
    ids=["any scale", "scales above 39", "small x", "large x"],
)
def test_operands_out_of_range_are_computed_by_the_letter(scales: tuple[int, int], exponent: int) -> None:
    case = Case(*SHAPES["4 and 2 segments, stages of one block"], tokens=1, scales=scales, exponent=exponent)
    assert_equal(case, case.one())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_makes_the_token_nan(value: float) -> None:
    case = Case(*SHAPES["8 segments"], tokens=1)
    case.x[0, 37] = value
    assert (case.expected().view(np.uint16) == 0x7FC0).all()
    assert_equal(case, case.one())


def test_a_missing_slot_makes_the_token_nan_and_its_row_stays() -> None:
    case = Case(*SHAPES["8 segments"], tokens=1)
    kernels = case.one()
    kernels.run(case.call(), None, Activations.of(case.sizes, 1, CPU), NOT_HYBRID)
    every = case.rows.clone()
    case.rows.fill_(7.0)
    case.table[case.ids[0, 1]] = -1
    kernels.run(case.call(), None, Activations.of(case.sizes, 1, CPU), NOT_HYBRID)
    every[0, 1] = 7.0
    assert torch.equal(case.rows, every)
    assert (case.run(kernels) == 0x7FC0).all()
