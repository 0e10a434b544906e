"""Measurement: what the parts and a whole server reach, bound to what was run, refused where it is not valid."""

from __future__ import annotations

from moetier.errors import MoetierError


class BenchError(MoetierError):
    """A recipe, a machine, a suite, a result or the server is not what a measurement needs."""
