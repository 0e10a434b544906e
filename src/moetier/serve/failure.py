"""Why the engine stopped, carried from its process to the person who started the server.

vLLM's processes end each other with tracebacks in which the reason is one line of a hundred. The plugin writes the
reason to a file that the launcher names in the settings; the launcher shows it, whole and alone.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from moetier.errors import MoetierError


@contextlib.contextmanager
def reported(path: Path | None) -> Iterator[None]:
    """Write a MoetierError that passes through to `path` (the first one stays), and let it pass."""
    try:
        yield
    except MoetierError as error:
        if path is not None:
            with contextlib.suppress(OSError), path.open("x") as file:
                json.dump({"message": str(error), "exit_code": error.exit_code}, file)
        raise


def read_failure(path: Path) -> MoetierError | None:
    """The reported error, None if there was none."""
    try:
        state = json.loads(path.read_text())
        error = MoetierError(state["message"])
        error.exit_code = int(state["exit_code"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return error
