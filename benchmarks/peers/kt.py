"""kt-kernel's own layer (KTransformers), through the wheel's extension alone: its Python part wants more."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.base import PeerAbsentError, Step
from moetier.contract import LayerGeometry

VERSION = "0.7.2"
VARIANTS = (
    ("amx", {"amx_tile", "amx_int8", "amx_bf16"}),
    ("avx512_bf16", {"avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512vbmi"}),
    ("avx2", {"avx2", "fma"}),
)
"""Extensions of the wheel, best first, and the processor flags that each needs."""


def extension(cache: Path) -> ModuleType:
    """Load the best variant for this processor, downloading the wheel once."""
    folder = cache / f"kt-{VERSION}"
    if not (folder / "kt_kernel").exists():
        _download(folder)
    flags = set(Path("/proc/cpuinfo").read_text().split("flags", 1)[1].split("\n", 1)[0].split())
    variant = next((name for name, needed in VARIANTS if needed <= flags), None)
    if variant is None:
        raise PeerAbsentError("kt-kernel: no variant of the wheel runs on this processor")
    path = next((folder / "kt_kernel").glob(f"_kt_kernel_ext_{variant}.*.so"))
    spec = importlib.util.spec_from_file_location("kt_kernel_ext", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["kt_kernel_ext"] = module
    spec.loader.exec_module(module)
    return module


def _download(folder: Path) -> None:
    pip = (sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", str(folder))
    done = subprocess.run([*pip, f"kt-kernel=={VERSION}"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise PeerAbsentError(f"kt-kernel: {done.stderr[-500:]}")
    wheel = next(folder.glob("kt_kernel-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.startswith("kt_kernel")])
    wheel.unlink()


class Kt:
    """MXFP4 (form "mxfp4") or BF16 (form "bf16") experts, loaded into kt-kernel's own layout."""

    def __init__(self, geometry: LayerGeometry, threads: int, form: str, cache: Path) -> None:
        self.ext: Any = extension(cache)
        pool = self.ext.WorkerPoolConfig()
        pool.subpool_count, pool.subpool_numa_map, pool.subpool_thread_count = 1, [0], [threads]
        self.infer = self.ext.CPUInfer(pool)
        self.no_gpu = np.zeros(geometry.experts, bool)
        config = self.ext.moe.MOEConfig(
            geometry.experts, geometry.top_k, geometry.hidden, geometry.intermediate, self.no_gpu.ctypes.data
        )
        config.layer_idx, config.pool, config.max_len, config.swiglu_limit = 0, self.infer.backend_, 512, 0.0
        backend = {"mxfp4": "AMXFP4_KGroup_MOE", "bf16": "AMXBF16_MOE"}[form]
        if not hasattr(self.ext.moe, backend):
            backend = {"mxfp4": "AVX2MXFP4_MOE", "bf16": "AVX2BF16_MOE"}[form]
        if form == "mxfp4":
            quant = config.quant_config
            quant.bits, quant.group_size, quant.zero_point = 4, 32, False
        self._give_weights(config, geometry, form)
        self.layer = getattr(self.ext.moe, backend)(config)
        experts = np.arange(geometry.experts, dtype=np.int64)
        self.infer.submit(self.layer.load_weights_task(experts.ctypes.data))
        self.infer.sync()
        self.name = f"kt-kernel {form}"

    def _give_weights(self, config: Any, geometry: LayerGeometry, form: str) -> None:
        """Random weights with harmless scales; every expert points to the same source, which the layer copies."""
        rng = np.random.default_rng(0)
        for name, rows, k in (
            ("gate", geometry.intermediate, geometry.hidden),
            ("up", geometry.intermediate, geometry.hidden),
            ("down", geometry.hidden, geometry.intermediate),
        ):
            scale = np.full((rows, k // 32), 0x3C80, np.uint16)  # bf16 2^-6
            if form == "mxfp4":
                weights: NDArray[Any] = rng.integers(0, 256, (rows, k // 2), dtype=np.uint8)
            else:
                weights = (rng.uniform(-0.05, 0.05, (rows, k)).astype(np.float32).view(np.uint32) >> 16).astype(
                    np.uint16
                )
            setattr(self, f"_{name}", (weights, scale))  # kept alive
            setattr(config, f"{name}_projs", [[weights.ctypes.data] * geometry.experts])
            pointer = scale.ctypes.data if form == "mxfp4" else 0
            setattr(config, f"{name}_scales", [[pointer] * geometry.experts])

    def run(self, step: Step) -> None:
        count, ids, out = np.array([step.x.shape[0]], np.int32), step.ids.astype(np.int64), np.empty_like(step.x_bf16)
        arrays = (ids, step.weights, step.x_bf16, out)
        pointers = (array.ctypes.data for array in arrays)
        self.infer.submit(self.layer.forward_task(count.ctypes.data, ids.shape[1], *pointers, False))
        self.infer.sync()
