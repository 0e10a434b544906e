"""A row of the table, and the facts that it looks at beside the checkpoint's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from moetier.decision.facts import Facts
from moetier.decision.installed import Installed

AS_IT_IS = "serve it with vLLM as it is if it fits"
"""Advice for a model that only moetier does not serve."""


class Level(StrEnum):
    """Meaning of a finding."""

    REFUSES = "refuses"
    CONDITION = "condition"
    """Serving needs an argument for vLLM; everything before it goes on."""
    NO_DRAFTER = "no drafter"
    NOTE = "note"


@dataclass(frozen=True)
class Here:
    """Where it would be served."""

    vllm: Installed | None = None
    devices: tuple[str | None, ...] = ()
    """"cpu" or compute capabilities; empty: no matter where."""
    arguments: tuple[str, ...] = ()
    """Arguments that are passed on to vLLM."""


@dataclass(frozen=True)
class Found:
    """A row's finding, as a sentence that begins with the checkpoint's name; remedy is what to do."""

    text: str
    remedy: str = ""


@dataclass(frozen=True)
class Row:
    """One row.

    reads: experts cannot even be read. tensors: the row looks at headers. overridable: by --skip-support-check.
    """

    id: str
    about: str
    find: Callable[[Facts, Here], Iterator[Found]]
    level: Level = Level.REFUSES
    reads: bool = False
    tensors: bool = False
    overridable: bool = False
