"""A routed-expert layer over device slots, DRAM and disk in the same step: device and CPU compute at the same time."""

from moetier.engine.hybrid.launch import Launch
from moetier.engine.hybrid.layer import HybridLayer
from moetier.engine.hybrid.model import HybridModel, SlotPlan

__all__ = ["HybridLayer", "HybridModel", "Launch", "SlotPlan"]
