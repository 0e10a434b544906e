"""Time of the missed experts of a layer, divided as the device divides them: CPU and link end together.

A call of `n` missed records has k of them streamed, which the device computes with its own experts once they are there,
while the CPU computes the others, slower while the link reads the same DRAM. It ends after the slowest of CPU, link and
device, and the DRAM; k is what `plan_step` of kernels/cuda/source/hybrid.cuh chooses. Few records cannot be divided
evenly, so the time follows from how often each n occurs and not from the mean n.
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
    and out of DRAM with both reading. slowed: of the CPU's rate, what the link takes away while it streams. streamed:
    seconds of a streamed record on the device, when all have come.
    """

    device: float
    call: float
    cpu: float
    link: float
    dram: float
    slowed: float = 0.0
    streamed: float = 0.0

    def seconds(self, most: int, staged: int = STAGED) -> NDArray[np.float64]:
        """float64 [most + 1]: of 0, 1, ... missed records as the device divides them, at most `staged` streamed.

        Like plan_step's, the division does not know that the link may end before the CPU; of equals the fewest are
        streamed.
        """
        records: NDArray[np.float64] = np.arange(most + 1, dtype=np.float64)[:, None]
        streamed = np.minimum(np.arange(min(staged, most) + 1)[None], records)
        each = self.cpu / np.where(streamed > 0, 1 - self.slowed, 1.0)
        cpu = np.where(records > streamed, self.call + (records - streamed) * each, 0.0)
        device = np.where(streamed > 0, self.device + streamed * (self.link + self.streamed), 0.0)
        taken = np.maximum(cpu, device).argmin(axis=1)[:, None]
        chosen: NDArray[np.float64] = np.take_along_axis(streamed, taken, 1)
        return self.divided(records, chosen)[:, 0]

    def divided(self, records: NDArray[np.float64], streamed: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the time of calls with so many missed records, of which so many are streamed."""
        on_cpu, link = records - streamed, streamed * self.link
        slowed = np.minimum(on_cpu * self.cpu / (1 - self.slowed), on_cpu * self.cpu + self.slowed * link)
        cpu = np.where(on_cpu > 0, self.call + slowed, 0.0)
        device = self.device + link + streamed * self.streamed
        times: NDArray[np.float64] = np.maximum(np.maximum(cpu, device), records * self.dram)
        return times

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
