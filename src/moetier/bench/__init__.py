"""Measurement: what the parts reach on this machine, beside what the machine allows in the same run."""
