"""`python -m moetier`: the command line where the console script is not installed."""

from moetier.cli import main

main()
