"""Can this checkpoint be served here, and how exactly? Answered once, from headers, config, vLLM and the device."""
