"""What no measurement can be, whatever its hashes say: time that runs backwards, more tokens than were asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import datetime

from moetier.bench.probes.base import Probe, Raw, undisturbed
from moetier.bench.result import Result, Section
from moetier.bench.samples import Stream, Trial

CLOCK = 2e-3
"""Seconds that two readings of one clock may seem apart: a timer wakes a little early, times are rounded."""
COARSE = 2.0
"""Seconds between clocks of different kinds, and for what is rounded to whole ones."""


def impossible(result: Result) -> Iterator[str]:
    """What cannot have been measured in a result, one line each."""
    took = (_time(result.finished) - _time(result.started)).total_seconds()
    probed = sum(section.seconds for section in result.sections)
    if probed > took + COARSE:
        yield f"its probes took {probed:.0f} s of a run of {took:.0f} s"
    if any(seconds < 0 for seconds in result.served.start_seconds):
        yield "a start took less than no time"
    fell = [name for name, value in result.counters_after.items() if _fell(name, value, result.counters_before)]
    if fell:
        yield f"a counter fell from its beginning to its end: {fell[0]}"
    for section in result.sections:
        what = section.probe.probe
        yield from (f"{what}: {said}" for said in _of_section(section, result.suite.most_foreign_cpus))


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
        if answer.seconds < 0 or (answer.skipped and answer.correct):
            yield f"{answer.task} {answer.id}: answered in {answer.seconds:g} s, or right without an answer"
    for one in raw.footprints:
        if min(one.rss_mib, one.pss_mib or 0, one.gpu_mib or 0, one.handles, one.threads) < 0:
            yield "a footprint of less than nothing"
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
    if min(trial.seconds, trial.joules or 0, trial.foreign_cpus or 0, *trial.counters.values(), 0) < 0:
        yield "less than no time, no energy, no CPU or no count"
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
    if most is not None and made > most:
        yield f"{made} tokens, at most {most} were asked for"
    if (stream.cached_tokens or 0) > (stream.prompt_tokens or 0):
        yield f"{stream.cached_tokens} tokens of a prompt of {stream.prompt_tokens or 0} were cached"
