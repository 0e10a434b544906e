"""Where each expert is, and what moves it: the DRAM and disk tiers, the cache policy, and heat."""

from moetier.residency.arena import Arena
from moetier.residency.disk import DiskReader
from moetier.residency.dram import DramTier
from moetier.residency.heat import Heat
from moetier.residency.part import Part
from moetier.residency.policy import POLICIES, Frequency, Lru, Policy, SecondTouch, Swap, refills
from moetier.residency.step import UNKNOWN, Step

__all__ = [
    "POLICIES",
    "UNKNOWN",
    "Arena",
    "DiskReader",
    "DramTier",
    "Frequency",
    "Heat",
    "Lru",
    "Part",
    "Policy",
    "SecondTouch",
    "Step",
    "Swap",
    "refills",
]
