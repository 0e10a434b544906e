"""One routed-expert layer over its tiers: find the experts of a step, bring the missed ones, compute, combine."""

from moetier.layer.counters import Counters
from moetier.layer.model import TieredModel
from moetier.layer.tiered import TieredLayer

__all__ = ["Counters", "TieredLayer", "TieredModel"]
