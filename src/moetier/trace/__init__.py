"""Routing traces: recorded, replayed, simulated."""
