"""What a model will do on a machine: geometry from headers, placement, prediction, and corrections from benchmarks."""
