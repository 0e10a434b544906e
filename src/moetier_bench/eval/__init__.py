"""Quality of a served model: evaluation sets asked over the OpenAI API, scored exactly, compared item by item."""

from __future__ import annotations

from moetier.errors import MoetierError


class EvalError(MoetierError):
    """A set, a result file or the server is not what an evaluation needs."""
