"""Small files of /proc and /sys, which may be absent, unreadable or in another kernel's form."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def text(path: Path) -> str | None:
    """Content without surrounding blanks; None where there is none to be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def number(path: Path) -> int | None:
    """A file that holds one non-negative decimal number."""
    found = text(path)
    return int(found) if found and found.isdecimal() else None


def fields(path: Path) -> dict[str, str]:
    """Lines of the form "Name: value"; the first one counts where a name comes again."""
    found: dict[str, str] = {}
    for line in (text(path) or "").splitlines():
        name, colon, value = line.partition(":")
        if colon:
            found.setdefault(name.strip(), value.strip())
    return found


def distinct_groups(lists: Iterable[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Each group once, in the order of their first members."""
    return tuple(sorted({group for group in lists if group}))
