"""The identity check: the same calls through every path, at the start of a server, long, and on the device."""
