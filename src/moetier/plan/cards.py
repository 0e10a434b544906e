"""Data sheets of GPUs: what a card can do at best, for machines that nobody measured yet."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Card:
    """Memory rate in GB/s, dense bf16 TFLOP/s with 32-bit accumulation, PCIe generation, compute capability."""

    name: str
    gib: int
    gbps: float
    tflops: float
    pcie: int
    capability: str


CARDS = (
    Card("RTX 5080", 16, 960, 225, 5, "12.0"),
    Card("RTX 5070 Ti", 16, 896, 176, 5, "12.0"),
    Card("RTX 4080", 16, 717, 195, 4, "8.9"),
    Card("RTX 3090", 24, 936, 71, 4, "8.6"),
    Card("RTX 4090", 24, 1008, 165, 4, "8.9"),
    Card("RTX 5090", 32, 1792, 209, 5, "12.0"),
    Card("V100", 32, 900, 112, 3, "7.0"),
    Card("A100-PCIE-40GB", 40, 1555, 312, 4, "8.0"),
    Card("A100-SXM4-40GB", 40, 1555, 312, 4, "8.0"),
    Card("RTX A6000", 48, 768, 155, 4, "8.6"),
    Card("RTX 6000 Ada", 48, 960, 364, 4, "8.9"),
    Card("L40S", 48, 864, 362, 4, "8.9"),
    Card("A100", 80, 2039, 312, 4, "8.0"),
    Card("H100", 80, 3350, 989, 5, "9.0"),
    Card("RTX PRO 6000", 96, 1792, 503, 5, "12.0"),
    Card("H20", 96, 4000, 148, 5, "9.0"),
    Card("H200", 141, 4800, 989, 5, "9.0"),
    Card("B200", 180, 8000, 2250, 5, "10.0"),
    Card("B300", 270, 8000, 2250, 5, "10.3"),
)
"""From the makers' data sheets."""

BY_SIZE = {
    16: "RTX 5080",
    24: "RTX 4090",
    32: "RTX 5090",
    40: "A100-PCIE-40GB",
    48: "RTX 6000 Ada",
    80: "H100",
    96: "RTX PRO 6000",
    141: "H200",
    180: "B200",
    270: "B300",
}
"""Which card a size of memory stands for, where nothing else is said."""
