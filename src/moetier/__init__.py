"""moetier: exact tiered experts for Mixture-of-Experts models that do not fit the GPU."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("moetier")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0.0.0"
