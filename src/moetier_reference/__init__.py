"""The layer on a device as one object, and its kernels in Triton: the reference, which no server uses.

CI has no GPU. There these kernels run interpreted and are held to the oracle; on a GPU benchmarks hold the CUDA kernels
of `moetier.kernels.cuda` to them. Nothing in `moetier` imports this package, and no setting chooses it.
"""
