"""The identity check: one generator of calls, one comparison; at the start of a server, long, and on the device."""
