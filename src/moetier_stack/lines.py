"""A file as a sequence of comparable lines, blind to formatting that changes nothing, and to nothing else.

Plain: physical lines without white space at their ends and, but for Python, with runs of it collapsed. Python: logical
lines as tokens, so that a statement that was wrapped, or that got other quotes or a trailing comma, is the same line.
Comments stay, and so does indentation, as depth relative to its neighbours. Blank lines are left out in both.
"""

from __future__ import annotations

import ast
import inspect
import io
import keyword
import token
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass

OPEN, CLOSE = "([{", ")]}"
NO_CALL = frozenset(keyword.kwlist) - {"None", "True", "False"}
SKIPPED = {token.INDENT, token.DEDENT, token.NL, token.ENCODING, token.ENDMARKER}


@dataclass(frozen=True)
class Line:
    indent: int
    key: tuple[str, ...]
    first: int
    last: int
    """Physical lines, 1-based, both inside."""


def plain_lines(text: str, collapse: bool = True) -> list[Line]:
    """Physical lines; collapse: runs of white space are one, as nowhere in a language with strings."""
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        words = tuple(line.split()) if collapse else (line.strip(),) if line.strip() else ()
        if words:
            found.append(Line(len(line.expandtabs()) - len(line.expandtabs().lstrip()), words, number, number))
    return found


def python_lines(text: str) -> list[Line] | None:
    """Logical lines and comment lines; None if the text is no Python."""
    try:
        ast.parse(text)
        tokens = list(tokenize.generate_tokens(io.StringIO(text, newline="\n").readline))
    except (SyntaxError, ValueError, RecursionError, MemoryError, tokenize.TokenError):
        return None
    found: list[Line] = []
    here: list[tokenize.TokenInfo] = []
    depth = 0
    for item in tokens:
        if item.type == token.INDENT:
            depth += 1
        elif item.type == token.DEDENT:
            depth -= 1
        if item.type == token.COMMENT and not here:
            found.append(Line(_comment_depth(item), (" ".join(item.string.split()),), item.start[0], item.end[0]))
        elif item.type == token.NEWLINE and here:
            found.append(Line(depth, _normal(here), here[0].start[0], here[-1].end[0]))
            here = []
        elif item.type not in SKIPPED and item.type != token.NEWLINE:
            here.append(item)
    return _with_comment_depths(found)


def _comment_depth(item: tokenize.TokenInfo) -> int:
    """A mark that the line is a comment in this column; its depth follows from the lines around it."""
    return -1 - item.start[1]


def _with_comment_depths(lines: Sequence[Line]) -> list[Line]:
    """Comment lines get the depth of the next line of code, whatever their column: that is where people put them."""
    found: list[Line] = []
    depth = 0
    for line in reversed(lines):
        depth = line.indent if line.indent >= 0 else depth
        found.append(Line(depth, line.key, line.first, line.last))
    return found[::-1]


def _normal(items: Sequence[tokenize.TokenInfo]) -> tuple[str, ...]:
    """Tokens of a logical line without what formatters add and take."""
    texts = [item.string for item in items]
    if len(items) == 1 and items[0].type == token.STRING:  # a docstring: its indentation is no content
        value = _string(texts[0])
        return (repr(inspect.cleandoc(value)) if isinstance(value, str) else texts[0],)
    texts = [
        repr(_string(text)) if item.type == token.STRING and _string(text) is not None else text
        for item, text in zip(items, texts, strict=True)
    ]
    texts = [
        " ".join(text.split()) if item.type == token.COMMENT else text for item, text in zip(items, texts, strict=True)
    ]
    dropped = _idle_commas(texts)
    texts = [text for number, text in enumerate(texts) if number not in dropped]
    dropped = _idle_parentheses(texts)
    return tuple(text for number, text in enumerate(texts) if number not in dropped)


def _string(text: str) -> str | bytes | None:
    """Value of a plain string literal; None for an f-string, which is compared as it is written."""
    try:
        value = ast.literal_eval(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None
    return value if isinstance(value, str | bytes) else None


def _is_call(texts: Sequence[str], opener: int) -> bool:
    """Whether a bracket follows a value: then it is a call or a subscript."""
    before = texts[opener - 1] if opener else ""
    return bool(before) and (
        before in CLOSE or (before.isidentifier() and before not in NO_CALL) or before[-1] in "'\""
    )


def _idle_commas(texts: Sequence[str]) -> set[int]:
    """Trailing commas that mean nothing: of calls, lists, dicts and sets, and of tuples that have another comma."""
    idle: set[int] = set()
    stack: list[tuple[int, int]] = []  # (opener, commas)
    for number, text in enumerate(texts):
        if text and text in OPEN:
            stack.append((number, 0))
        elif text == "," and stack:
            stack[-1] = (stack[-1][0], stack[-1][1] + 1)
        elif text and text in CLOSE and stack:
            opener, commas = stack.pop()
            if texts[number - 1] != ",":
                continue
            # (of an import, parentheses hold names, not a tuple)
            call = _is_call(texts, opener) or (opener > 0 and texts[opener - 1] == "import")
            many = commas > 1
            meaningless = text == "}" or (text == ")" and (call or many)) or (text == "]" and (not call or many))
            if meaningless:
                idle.add(number - 1)
    return idle


def _idle_parentheses(texts: Sequence[str]) -> set[int]:
    """The pair around everything after `=`, `return`, `in` and the like, as formatters put around a wrapped value."""
    starts = {"=", "return", "in", "assert", "if", "elif", "while", "yield", "await", "+=", "-=", "from", "import"}
    idle: set[int] = set()
    stack: list[int] = []
    for number, text in enumerate(texts):
        if text == "(":
            stack.append(number)
        elif text == ")" and stack:
            opener = stack.pop()
            ends = number + 1 == len(texts) or (number + 2 == len(texts) and texts[-1] == ":")
            inside = number - opener > 1
            if ends and inside and opener and texts[opener - 1] in starts:
                idle |= {opener, number}
    return idle
