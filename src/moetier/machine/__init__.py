"""A machine: facts, limits of this process, NUMA, and the probes that find them. No rates, no kernels."""
