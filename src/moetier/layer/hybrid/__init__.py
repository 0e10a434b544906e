"""A routed-expert layer over device slots, DRAM and disk in the same step: device and CPU compute at the same time."""

from moetier.layer.hybrid.launch import Launch
from moetier.layer.hybrid.layer import HybridLayer
from moetier.layer.hybrid.model import HybridModel, SlotPlan

__all__ = ["HybridLayer", "HybridModel", "Launch", "SlotPlan"]
