"""Evaluation sets: JSONL, one item a line (the format is in models/README.md)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moetier.errors import StoreError
from moetier.files import read_small
from moetier_bench.eval import EvalError

MAX_BYTES = 1 << 30
"""More than any evaluation set or result file needs."""


@dataclass(frozen=True)
class Item:
    """One question with the one answer that is right: a text, or a tool call with its name and arguments."""

    task: str
    id: int
    messages: tuple[dict[str, Any], ...]
    thinking: bool
    expected: str | dict[str, Any]
    tools: tuple[dict[str, Any], ...] = ()

    @property
    def digest(self) -> str:
        """Hash of everything that is asked: equal in two result files means the same question."""
        asked = json.dumps([self.messages, self.thinking, self.expected, self.tools], sort_keys=True)
        return hashlib.sha256(asked.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Text:
    """A text whose likelihood is measured."""

    task: str
    id: int
    text: str

    @property
    def digest(self) -> str:
        """Hash of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]


def load_sets(folder: Path, tasks: Sequence[str]) -> list[Item | Text]:
    """Items of the named sets in `folder`, of all its sets if none is named; EvalError says what is wrong with them."""
    known = sorted(path.stem for path in folder.glob("*.jsonl"))
    if not known:
        raise EvalError(f"{folder}: expected evaluation sets *.jsonl, found none; name their folder with --sets")
    unknown = [task for task in tasks if task not in known]
    if unknown:
        raise EvalError(f"{folder} has no set {', '.join(unknown)}; it has {', '.join(known)}")
    return [item for task in tasks or known for item in load_set(folder / f"{task}.jsonl")]


def load_set(path: Path) -> list[Item | Text]:
    """Items of one file, in its order; the set's name is the file's."""
    items: list[Item | Text] = []
    try:
        lines = read_small(path, MAX_BYTES).decode().splitlines()
    except (OSError, StoreError, UnicodeDecodeError) as error:
        raise EvalError(f"{path} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        try:
            items.append(_item(path.stem, json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise EvalError(
                f"{path}, line {number}: expected an object with id and either text, or messages, enable_thinking and "
                f"one of expected and (with tools) expected_call; found {type(error).__name__}: {error}"
            ) from error
    if len({item.id for item in items}) != len(items):
        raise EvalError(f"{path}: an id occurs twice; results could not be paired")
    return items


def _item(task: str, raw: dict[str, Any]) -> Item | Text:
    if "text" in raw:
        return Text(task, int(raw["id"]), str(raw["text"]))
    call = raw.get("expected_call")
    expected = {"name": call["name"], "arguments": call["arguments"]} if call is not None else str(raw["expected"])
    messages, tools = tuple(raw["messages"]), tuple(raw.get("tools", ()))
    return Item(task, int(raw["id"]), messages, bool(raw["enable_thinking"]), expected, tools)
