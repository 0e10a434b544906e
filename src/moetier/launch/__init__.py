"""Serving: the vLLM plugin and the launcher around it."""
