"""The arithmetic of a routed-expert layer: the oracle that defines it and the kernels that equal it bit for bit."""
