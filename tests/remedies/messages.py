"""Find every message of the package that tells its reader what to do, by walking the source.

A message is a text that is raised, printed, logged or kept for that, and that holds an imperative, a command or an
option. Docstrings, the command line's own help and templates of files are none. A scenario names a message by its file
and a part of its template: `@remedy("store/check.py", "run the build again")`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
HOLE = "{}"
"""Stands in a template for whatever is put in at run time..."""
PUT_IN = re.compile(r"\{\}|%[sdr]|%\.\d+f")
"""...as do the places of a logged one."""

VERBS = (
    "accept add allow ask begin build call change check choose close commit copy correct create delete "
    "describe download drop edit end export finish fix free get give hide install keep leave let limit list load "
    "log look lower mail make measure mount move name open pass pin plan put quantize raise read rebuild "
    "record reinstall release remove repair repeat replace report reset resolve restart restore run save say "
    "see serve set shorten specify split start state stop take tell trim try turn unset update upgrade use "
    "wait write "
)
BEFORE = r"(?:^|[;:(]\s*|[.,]\s+|\b(?:or|and|then|else|please|first)\s+)(?:please |first |then )?"
"""What stands before an imperative."""
EITHER = "|".join([*VERBS.split(), *VERBS.title().split()])
"""Verbs in small letters, or at the start of a sentence; in capitals (RECORD) they are names."""
IMPERATIVE = re.compile(rf"{BEFORE}(?:{EITHER})\b(?!:)")
COMMAND = re.compile(
    r"\bmoetier (?:bench|calibrate|doctor|eval|identity|plan|prove|serve|stack|store|trace)\b"
    r"|\bpip install|(?<![\w(-])--[a-z][a-z-]+|\(--[a-z][a-z-]+ |\bapt-get\b|\bmake [a-z]+|\bulimit\b"
)
"""An option that stands alone in brackets says where a value came from."""
REPORT = re.compile(r"(?:please |[;,.] )*\b[Rr]eport (?:this|it)\b(?! with)")
"""Asks for a report and mends nothing."""
HELP = ("help", "description", "epilog", "short_help")
"""Keyword arguments that carry the command line's help and the schema's."""
NAMES = re.compile(r"^(?:(?:-[-\w=./{}]*|\{\}) ?)+$|^--[\w-]+=|^[\w.{}/-]*$|^moetier \w+$|^<|^\s")
"""Bare options, arguments of other programs, names, a command alone, and pieces of markup: no sentence."""


@dataclass(frozen=True)
class Message:
    """A text of the source; `template` has HOLE where values are put in."""

    path: str
    """Relative to src/moetier; that of another package begins with its name."""
    line: int
    template: str

    @property
    def pattern(self) -> re.Pattern[str]:
        """Match a text that was made from the template, wherever it stands in what was printed."""
        parts = [r"\s+".join(map(re.escape, part.split(" "))) for part in re.split(PUT_IN, self.template)]
        return re.compile(".*?".join(parts), re.DOTALL)


@cache
def messages() -> tuple[Message, ...]:
    """Return all of them, in the order of the files."""
    found: dict[tuple[str, str], Message] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        for message in _in_file(path):
            found.setdefault((message.path, message.template), message)  # what two places say alike is one message
    return tuple(found.values())


def find(path: str, part: str) -> Message:
    """Return the one message of a file whose template is `part`, or holds it."""
    here = [message for message in messages() if message.path == path]
    whole = [message for message in here if message.template == part]
    found = whole or [message for message in here if part in message.template]
    assert len(found) == 1, f"expected one message of {path} with {part!r}, found {[m.template for m in found]}"
    return found[0]


def _in_file(path: Path) -> Iterator[Message]:
    tree = ast.parse(path.read_text())
    skipped = {id(node) for part in _skipped(tree) for node in ast.walk(part)}
    for node in ast.walk(tree):
        if id(node) in skipped or not isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp):
            continue
        skipped |= set(map(id, _said(node)))
        text = _template(node)
        if text is not None and _tells_what_to_do(text):
            yield Message(str(path.relative_to(SOURCE)).removeprefix("moetier/"), node.lineno, text)


def _skipped(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield docstrings (of attributes too), help texts, and what assertions say to developers."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.value
        elif isinstance(node, ast.Assert) and node.msg is not None:
            yield node.msg
        elif isinstance(node, ast.keyword) and node.arg in HELP:
            yield node.value
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("Option", "Argument", "compile"):
            yield node


def _said(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that are in a text's template: not those of what is put in, which may be texts of their own."""
    yield node
    if isinstance(node, ast.JoinedStr):
        for part in node.values:
            yield from _said(part)
    elif isinstance(node, ast.BinOp):
        yield from (*_said(node.left), *_said(node.right))


def _template(node: ast.AST) -> str | None:
    """Return the text with HOLE for its values; None where it is no text."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(_template(part) or HOLE for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _template(node.left), _template(node.right)
        return None if left is right is None else (left or HOLE) + (right or HOLE)
    return None


def _tells_what_to_do(text: str) -> bool:
    if NAMES.match(text) or " " not in text.strip() or "\n" in text:
        return False
    text = REPORT.sub("", text)
    if text[:1].isupper():  # prose, unless it has the form of an error: "...; do this"
        text = text.partition("; ")[2]
    return bool(IMPERATIVE.search(text) or COMMAND.search(text))


if __name__ == "__main__":
    for message in messages():
        print(f"{message.path}:{message.line}: {message.template}")
