"""From a plan to what the server is started with; and what the user's own settings change in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moetier.doctor.cache import for_disk, load_rates
from moetier.doctor.examine import facts
from moetier.doctor.facts import Machine
from moetier.errors import SettingsError
from moetier.plan import calibration, report
from moetier.plan.costs import engine_named
from moetier.plan.geometry import Geometry
from moetier.plan.hardware import GIB, hardware_of
from moetier.plan.headers import read_folder
from moetier.plan.placement import Wanted
from moetier.plan.planner import Plan, Question, make_plan

CONTEXT = 32768
"""Tokens that a plan makes room for, where vLLM's arguments do not say; no more than the model has."""
LENGTH = "--max-model-len"


@dataclass(frozen=True)
class Given:
    """What the user fixed. None: as planned."""

    dram_records: str | None = None
    """A number, a share such as 25%, or auto."""
    slots: str | None = None
    """A number, or auto."""
    arguments: tuple[str, ...] = ()
    """For vLLM."""

    @classmethod
    def of(cls, values: Mapping[str, Any], arguments: tuple[str, ...]) -> Given:
        """From settings by name, those that were given."""
        records, slots = values.get("dram_records"), values.get("slots")
        return cls(None if records is None else str(records), None if slots is None else str(slots), arguments)

    @property
    def nothing(self) -> bool:
        return self.dram_records is None and self.slots is None


@dataclass(frozen=True)
class Serving:
    """The plan to start with. changes: what differs by the user's settings from the plan without them."""

    plan: Plan
    changes: tuple[str, ...]

    @property
    def settings(self) -> dict[str, Any]:
        """Of `moetier.settings.Settings`."""
        placement = self.plan.placement
        return {"dram_records": placement.dram_records, "slots": placement.slots}

    @property
    def kv_cache_gib(self) -> float:
        """What the planned context and streams need."""
        placement = self.plan.placement
        return (placement.device or placement.host)["KV cache"] / GIB

    def lines(self) -> Iterator[str]:
        """What is started, how fast that should be, and what the user's own settings change."""
        placement, (rate, low, high) = self.plan.placement, self.plan.metrics["decode_tok_s"]
        experts = self.plan.question.geometry.experts
        where = f"{placement.dram_records} of {experts} experts of each layer in DRAM"
        if self.plan.hardware.gpus:
            where += f", {placement.slots} in GPU memory"
        yield (
            f"plan: {where}, {placement.wanted.context:,} tokens of context; about {report.number(rate)} tokens/s "
            f"({report.number(low)} to {report.number(high)}, workload {self.plan.case.workload.name})"
        )
        if self.changes:
            yield "your settings change: " + "; ".join(self.changes)

    def arguments(self, given: Sequence[str]) -> tuple[str, ...]:
        """Those for vLLM that the plan adds to the user's own."""
        geometry, context = self.plan.question.geometry, self.plan.placement.wanted.context
        if length_of(given) is not None or context == geometry.max_context:
            return ()
        return (LENGTH, str(context))


def plan_serving(folder: Path, given: Given, on_gpu: bool) -> Serving:
    """Plan for a checkpoint on this machine and what is free of it now.

    on_gpu: whether the installed vLLM runs on one. SettingsError if what was asked for does not fit, with what does.
    """
    geometry, machine = read_folder(folder), _here(folder, on_gpu)
    plan = _plan(geometry, machine, given)
    if not plan.fits:
        fitting = f"; what fits is {report.settings_text(plan.nearest)}" if plan.nearest else ""
        raise SettingsError(f"this does not fit: {'; '.join(plan.placement.problems)}{fitting}")
    if given.nothing:
        return Serving(plan, ())
    without = _plan(geometry, machine, Given(arguments=given.arguments))
    return Serving(plan, tuple(report.change(without, plan)))


def _here(folder: Path, on_gpu: bool) -> Machine:
    """The machine we are on: what is free of it now, and one GPU, as one rank serves, or none where vLLM uses none."""
    found = facts(folder)
    memory = found.memory.model_copy(update={"limit_bytes": max(found.memory.available_bytes, 1)})
    gpus = found.gpus[:1] if on_gpu else ()
    return for_disk(found.model_copy(update={"memory": memory, "gpus": gpus, "rates": load_rates(found.identity)}))


def _plan(geometry: Geometry, machine: Machine, given: Given) -> Plan:
    context = length_of(given.arguments) or min(CONTEXT, geometry.max_context)
    wanted = Wanted(
        context=context,
        dram_records=records_of(given.dram_records, geometry.experts),
        slots=_number(given.slots, "--slots"),
    )
    engine = engine_named(None, hardware_of(machine, geometry.record)).name
    kept = calibration.calibration_file(machine.identity, engine)
    corrections = calibration.load(kept) if kept.exists() else None
    if not machine.gpus:
        wanted = replace(wanted, slots=None)
    return make_plan(Question(geometry, machine, wanted, calibration=corrections))


def length_of(arguments: Sequence[str]) -> int | None:
    """The context that vLLM's arguments ask for; forms other than a plain number are vLLM's to judge."""
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == LENGTH:
            text = value if equals else arguments[index + 1] if index + 1 < len(arguments) else ""
            return int(text) if text.isdecimal() and int(text) > 0 else None
    return None


def records_of(text: str | None, experts: int) -> int | None:
    """Records of each layer; None: as planned."""
    if text is None or text == "auto":
        return None
    if text.endswith("%"):
        try:
            share = float(text[:-1])
        except ValueError:
            share = -1.0
        if 0 <= share <= 100:
            return int(experts * share / 100)
    elif text.isdecimal():
        return int(text)
    raise SettingsError(f"--dram-records {text!r}: expected a number, a share such as 25%, or auto")


def _number(text: str | None, name: str) -> int | None:
    if text is None or text == "auto":
        return None
    if not text.isdecimal():
        raise SettingsError(f"{name} {text!r}: expected a number or auto")
    return int(text)
