"""What the missed experts of a layer take, planned as the device plans them: CPU and link end together, over one DRAM.

A call of `n` missed records has k of them streamed, which the device computes with its own experts once they are there,
while the CPU computes the others. It ends after the slowest of CPU, link and device, and the DRAM that both read
(`plan_step` of kernels/gpu/cuda/hybrid.cuh). Few records cannot be divided evenly, so the time follows from how often
each n occurs and not from the mean n.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moetier.settings import Settings

STAGED: int = Settings.model_fields["staging_slots"].default
"""Records that one call may stream."""
PLANNED: int = Settings.model_fields["planned_tokens"].default
"""Tokens of a step up to which the device plans; of more, the host has every missed record streamed."""

FILLS: int = Settings.model_fields["fills_per_step"].default
"""Missed records that are copied into slots after a step, at most."""


@dataclass(frozen=True)
class Split:
    """Seconds: of the device's own experts; of a call to the CPU, whatever it computes; of one record by CPU, by link,
    and out of DRAM.
    """

    device: float
    call: float
    cpu: float
    link: float
    dram: float

    def seconds(self, most: int, staged: int = STAGED) -> NDArray[np.float64]:
        """float64 [most + 1]: of 0, 1, ... missed records by the best division, at most `staged` of them streamed."""
        records = np.arange(most + 1)[:, None]
        streamed = np.minimum(np.arange(min(staged, most) + 1)[None], records)
        cpu = np.where(records > streamed, self.call + (records - streamed) * self.cpu, 0.0)
        slowest = np.maximum(np.maximum(cpu, self.device + streamed * self.link), records * self.dram)
        best: NDArray[np.float64] = slowest.min(axis=1)
        return best

    def all_streamed(self, most: int) -> NDArray[np.float64]:
        """The same where the host has all of them streamed."""
        times: NDArray[np.float64] = np.maximum(self.device, np.arange(most + 1) * max(self.link, self.dram))
        return times


def distribution(chances: NDArray[np.float64]) -> NDArray[np.float64]:
    """float64 [most + 1]: how likely 0, 1, ... of independent events with these chances [N] occur.

    The product of their generating functions on the unit circle, cut eight deviations above the mean.
    """
    mean, deviation = chances.sum(), np.sqrt((chances * (1 - chances)).sum())
    size = int(min(chances.size, np.ceil(mean + 8 * deviation + 8))) + 1
    circle = np.exp(-2j * np.pi * np.arange(size) / size)
    products = np.prod(1 + chances[:, None] * (circle[None] - 1), axis=0)
    likely: NDArray[np.float64] = np.clip(np.fft.ifft(products).real, 0.0, 1.0)
    likely /= likely.sum()
    return likely
