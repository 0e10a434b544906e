"""What is known of a machine: facts, limits, NUMA, and the probes that find them. No rates, no kernels."""
