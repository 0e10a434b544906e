"""Why the engine stopped, carried from its process to the person who started the server.

vLLM's processes end each other with tracebacks in which the reason is one line of a hundred. The plugin writes the
reason to a file that the launcher names in the settings; the launcher shows it, whole and alone. A MoetierError knows
what to do about it, so it takes the place of any other exception; of two of a kind the first one stays, since what
fails after it fails because of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from moetier.errors import MoetierError

ENDED = "ended.json"


@contextlib.contextmanager
def reported(path: Path | None) -> Iterator[None]:
    """Write the reason of any exception that passes through to `path`, and let it pass."""
    try:
        yield
    except Exception as error:
        if path is not None:
            with contextlib.suppress(OSError):
                _write(path, error)
        raise


def _write(path: Path, error: Exception) -> None:
    state: dict[str, Any] = {"message": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    if isinstance(error, MoetierError):
        state = {"message": str(error), "exit_code": error.exit_code}
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    aside.write_text(json.dumps(state))
    try:
        if isinstance(error, MoetierError) and read_failure(path) is None:
            aside.replace(path)
        else:
            os.link(aside, path)  # FileExistsError: an earlier reason stays
    finally:
        aside.unlink(missing_ok=True)


def read_failure(path: Path) -> MoetierError | None:
    """The reported error, None if there was none."""
    state = _read(path)
    if not isinstance(state.get("message"), str) or not isinstance(state.get("exit_code"), int):
        return None
    error = MoetierError(state["message"])
    error.exit_code = state["exit_code"]
    return error


def read_words(path: Path | None) -> str:
    """Return what any exception that was reported said, "" if there was none."""
    return "" if path is None else str(_read(path).get("message", ""))


def _read(path: Path) -> dict[str, Any]:
    try:
        state = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def write_ended(folder: Path, ended: Sequence[tuple[str, int]]) -> None:
    """Write which processes ended, and their exit codes; a full disk costs that."""
    with contextlib.suppress(OSError):
        (folder / ENDED).write_text(json.dumps(ended))


def read_ended(folder: Path | None) -> list[tuple[str, int]]:
    """Return what `write_ended` wrote; nothing where it did not."""
    if folder is None:
        return []
    try:
        return [(str(name), int(code)) for name, code in json.loads((folder / ENDED).read_text())]
    except (OSError, ValueError, TypeError):
        return []
