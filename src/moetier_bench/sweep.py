"""A search over settings: one server start for each combination, each trial kept at once, nothing applied."""

from __future__ import annotations

import fcntl
import itertools
import json
import math
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from moetier_bench import BenchError
from moetier_bench.documents import Recipe, Suite, sha256_of
from moetier_bench.probes import AnyProbe
from moetier_bench.samples import Cell, Frozen

OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
PROBE_OF = {"ttft": "prefill", "spec": "coding"}
"""Probes whose cells begin with another word."""
BEGINS = b'{"key":"'
"""Every line of a state, also one that was cut off."""
Values = dict[str, Any]


@dataclass(frozen=True)
class Constraint:
    """A bound on a cell; a cell that is null or missing does not meet it."""

    cell: str
    sign: str
    bound: float

    @classmethod
    def parse(cls, text: str) -> Constraint:
        """Read NAME<NUMBER and the like."""
        match = re.fullmatch(r"([\w.]+)(<=|>=|<|>)([-+.\deE]+)", text.replace(" ", ""))
        try:
            if match is not None and math.isfinite(float(match[3])):
                return cls(match[1], match[2], float(match[3]))
        except ValueError:
            pass
        raise BenchError(f"constraint {text!r}: expected a cell, <, <=, > or >=, and a number, such as ttft.2048<3")

    def met(self, cells: Mapping[str, Cell]) -> bool:
        """Whether the cell is there and within the bound."""
        cell = cells.get(self.cell)
        return cell is not None and cell.value is not None and OPERATORS[self.sign](cell.value, self.bound)


class Trial(Frozen):
    """One combination and what it reached. key: hash of all that it depends on. failure: why it has no cells.

    others: CPUs that other processes used meanwhile, on average.
    """

    key: str
    values: Values
    cells: tuple[Cell, ...] = ()
    failure: str | None = None
    others: float | None = None

    @property
    def by_name(self) -> dict[str, Cell]:
        """Cells by name."""
        return {cell.name: cell for cell in self.cells}


Measured = tuple[tuple[Cell, ...], str | None, float | None]
"""Cells, failure and others of a trial."""


def parse_axis(text: str) -> tuple[str, list[Any]]:
    """A setting and its values: NAME=VALUE,VALUE; a value is JSON where it is, else text."""
    name, equals, values = text.partition("=")
    if not equals or not name or not values:
        raise BenchError(f"axis {text!r}: expected NAME=VALUE,VALUE..., such as dram_records=25%,50%,100%")
    return name, [value_of(value) for value in values.split(",")]


def value_of(text: str) -> Any:
    """JSON where it is, else text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def combinations(axes: Sequence[tuple[str, list[Any]]]) -> Iterator[Values]:
    """Every combination of the axes' values, the last axis fastest; BenchError for an axis given twice."""
    names = [name for name, _ in axes]
    if len(set(names)) != len(names):
        raise BenchError(f"an axis is given twice: {', '.join(names)}")
    for values in itertools.product(*(values for _, values in axes)):
        yield dict(zip(names, values, strict=True))


def with_values(recipe: Recipe, values: Values) -> Recipe:
    """The recipe with other settings; vllm:--FLAG names an argument of vLLM, which true makes a switch without a value
    and false leaves out. BenchError if a setting is unknown.
    """
    settings = {name: value for name, value in values.items() if not name.startswith("vllm:")}
    flags = {name.removeprefix("vllm:"): value for name, value in values.items() if name.startswith("vllm:")}
    words: list[str] = list(recipe.serve.vllm)
    for flag, value in flags.items():
        words = [*_without(words, flag), *(() if value is False else (flag,) if value is True else (flag, str(value)))]
    serve = recipe.serve.model_dump()
    serve |= {"settings": {**recipe.serve.settings, **settings}, "vllm": words}
    try:
        return Recipe.model_validate({**recipe.model_dump(), "serve": serve})
    except ValidationError as error:
        said = "; ".join(detail["msg"] for detail in error.errors(include_url=False, include_input=False))
        raise BenchError(f"{recipe.id} with {values}: {said}") from None


def _without(words: Sequence[str], flag: str) -> list[str]:
    """Words without a flag and its value, if it has one: the next word, unless that is a flag too."""
    kept: list[str] = []
    dropping = False
    for word in words:
        value, dropping = dropping and not re.match(r"--|-[a-zA-Z]", word), word == flag
        if not (value or dropping or word.startswith(f"{flag}=")):
            kept.append(word)
    return kept


def thinned(suite: Suite, wanted: Sequence[str]) -> Suite:
    """Only the probes that give the wanted cells, and of decode only their levels; BenchError names an unknown cell."""
    words = {name.split(".")[0] for name in wanted}
    probes: list[AnyProbe] = []
    for probe in suite.probes:
        if not words & {probe.probe, *(word for word, of in PROBE_OF.items() if of == probe.probe)}:
            continue
        if probe.probe == "decode":
            levels = tuple(n for n in probe.levels if any(name.split(".")[1:2] == [f"C{n}"] for name in wanted))
            probe = probe.model_copy(update={"levels": levels or probe.levels, "repeats": min(3, probe.repeats)})
        probes.append(probe)
    known = {PROBE_OF.get(word, word) for word in words} - {"boot", "tiers"}
    if missing := sorted(known - {probe.probe for probe in probes}):
        raise BenchError(f"suite {suite.id} has no probe for cells of {', '.join(missing)}")
    return suite.model_copy(update={"probes": tuple(probes), "starts": 1})


def sweep(
    trials: Sequence[tuple[Values, Recipe]],
    suite: Suite,
    state: Path,
    measure: Callable[[Recipe, Suite], Measured],
    bound_to: str,
    say: Callable[[str], None],
) -> list[Trial]:
    """Measure what `state` does not have yet; each trial is in that file before the next begins.

    bound_to: what else a trial depends on, such as the commit and the machine.
    """
    found = []
    with _held(state):
        done = {trial.key: trial for trial in read_state(state)}
        for number, (values, recipe) in enumerate(trials, 1):
            key = sha256_of([recipe.model_dump(mode="json"), suite.model_dump(mode="json"), bound_to])
            if key not in done:
                say(f"{number} of {len(trials)}: {values}")
                cells, failure, others = measure(recipe, suite)
                done[key] = Trial(key=key, values=values, cells=cells, failure=failure, others=others)
                _append(state, done[key].model_dump_json() + "\n")
            found.append(done[key])
    return found


@contextmanager
def _held(state: Path) -> Iterator[None]:
    """Before anything is measured: whether the file can be written, and that no other sweep is at it."""
    if state.exists() and not state.is_file():
        raise BenchError(f"{state} is no file; name another --state")
    try:
        with state.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
    except BlockingIOError:
        raise BenchError(f"another sweep is writing {state}; wait for it, or name another --state") from None
    except OSError as error:
        if error.filename != str(state):
            raise
        raise BenchError(f"{state} cannot be written: {error.strerror}; name another --state") from error


def _append(state: Path, line: str) -> None:
    try:
        with state.open("a") as file:
            file.write(line)
    except OSError as error:
        raise BenchError(f"{state} cannot be written: {error.strerror}; name another --state") from error


def read_state(state: Path) -> list[Trial]:
    """Trials of earlier runs; a last line that was cut off by a kill is left out, and removed.

    Only from what is a state of a sweep, and without writing the rest again: another file, or a full disk, loses none.
    """
    *lines, cut = state.read_bytes().split(b"\n")
    try:
        trials = [Trial.model_validate_json(line) for line in lines if line]
    except ValidationError as error:
        raise BenchError(f"{state} is no state of a sweep ({error.error_count()} errors); name another file") from None
    if cut and not (cut.startswith(BEGINS) or BEGINS.startswith(cut)):
        raise BenchError(f"{state} is no state of a sweep: found {cut[:40]!r} at its end; name another file")
    if cut:
        os.truncate(state, state.stat().st_size - len(cut))
    return trials


def ranked(trials: Sequence[Trial], objective: str, constraints: Sequence[Constraint]) -> list[Trial]:
    """Trials with a valid objective that meet every constraint, the best first."""

    def value(trial: Trial) -> float:
        cell = trial.by_name[objective]
        assert cell.value is not None
        return -cell.value if cell.better == "higher" else cell.value

    valid = [t for t in trials if (cell := t.by_name.get(objective)) is not None and cell.value is not None]
    return sorted((t for t in valid if all(c.met(t.by_name) for c in constraints)), key=value)


def not_told_apart(best: Sequence[Trial], objective: str) -> list[Trial]:
    """Trials behind the first whose samples of the objective reach into the first one's range."""
    ranges = [(cell.low or 0.0, cell.high or 0.0) for cell in (trial.by_name[objective] for trial in best)]
    return [
        trial
        for trial, (low, high) in zip(best[1:], ranges[1:], strict=True)
        if low <= ranges[0][1] and high >= ranges[0][0]
    ]
