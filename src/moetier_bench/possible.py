"""Find what no measurement can be, whatever its hashes say: time that runs backwards, too many tokens."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from itertools import islice
from typing import Any

from moetier_bench.endpoint import growth
from moetier_bench.probes.base import Probe, Raw, undisturbed
from moetier_bench.result import Result, Section
from moetier_bench.samples import Stream, Trial

CLOCK = 2e-3
"""Seconds that two readings of one clock may seem apart: a timer wakes a little early, times are rounded."""
FEW = 3
"""Findings of a kind, as many are named."""
SPARE = 0.05
"""Part by which a figure may lie above its limit: clocks and counters are read one after the other."""
MOST_TOKENS_PER_S = 1e6
"""Tokens a second of one stream: a hundred times what the fastest accelerators make."""
PARTS = (
    ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
    ("vllm:prompt_tokens_cached_total", "vllm:prompt_tokens_total"),
    ("vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_draft_tokens_total"),
    ("moetier_hits_total", "moetier_pairs_total"),
    ("moetier_misses_total", "moetier_pairs_total"),
)
"""Counters of which the first counts a part of what the second counts."""
COARSE = 2.0
"""Seconds between clocks of different kinds, and for what is rounded to whole ones."""


def impossible(result: Result) -> Iterator[str]:
    """Yield what cannot have been measured in a result, one line each."""
    yield from (f"a number below zero, or none: {found}" for found in islice(_no_measurements(result), FEW))
    yield from _of_machine(result)
    took = (_time(result.finished) - _time(result.started)).total_seconds()
    probed = sum(section.seconds for section in result.sections)
    if took < 0:
        yield f"it ended {-took:.0f} s before it began"
    if (last := max(result.served.start_seconds, default=0.0)) > took + COARSE:
        yield f"a start took {last:.0f} s of a run of {took:.0f} s"
    if probed > took + COARSE:
        yield f"its probes took {probed:.0f} s of a run of {took:.0f} s"
    fell = [name for name, value in result.counters_after.items() if _fell(name, value, result.counters_before)]
    if fell:
        yield f"a counter fell from its beginning to its end: {fell[0]}"
    for section in result.sections:
        what = section.probe.probe
        yield from (f"{what}: {said}" for said in _of_section(section, result.suite.most_foreign_cpus))


def _no_measurements(result: Result) -> Iterator[str]:
    """Where a number that was measured is negative, not finite, or not to be told: each counts or times something."""
    measured: dict[str, Any] = {
        "served": result.served.model_dump(),
        "load": result.load.model_dump(),
        "counters before": result.counters_before,
        "counters after": result.counters_after,
    }
    for section in result.sections:
        measured[f"{section.probe.probe}: seconds"] = section.seconds
        measured[f"{section.probe.probe}: raw"] = section.raw.model_dump(exclude={"answers": {"__all__": {"answer"}}})
    yield from _below_zero("", measured)


def _below_zero(where: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for name, entry in value.items():
            yield from _below_zero(f"{where}.{name}" if where else name, entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _below_zero(where, entry)
    elif isinstance(value, int | float) and not 0 <= value < math.inf:
        yield f"{where} {value:g}"


def _of_machine(result: Result) -> Iterator[str]:
    """Yield what the machine does not have, and a server's own counts that contradict each other."""
    cpus, served = len(result.machine.cpu.allowed), result.served
    others = [trial.foreign_cpus or 0.0 for section in result.sections for trial in section.raw.trials]
    used = max(result.load.busiest or 0, result.load.others or 0, served.idle_cpus or 0, *others)
    if used > cpus * (1 + SPARE):
        yield f"{used:g} CPUs were used of {cpus}"
    shape = served.footprint
    if shape is not None and (shape.pss_mib or 0) > shape.rss_mib:
        yield f"{shape.pss_mib:g} MiB without what is shared, {shape.rss_mib:g} with it"
    if "all" in served.placed and max(served.placed.values()) > served.placed["all"]:
        yield f"more records in a tier than there are: {served.placed}"
    yield from _counts(growth(result.counters_before, result.counters_after))


def _counts(grown: dict[str, float]) -> Iterator[str]:
    for part, whole in PARTS:
        if part in grown and whole in grown and grown[part] > grown[whole]:
            yield f"{part} grew by {grown[part]:g}, of which it is a part, {whole}, by {grown[whole]:g}"


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def _fell(name: str, value: float, before: dict[str, float]) -> bool:
    return "_total" in name and value < before.get(name, 0.0)


def _of_section(section: Section, limit: float | None) -> Iterator[str]:
    raw, most = section.raw, section.probe.most_tokens
    trials = sum(trial.seconds for trial in raw.trials)
    if trials > section.seconds + COARSE:
        yield f"trials of {trials:.1f} s in {section.seconds:.1f} s"
    yield from _repeats(section.probe, raw, limit)
    for trial in raw.trials:
        yield from (f"a trial of {trial.label}: {said}" for said in _of_trial(trial, most))
    for answer in raw.answers:
        if answer.nats is None and not 0 <= answer.tokens <= (most or answer.tokens):
            yield f"{answer.task} {answer.id}: {answer.tokens} tokens, at most {most} were asked for"
        if answer.skipped and answer.correct:
            yield f"{answer.task} {answer.id}: right without an answer"
    if any(later.at < one.at for one, later in zip(raw.footprints, raw.footprints[1:], strict=False)):
        yield "a footprint was taken before the one before it"


def _repeats(probe: Probe, raw: Raw, limit: float | None) -> Iterator[str]:
    """Every label has as many trials as the probe repeats, and more only where others disturbed some."""
    expected = probe.trials_of(raw)
    every = Counter(trial.label for trial in raw.trials)
    calm = Counter(trial.label for trial in raw.trials if undisturbed(trial, limit))
    if expected is None:
        return
    for label in sorted(every.keys() | expected.keys()):
        wanted = expected.get(label, 0)
        if every[label] < wanted or calm[label] > wanted:
            yield f"{wanted} trials of {label or 'no label'} were to be measured, found {every[label]}"


def _of_trial(trial: Trial, most: int | None) -> Iterator[str]:
    yield from _counts(trial.counters)
    ends = max((stream.end for stream in trial.streams), default=0.0)
    if trial.seconds and ends > trial.seconds + CLOCK:
        yield f"a stream ended after {ends:g} s of {trial.seconds:g} s"
    for stream in trial.streams:
        yield from _of_stream(stream, most)


def _of_stream(stream: Stream, most: int | None) -> Iterator[str]:
    if not 0 <= stream.due <= stream.sent + CLOCK or stream.sent > stream.end + CLOCK:
        yield f"a stream due at {stream.due:g} s was sent at {stream.sent:g} s and ended at {stream.end:g} s"
    if any(gap < 0 for gap in stream.gaps_us) or sum(stream.gaps_us) / 1e6 > stream.end - stream.sent + CLOCK:
        yield "its tokens arrived before they were sent, or after its end"
    counts = (stream.prompt_tokens, stream.completion_tokens, stream.cached_tokens, *(stream.tokens or ()))
    if any(count is not None and count < 0 for count in counts) or 0 in (stream.tokens or ()):
        yield "it counts less than a token"
    if stream.tokens is not None and len(stream.tokens) != len(stream.gaps_us):
        yield f"{len(stream.gaps_us)} arrivals brought tokens {len(stream.tokens)} times"
    made = max(stream.completion_tokens or 0, sum(stream.tokens or ()))
    if made > MOST_TOKENS_PER_S * (stream.end - stream.sent + CLOCK):
        yield f"{made} tokens in {stream.end - stream.sent:g} s: more than anything makes"
    if most is not None and made > most:
        yield f"{made} tokens, at most {most} were asked for"
    if (stream.cached_tokens or 0) > (stream.prompt_tokens or 0):
        yield f"{stream.cached_tokens} tokens of a prompt of {stream.prompt_tokens or 0} were cached"
