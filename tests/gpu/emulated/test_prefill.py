"""The CUDA prefill kernels, by wgmma and by mma, their threads emulated on the CPU, equal the oracle bit for bit."""

import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the device tier wants torch")

from moetier.contract import Family, LayerGeometry  # noqa: E402
from moetier.kernels.cuda import nvrtc  # noqa: E402
from moetier.kernels.cuda import path as cuda_path  # noqa: E402
from tests.gpu.emulated.test_decode import CPU, V4, Case, emulated, emulation  # noqa: E402, F401

pytestmark = pytest.mark.skipif(not shutil.which("c++"), reason="compiles the kernels with the C++ compiler")

SHAPES = {
    "4 and 1 segments, ragged panels": (LayerGeometry(384, 96, 3, 2), Family()),
    "2 slices, stages of 3 blocks": (LayerGeometry(192, 192, 2, 1, 2), V4),
}


@pytest.fixture(autouse=True)
def prefill_only(emulated: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """The decode kernels have tests of their own, and take long to compile."""
    monkeypatch.setattr(cuda_path.OneToken, "fitting", lambda *_: None)
    monkeypatch.setattr(cuda_path, "FewTokens", lambda *_: SimpleNamespace(max_pairs=0))


def run(case: Case) -> np.ndarray:
    path = cuda_path.CudaPath(case.sizes, case.tokens, CPU)
    out = torch.full_like(case.x, 7.0)
    path.forward(case.call(), out)
    return out.view(torch.int16).numpy().view(np.uint16)


@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
@pytest.mark.parametrize("shape", SHAPES)
def test_prefill(shape: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "architecture", lambda device: target)
    geometry, family = SHAPES[shape]
    for tokens, scales, exponent in ((150, (112, 124), 0), (5, (0, 255), 0), (3, (112, 124), 70)):
        case = Case(replace(geometry), family, tokens, scales, exponent)
        if tokens == 150:
            case.ids[:, 0] = 1  # more than a tile of one expert, and a token that meets it twice
            case.ids[7] = -1
            case.x[11, 37] = float("nan")
        np.testing.assert_array_equal(run(case), case.expected().view(np.uint16))
