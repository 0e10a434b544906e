"""Text that others wrote (names in files, headers, answers of servers), made safe to show in a terminal or a log."""

from __future__ import annotations

import logging
import re

_UNSEEN = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 without tab and newline, DEL, C1
    "\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"  # direction, invisible, line separators
    "\ud800-\udfff\U000e0000-\U000e007f"  # half characters (bytes of a name that are no UTF-8), tags
    "]"
)
_PASSWORD = re.compile(r"(?<=://)[^/\s@]*:[^/\s@]*(?=@)")
_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{16,}")

LONGEST_LINE = 4_000
"""Characters of a line that a person is shown: a name in a file may have millions."""
LONGEST = 64_000
"""Characters of a whole message."""


def visible(text: str) -> str:
    """The text with control characters, and those that reorder or hide others, as hexadecimal escapes.

    Tabs and newlines stay, and so does JSON. Passwords in addresses and tokens of the hub are left out.
    """
    text = _UNSEEN.sub(_escape, text)
    return _TOKEN.sub("hf_***", _PASSWORD.sub("***", text))


def _escape(found: re.Match[str]) -> str:
    r"""\\x1b, and beyond what a JSON encoder has escaped \\u009b."""
    if found[0] < " ":
        return f"\\x{ord(found[0]):02x}"
    units = found[0].encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))


def bounded(text: str) -> str:
    """The text with the middle of what is too long left out: its beginning says what is wrong, its end what to do."""
    lines = text if len(text) <= LONGEST_LINE else "\n".join(_shorter(line, LONGEST_LINE) for line in text.split("\n"))
    return _shorter(lines, LONGEST)


def _shorter(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} ...({len(text) - 2 * half:,} characters left out)... {text[-half:]}"


class VisibleRecords(logging.Filter):
    """Makes the text of our log records visible; those of others pass as they are."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name.startswith(("moetier", "vllm.moetier")):
            record.msg, record.args = bounded(visible(record.getMessage())), None
        return True
