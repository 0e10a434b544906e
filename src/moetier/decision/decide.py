"""The decision: one object that `plan`, `store build`, `serve` and `doctor` show, and refuse by."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from moetier.checkpoint.names import MoeLayer
from moetier.decision import activation
from moetier.decision.facts import Facts
from moetier.decision.kinds import kind_of
from moetier.decision.row import Here, Level
from moetier.decision.rows import ROWS
from moetier.decision.serving import TRUST, drafter_problem, supports
from moetier.errors import RefusedError, UnsupportedModelError
from moetier.machine.facts import Support
from moetier.vllm_arguments import has

ANYWHERE = Here()
"""For what depends on the checkpoint alone."""
LOSSLESS = "mxfp4"
FLOATS = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}


class Answer(StrEnum):
    """How a checkpoint is served."""

    EXACTLY = "served exactly"
    REQUANTIZED = "served re-quantized"
    REFUSED = "refused"


class Drafter(StrEnum):
    """Fate of a checkpoint's drafter."""

    NONE = "none"
    SERVED = "served"
    LEFT_OUT = "left out"


@dataclass(frozen=True)
class Reason:
    """A finding of one row of the table."""

    row: str
    level: Level
    text: str
    remedy: str
    overridable: bool

    def __str__(self) -> str:
        return f"{self.text}; {self.remedy}" if self.remedy else self.text


@dataclass(frozen=True)
class Decision:
    """Whether a checkpoint can be served here, and how exactly."""

    name: str
    model_type: str
    answer: Answer
    reasons: tuple[Reason, ...]
    formats: tuple[tuple[str, str], ...]
    """Number format of the experts by group of layers (model, drafter)."""
    activation: str
    clamp: float | None
    drafter: Drafter
    support: tuple[Support, ...]

    def refusals(self, skip: bool = False) -> tuple[Reason, ...]:
        """Return what stands in the way; skip: without what --skip-support-check overrides."""
        return tuple(one for one in self.reasons if one.level is Level.REFUSES and not (skip and one.overridable))

    def conditions(self) -> tuple[Reason, ...]:
        """Return what serving needs beside."""
        return tuple(one for one in self.reasons if one.level is Level.CONDITION)

    def require(self, skip: bool = False) -> None:
        """RefusedError where something stands in the way: the first reason with its remedy, then the others."""
        found = self.refusals(skip)
        if found:
            raise RefusedError(f"{self.name} {found[0]}{_more(found)}")

    def lines(self, skip: bool = False) -> Iterator[str]:
        """The decision in words, what matters most first."""
        refused = self.refusals(skip)
        if refused:
            yield f"cannot be served: {self.name} {refused[0]}"
            yield from (f"  and it {one}" for one in refused[1:])
            return
        for reason in self.reasons:
            if reason.level is not Level.REFUSES:
                yield f"{_LEVELS[reason.level]}: {self.name} {reason}"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "answer": self.answer,
            "reasons": [
                {"row": r.row, "level": r.level, "text": r.text, "remedy": r.remedy, "overridable": r.overridable}
                for r in self.reasons
            ],
            "model_type": self.model_type,
            "formats": dict(self.formats),
            "activation": self.activation,
            "clamp": self.clamp,
            "drafter": self.drafter,
            "support": [one.model_dump(mode="json") for one in self.support],
        }


_LEVELS = {Level.CONDITION: "needs an argument", Level.NO_DRAFTER: "served without its drafter", Level.NOTE: "note"}


def _more(found: tuple[Reason, ...]) -> str:
    return "".join(f". Also, it {one.text}" for one in found[1:])


def decide(facts: Facts, here: Here = ANYWHERE) -> Decision:
    """Answer; CheckpointError where config.json is malformed."""
    reasons: list[Reason] = []
    for row in ROWS:
        if (row.tensors and not facts.headers) or (row.level is Level.CONDITION and has(here.arguments, TRUST)):
            continue
        reasons += (Reason(row.id, row.level, one.text, one.remedy, row.overridable) for one in row.find(facts, here))
        if row.id == "dense" and reasons:
            break
    formats = _formats(facts)
    return Decision(
        name=facts.name,
        model_type=facts.model_types[-1],
        answer=_answer(reasons, formats),
        reasons=tuple(reasons),
        formats=formats,
        activation=activation.activation_of(facts.text) or "silu",
        clamp=_clamp(facts),
        drafter=_drafter(facts),
        support=supports(facts, here),
    )


def require_readable(facts: Facts) -> None:
    """RefusedError where names, formats or clamp of the experts are not known: no store could hold them."""
    if any(next(row.find(facts, ANYWHERE), None) is not None for row in ROWS if row.reads):
        decide(facts).require()


def _answer(reasons: list[Reason], formats: tuple[tuple[str, str], ...]) -> Answer:
    if any(reason.level is Level.REFUSES for reason in reasons):
        return Answer.REFUSED
    lossy = any(name != LOSSLESS for _, found in formats for name in found.split("+"))
    return Answer.REQUANTIZED if lossy else Answer.EXACTLY


def _clamp(facts: Facts) -> float | None:
    try:
        return activation.limit_of(facts.config, [layer.number for layer in facts.own_layers])
    except UnsupportedModelError:
        return None  # a row says why


def _drafter(facts: Facts) -> Drafter:
    if drafter_problem(facts):
        return Drafter.LEFT_OUT
    return Drafter.SERVED if facts.draft_layers else Drafter.NONE


def _formats(facts: Facts) -> tuple[tuple[str, str], ...]:
    """As store.json names them; of what is not read, the kind's name."""
    if facts.trimmed_format is not None:
        return (("model", facts.trimmed_format),)
    groups = (("model", facts.own_layers), ("drafter", facts.draft_layers))
    return tuple((group, format_of(facts, layers)) for group, layers in groups if layers and facts.parts)


def format_of(facts: Facts, layers: tuple[MoeLayer, ...]) -> str:
    """Number formats of these layers, joined by + where they differ."""
    found = set()
    for layer in layers:
        parts = facts.parts[layer]
        kind = kind_of(parts, facts.config)
        tensors = [*parts.fused.values(), *(t for one in parts.matrices.values() for t in one.values())]
        float_ = next((FLOATS[t.dtype] for t in tensors if t.dtype in FLOATS), "float")
        found.add(float_ if kind.format == "float" else kind.format or kind.name)
    return "+".join(sorted(found))
