"""One routed-expert layer over its tiers: find the experts of a step, bring the missed ones, compute, combine."""

from moetier.engine.counters import Counters
from moetier.engine.host import TieredLayer
from moetier.engine.model import TieredModel

__all__ = ["Counters", "TieredLayer", "TieredModel"]
