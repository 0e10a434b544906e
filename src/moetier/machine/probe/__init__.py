"""Finding the facts. `root` is where /proc and /sys are found; what is absent there is not known, never an error."""
