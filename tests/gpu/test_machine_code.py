"""The machine-code gate on a sample; `python benchmarks/gpu/gate.py` looks at every kernel for every target."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from moetier.contract import LayerGeometry

pytest.importorskip("torch", reason="the device tier wants torch")
pytest.importorskip("triton", reason="the gate wants triton and its disassembler")


@pytest.fixture(scope="module")
def gate() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "gpu" / "gate.py"
    spec = importlib.util.spec_from_file_location("moetier_gate", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def check(gate: ModuleType, kernels: list) -> None:
    assert kernels
    wrong = {f"{kernel.name} for {kernel.target}": gate.findings(kernel)[0] for kernel in kernels}
    assert not {name: texts for name, texts in wrong.items() if texts}


@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90a", "sm_100", "sm_120"])
def test_cuda_decode(gate: ModuleType, target: str) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="the CUDA kernels want cuda-bindings and NVRTC")
    check(gate, list(gate.cuda_kernels(target, ("one", "one hybrid", "decode"))))


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
def test_cuda_prefill(gate: ModuleType, target: str) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="the CUDA kernels want cuda-bindings and NVRTC")
    check(gate, list(gate.cuda_kernels(target, ("prefill",))))


def test_compiling_leaves_python_s_own_bytes_alone(gate: ModuleType) -> None:
    """An empty log is one byte, and the one-byte object of a space is the same in the whole process."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="the CUDA kernels want cuda-bindings and NVRTC")
    gate.nvrtc.compile_source("decode.cu", gate.cuda_decode.few_macros(gate.SIZES), "sm_90a")
    assert list(b" ") == [32]


def test_multiplications_overlap_with_stages_of_3_blocks_too(gate: ModuleType) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="the CUDA kernels want cuda-bindings and NVRTC")
    sizes = gate.Sizes(LayerGeometry(5120, 2304, 256, 6), gate.SIZES.family)
    macros = gate.cuda_path.prefill_macros(sizes, gate.cuda_path.WGMMA)
    opcodes, usage = gate.disassemble(gate.nvrtc.compile_source("prefill.cu", macros, "sm_90a")[0], "down_prefill")
    waits, products = (sum(op.startswith(kind) for op in opcodes) for kind in ("WARPGROUP.DEPBAR", "HGMMA"))
    assert 0 < waits < products
    assert usage["LOCAL"] == 0


@pytest.mark.parametrize(("target", "tile"), [("sm_80", 64), ("sm_90a", 64), ("sm_100", 16), ("sm_120", 64)])
def test_triton(gate: ModuleType, target: str, tile: int) -> None:
    check(gate, list(gate.triton_kernels(target, (tile,), small=target == "sm_90a")))


def test_the_gate_finds_a_fused_addition(gate: ModuleType) -> None:
    """With float fusion left on, Triton contracts multiply and add: the gate must say so."""
    kernel = next(k for k in gate.triton_kernels("sm_90a", (64,), small=False) if "gate_up" in k.name)
    spoiled = gate.Compiled(**{**vars(kernel), "ptx": kernel.ptx.replace("add.rn.f32", "fma.rn.f32", 1)})
    assert gate.findings(spoiled)[0]
