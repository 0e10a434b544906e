"""What this machine is, how fast its parts are, and what is wrong with it."""
