"""Where each expert is, and what moves it: the DRAM and disk tiers, the cache policy, and heat."""

from moetier.residency.arena import Arena
from moetier.residency.disk import DiskReader
from moetier.residency.dram import DramTier
from moetier.residency.heat import Heat
from moetier.residency.policy import Lru, Policy

__all__ = ["Arena", "DiskReader", "DramTier", "Heat", "Lru", "Policy"]
