"""moetier's own CPU kernels."""

from __future__ import annotations

import numpy as np

from benchmarks.peers.base import Step
from moetier.contract import Family, LayerGeometry
from moetier.doctor.measure.kernel import make_records
from moetier.kernels.cpu import CpuExperts, ThreadPool


class Ours:
    """Records of random MXFP4 experts, the contract's bits."""

    def __init__(self, geometry: LayerGeometry, threads: int, isa: str | None = None) -> None:
        self.memory, self.addresses = make_records(geometry)
        self.kernel = CpuExperts(geometry, Family(10.0, True), ThreadPool(threads), isa=isa, max_tokens=512)
        self.name = f"moetier {self.kernel.isa}"

    def run(self, step: Step) -> None:
        self.kernel.forward(step.x_bf16, step.ids, step.weights, self.addresses, np.empty_like(step.x_bf16))
