"""The device tier's kernels: the contract's bits from a GPU.

CUDA C++, compiled by NVRTC for the geometry at hand. docs/device-kernels.md says how they work and what was measured.
`moetier_reference` has the same layer in Triton, by which CI holds them to the oracle without a GPU.
"""
