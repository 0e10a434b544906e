"""The vLLM plugin: a quantization config, a fused-MoE method and a loader, through vLLM's own extension points."""
