"""The door to the terminal: whatever a verb prints, by itself or through rich, passes here and is made visible."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from moetier.visible import bounded, visible


class Door(io.TextIOWrapper):
    """A standard stream on which text of others is visible.

    rich writes past it (to `rich_proxied_file`), for its colours and cursor are escapes too; what it renders was made
    visible before it got them (`guard`).
    """

    def __init__(self, stream: io.TextIOWrapper) -> None:
        super().__init__(
            stream.buffer,
            encoding=stream.encoding,
            errors="backslashreplace",  # a name that the locale cannot write stops no command
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        self._below = stream  # once forgotten, it would close what both write to
        self.rich_proxied_file = _Past(self)

    def close(self) -> None:
        """Flush: the stream below is not ours to close."""
        with contextlib.suppress(ValueError):
            self.flush()

    def write(self, text: str) -> int:
        super().write(visible(text))
        return len(text)

    def write_rendered(self, text: str) -> int:
        """Write what was made visible already."""
        return super().write(text)


class _Past:
    """The stream as rich sees it."""

    def __init__(self, door: Door) -> None:
        self._door = door

    def write(self, text: str) -> int:
        return self._door.write_rendered(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._door, name)


def guard() -> None:
    """Put the door before both standard streams, and before whatever a console of rich renders."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and not isinstance(stream, Door):
            stream.flush()
            setattr(sys, name, Door(stream))
    if Console.render is not _render_visibly:
        Console.render = _render_visibly  # type: ignore[method-assign]


_render = Console.render


def _render_visibly(
    self: Console, renderable: RenderableType, options: ConsoleOptions | None = None
) -> Iterable[Segment]:
    """Console.render, its text visible. What rich does to the cursor is marked as control, and passes."""
    for segment in _render(self, renderable, options):
        yield segment if segment.control else Segment(bounded(visible(segment.text)), segment.style)
