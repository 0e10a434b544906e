"""Facts of this machine, the rates of its parts, and their faults."""
