"""Data sheets of GPUs: what a card can do at best, for machines that nobody measured yet."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Card:
    """Memory rate in GB/s, dense bf16 TFLOP/s with 32-bit accumulation, PCIe generation, compute capability.

    reported: what nvidia-smi calls it besides the name.
    """

    name: str
    gib: int
    gbps: float
    tflops: float
    pcie: int
    capability: str
    reported: tuple[str, ...] = ()


CARDS = (
    Card("RTX 5080", 16, 960, 225, 5, "12.0"),
    Card("RTX 5070 Ti", 16, 896, 176, 5, "12.0"),
    Card("RTX 4080", 16, 717, 195, 4, "8.9"),
    Card("RTX 3090", 24, 936, 71, 4, "8.6"),
    Card("RTX 4090", 24, 1008, 165, 4, "8.9"),
    Card("RTX 5090", 32, 1792, 209, 5, "12.0"),
    Card("V100", 32, 900, 112, 3, "7.0", ("V100-SXM2-32GB", "V100-PCIE-32GB", "V100-SXM3-32GB")),
    Card("A100-PCIE-40GB", 40, 1555, 312, 4, "8.0"),
    Card("A100-SXM4-40GB", 40, 1555, 312, 4, "8.0"),
    Card("RTX A6000", 48, 768, 155, 4, "8.6"),
    Card("RTX 6000 Ada", 48, 960, 364, 4, "8.9", ("RTX 6000 Ada Generation",)),
    Card("L40S", 48, 864, 362, 4, "8.9"),
    Card("A100", 80, 2039, 312, 4, "8.0", ("A100-SXM4-80GB", "A100-SXM-80GB")),
    Card("A100 80GB PCIe", 80, 1935, 312, 4, "8.0", ("A100-PCIE-80GB",)),
    Card("H100", 80, 3350, 989, 5, "9.0", ("H100 80GB HBM3", "H100 SXM5 80GB", "H100-SXM5-80GB", "H100 SXM")),
    Card("H100 PCIe", 80, 2039, 756, 5, "9.0"),
    Card(
        "RTX PRO 6000", 96, 1792, 503, 5, "12.0",
        ("RTX PRO 6000 Blackwell", *(f"RTX PRO 6000 Blackwell {which} Edition" for which in ("Workstation", "Server"))),
    ),
    Card("H20", 96, 4000, 148, 5, "9.0"),
    Card("H200", 141, 4800, 989, 5, "9.0"),
    Card("B200", 180, 8000, 2250, 5, "10.0"),
    Card("B300", 270, 8000, 2250, 5, "10.3", ("B300 SXM6 AC",)),
)  # fmt: skip
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

MAKERS = re.compile(r"\b(?:nvidia|geforce|tesla|quadro)\b")


def _plain(name: str) -> str:
    """A name without its maker's words, blanks and signs: what two spellings of one card have in common."""
    return re.sub(r"[^a-z0-9]", "", MAKERS.sub("", name.lower()))


_BY_NAME = {_plain(name): card for card in CARDS for name in (card.name, *card.reported)}


def card_named(name: str) -> Card | None:
    """The card of exactly this name, as the maker or nvidia-smi spell it; None for another, however alike they sound.

    An RTX 4090 Laptop GPU, an RTX 4080 SUPER and a GH200 are other cards than those whose names they contain.
    """
    return _BY_NAME.get(_plain(name))


def usual_card(gib: float) -> Card:
    """The card that a size of memory stands for."""
    near = min(BY_SIZE, key=lambda size: abs(size - gib))
    return next(card for card in CARDS if card.name == BY_SIZE[near])


def near_names(name: str) -> tuple[str, ...]:
    """Known cards whose names are like this one."""
    near = difflib.get_close_matches(_plain(name), _BY_NAME, n=3, cutoff=0.5)
    return tuple(dict.fromkeys(_BY_NAME[one].name for one in near))
