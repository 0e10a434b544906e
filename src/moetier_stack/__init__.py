"""A pinned serving stack: exact sources and wheels, carried patches, and when each of them can go."""
