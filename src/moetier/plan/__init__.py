"""Predict a model on a machine: geometry from headers, placement, prediction, corrections from benchmarks."""
