"""The device tier's kernels: the contract's bits from a GPU.

Two paths behind one interface: Triton, which is portable and which CI interprets on machines without a GPU, and CUDA
C++ compiled by NVRTC for the geometry at hand, which is the fast one on NVIDIA GPUs. docs/device-kernels.md says how
they work and what was measured.
"""

from moetier.kernels.cuda.experts import Backend, DeviceExperts, default_backend

__all__ = ["Backend", "DeviceExperts", "default_backend"]
