"""From a plan to what the server is started with; and what the user's own settings change in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moetier.amounts import amount_of
from moetier.budget import GIB
from moetier.doctor.cache import for_disk, load_rates
from moetier.doctor.examine import facts
from moetier.errors import SettingsError
from moetier.machine.facts import Machine
from moetier.plan import calibration, report
from moetier.plan.costs import engine_named
from moetier.plan.geometry import Geometry
from moetier.plan.hardware import hardware_of
from moetier.plan.headers import read_folder
from moetier.plan.placement import Wanted, place
from moetier.plan.planner import Plan, Question, make_plan
from moetier.vllm_arguments import BATCHED, LENGTH, has, number_of

CONTEXT = 32768
"""Tokens that a plan makes room for, where vLLM's arguments do not say; no more than the model has."""

DEVICE_CHUNKS = (8192, 4096, 2048)
"""Tokens of a prompt in a step with device slots, the first that fits: each chunk streams what has no slot, so few and
large ones are faster."""
ContextOf = Callable[[Sequence[str], int, int | None], int | None]


def _length_alone(arguments: Sequence[str], window: int, reserve: int | None) -> int | None:
    return number_of(arguments, LENGTH)


@dataclass(frozen=True)
class Given:
    """Values that the user fixed. None: as planned."""

    dram_records: str | None = None
    """A number, a share such as 25%, or auto."""
    slots: str | None = None
    """A number, or auto."""
    arguments: tuple[str, ...] = ()
    """For vLLM."""
    reserve: int | None = None
    """Serve the model's window less this many tokens."""
    context_of: ContextOf = _length_alone
    """Tokens of context that arguments, window and reserve fix; None: none."""

    @classmethod
    def of(
        cls,
        values: Mapping[str, Any],
        arguments: tuple[str, ...],
        reserve: int | None = None,
        context_of: ContextOf = _length_alone,
    ) -> Given:
        """From settings by name, those that were given."""
        records, slots = (None if values.get(key) is None else str(values[key]) for key in ("dram_records", "slots"))
        return cls(records, slots, arguments, reserve, context_of)

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
        """Values of `moetier.settings.Settings`."""
        placement = self.plan.placement
        return {"dram_records": placement.dram_records, "slots": placement.slots}

    @property
    def kv_cache_gib(self) -> float:
        """GiB that the planned context and streams need."""
        placement = self.plan.placement
        return (placement.device or placement.host)["KV cache"] / GIB

    @property
    def device_bytes(self) -> int | None:
        """Planned of the device; None without one."""
        return self.plan.placement.device_bytes if self.plan.hardware.gpus else None

    def lines(self) -> Iterator[str]:
        """Say what is started, how fast that should be, and what the user's own settings change."""
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
        if has(given, LENGTH) or context == geometry.max_context:
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
    without = _plan(geometry, machine, replace(given, dram_records=None, slots=None))
    return Serving(plan, tuple(report.change(without, plan)))


def _here(folder: Path, on_gpu: bool) -> Machine:
    """The machine we are on: what is free of it now, and one GPU, as one rank serves, or none where vLLM uses none."""
    found = facts(folder)
    memory = found.memory.model_copy(update={"limit_bytes": max(found.memory.available_bytes, 1)})
    gpus = found.gpus[:1] if on_gpu else ()
    return for_disk(found.model_copy(update={"memory": memory, "gpus": gpus, "rates": load_rates(found.identity)}))


def _plan(geometry: Geometry, machine: Machine, given: Given) -> Plan:
    fixed = given.context_of(given.arguments, geometry.max_context, given.reserve)
    budget = number_of(given.arguments, BATCHED)
    chunks = (budget,) if budget else DEVICE_CHUNKS if machine.gpus else (Wanted.chunk,)
    hardware = hardware_of(machine, geometry.record)
    wanted = Wanted(
        context=fixed or min(CONTEXT, geometry.max_context),
        dram_records=amount_of(given.dram_records, "--dram-records", geometry.experts),
        slots=amount_of(given.slots, "--slots", geometry.experts) if machine.gpus else None,
    )
    each = [replace(wanted, chunk=chunk) for chunk in chunks]
    wanted = next((one for one in each if not place(geometry, hardware, one).problems), each[0])
    corrections = calibration.load_kept(machine.identity, engine_named(None, hardware).name)
    return make_plan(Question(geometry, machine, wanted, calibration=corrections))
