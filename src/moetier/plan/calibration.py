"""Corrections of a machine by a benchmark: factors on the costs of a prediction, with the evidence for each.

A measurement that differs from its prediction is laid to one cost: the one whose own uncertainty reaches furthest in
that metric, or the one that the user names. Its factor is found by halving, so that the prediction then meets the
measurement.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError

from moetier.errors import SettingsError
from moetier.files import read_small, write_durably
from moetier.folders import state_home
from moetier.plan.costs import Costs
from moetier.plan.geometry import Facts
from moetier.plan.predict import Case, metrics, ttft

LARGEST = 1 << 20
LARGEST_RESULT = 256 << 20
FARTHEST = 16.0
"""A cost that must be so many times another says that something else is wrong."""
MEASURED_SPREAD = 0.05
"""Spread of a cost after its correction: repeated runs of one benchmark differ by that much."""
_TTFT = re.compile(r"ttft_(\d{1,7})(k?)_s")

Factor = Annotated[float, Field(gt=1 / FARTHEST, lt=FARTHEST)]


class Evidence(Facts):
    """One measurement that was used."""

    metric: str
    measured: float = Field(gt=0, allow_inf_nan=False)
    predicted: float = Field(gt=0, allow_inf_nan=False)
    cost: str
    factor: Factor
    model: str
    workload: str
    settings: dict[str, int | str | None]
    source: str


class Calibration(Facts):
    """Corrections of one machine and engine."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

    schema_version: Annotated[Literal[1], Field(alias="schema")] = 1
    identity: str
    engine: str
    factors: dict[str, Factor]
    evidence: tuple[Evidence, ...]

    def apply(self, costs: Costs) -> Costs:
        """The corrected costs, which then are as sure as a measurement."""
        for name, factor in self.factors.items():
            sources = ", ".join(e.source for e in self.evidence if e.cost == name)
            costs = costs.scaled({name: factor}, f"calibrated by {factor:.3g} from {sources}", MEASURED_SPREAD)
        return costs


def predicted(case: Case, costs: Costs, metric: str) -> float:
    """A metric by name: those of `predict.metrics`, or ttft_14k_s of any length of prompt."""
    match = _TTFT.fullmatch(metric)
    if match is not None:
        tokens = int(match[1]) * (1024 if match[2] else 1)
        if not 0 < tokens <= case.geometry.max_context:
            raise SettingsError(f"{metric}: expected a prompt of 1 to {case.geometry.max_context} tokens")
        return ttft(case, costs, tokens)
    found = metrics(case, costs, case.placement.wanted.streams)
    if metric not in found:
        raise SettingsError(f"{metric!r} is no metric that is predicted; known: {', '.join(found)}, ttft_TOKENS_s")
    return found[metric]


def blame(case: Case, costs: Costs, metric: str) -> str:
    """The cost whose own spread moves the metric furthest; the skew is the workload's and not the machine's."""
    middle = predicted(case, costs, metric)

    def reach(name: str, spread: float) -> float:
        moved = (predicted(case, costs.scaled({name: f}), metric) for f in (1 + spread, 1 / (1 + spread)))
        return max(abs(math.log(value / middle)) for value in moved)

    ours = [(name, known) for name, known in costs.items() if name != "skew"]
    return max(ours, key=lambda item: reach(item[0], item[1].spread))[0]


def solve(case: Case, costs: Costs, metric: str, cost: str, measured: float) -> float:
    """The factor on `cost` that makes the prediction the measurement; SettingsError if none within reason does."""

    def off(log_factor: float) -> float:
        return math.log(predicted(case, costs.scaled({cost: math.exp(log_factor)}), metric) / measured)

    low, high = -math.log(FARTHEST) * 0.999, math.log(FARTHEST) * 0.999
    at_low, at_high = off(low), off(high)
    if at_low * at_high > 0:
        ends = sorted(measured * math.exp(end) for end in (at_low, at_high))
        raise SettingsError(
            f"{metric} was measured as {measured:g}; no {cost} from a {FARTHEST:g}th to {FARTHEST:g} times the known "
            f"one gives that, only {ends[0]:.3g} to {ends[1]:.3g}; name another with --blame, or check the settings"
        )
    for _ in range(60):
        middle = (low + high) / 2
        if off(middle) * at_low > 0:
            low = middle
        else:
            high = middle
    return math.exp((low + high) / 2)


def calibrate(
    case: Case,
    costs: Costs,
    identity: str,
    engine: str,
    measured: Mapping[str, float],
    source: str,
    to_blame: str | None = None,
    before: Calibration | None = None,
) -> Calibration:
    """Factors that bring predictions to what was measured; several measurements of one cost give their mean.

    costs: without `before`, whose factors start it and whose other costs stay.
    """
    factors = dict(before.factors) if before else {}
    evidence: list[Evidence] = []
    settings = _settings(case)
    for metric, value in measured.items():
        start = costs.scaled(factors)
        first = predicted(case, start, metric)
        cost = to_blame or blame(case, start, metric)
        whole = factors.get(cost, 1.0) * solve(case, start, metric, cost, value)
        evidence.append(
            Evidence(
                metric=metric,
                measured=value,
                predicted=first,
                cost=cost,
                factor=whole,
                model=case.geometry.name,
                workload=case.workload.name,
                settings=settings,
                source=source,
            )
        )
    kept = tuple(before.evidence) if before else ()
    for cost in {e.cost for e in evidence}:
        logs = [math.log(e.factor) for e in evidence if e.cost == cost]
        factors[cost] = math.exp(sum(logs) / len(logs))
    renewed = tuple(e for e in kept if e.cost not in {new.cost for new in evidence})
    return Calibration(identity=identity, engine=engine, factors=factors, evidence=(*renewed, *evidence))


def _settings(case: Case) -> dict[str, int | str | None]:
    p = case.placement
    return {
        "dram_records": p.dram_records,
        "slots": p.slots,
        "residents": p.residents,
        "context": p.wanted.context,
        "kv_format": p.kv_format,
        "tables": p.tables,
    }


def calibration_file(identity: str, engine: str) -> Path:
    """Where a machine's corrections are kept; SettingsError where there is no home to keep them in."""
    return state_home() / "moetier" / f"calibration-{identity}-{engine}.json"


def load_kept(identity: str, engine: str) -> Calibration | None:
    """A machine's corrections; None where none were kept. SettingsError as `load`."""
    try:
        path = calibration_file(identity, engine)
    except SettingsError:
        return None  # no home
    return load(path) if path.exists() else None


def load(path: Path) -> Calibration:
    """SettingsError for a file that is none, or of another version's costs."""
    try:
        found = Calibration.model_validate_json(read_small(path, LARGEST))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise SettingsError(
            f"{path}: expected corrections of `moetier calibrate`, found {first['msg']} at "
            f"{'.'.join(map(str, first['loc'])) or 'the start'}; remove it and calibrate again"
        ) from None
    unknown = sorted(found.factors.keys() - {known.name for known in fields(Costs)})
    if unknown:
        raise SettingsError(
            f"{path}: expected corrections of costs that this version has, found {', '.join(unknown)}; remove it and "
            "calibrate again"
        )
    return found


def save(calibration: Calibration, path: Path) -> None:
    """Replace the file, whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, calibration.model_dump_json(by_alias=True, indent=1).encode())
    except OSError as error:
        raise SettingsError(
            f"{path}: corrections cannot be kept ({error.strerror}); name another with --out"
        ) from error


def read_measured(path: Path, streams: int = 1) -> dict[str, float]:
    """Metrics of a result of `moetier bench run`, or of a plain object {"decode_tok_s": 114, ...}.

    streams: the level whose decode rate is that of all streams.
    """
    raw = read_small(path, LARGEST_RESULT)
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{path}: expected JSON, found {error}") from None
    if not isinstance(content, dict):
        raise SettingsError(f"{path}: expected an object of metrics, found {type(content).__name__}")
    named = dict(_of_cells(content, streams)) if "sections" in content else content
    found: dict[str, float] = {}
    for name, value in named.items():
        if name.endswith("_tok_s") or _TTFT.fullmatch(name) or name == "start_s":
            number = value.get("median", value.get("value")) if isinstance(value, dict) else value
            if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < 1e12:
                raise SettingsError(f"{path}: expected a positive number for {name}, found {reprlib.repr(value)}")
            found[name] = float(number)
    if not found:
        raise SettingsError(f"{path}: expected metrics such as decode_tok_s or ttft_2k_s, found none")
    return found


def _of_cells(result: dict[str, Any], streams: int) -> Iterator[tuple[str, float]]:
    """The cells of a benchmark's result that are predicted, those without a value left out."""
    names = {"decode.C1": "decode_tok_s", "boot.start": "start_s"}
    if streams > 1:
        names[f"decode.C{streams}"] = "decode_streams_tok_s"
    sections = result["sections"] if isinstance(result["sections"], list) else []
    lists = [result.get("boot"), *(section.get("cells") for section in sections if isinstance(section, dict))]
    for cell in (cell for cells in lists if isinstance(cells, list) for cell in cells):
        if not isinstance(cell, dict) or cell.get("value") is None:
            continue
        name = str(cell.get("name"))
        length = name.removeprefix("ttft.")
        if name in names:
            yield names[name], cell["value"]
        elif name.startswith("ttft.") and length.isdecimal() and len(length) <= 7:
            yield f"ttft_{length}_s", cell["value"]
