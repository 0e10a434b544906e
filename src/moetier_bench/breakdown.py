"""Where a decode step's time goes and how often experts are where they are wanted, by the server's own counters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from moetier_bench.endpoint import growth
from moetier_bench.result import Result
from moetier_bench.roofline import BOTTOM, COLOURS, FONT, HEIGHT, LEFT, RIGHT, TOP, WIDTH
from moetier_bench.samples import Trial

STEPS = "vllm:iteration_tokens_total_count"
CALLS, KERNELS, WAITED = (f"moetier_{name}_total" for name in ("calls", "cpu_microseconds", "wait_microseconds"))
COMPUTED, WAITING_DISK, WAITING_CPU, REST = (
    "experts on the CPU",
    "waiting for the disk",
    "waiting for the CPU",
    "the rest",
)
PART_COLOURS = {COMPUTED: COLOURS[0], WAITING_DISK: COLOURS[1], WAITING_CPU: COLOURS[4], REST: "#bbb"}


@dataclass(frozen=True)
class Step:
    """The mean step of the decode trials of one level. parts: milliseconds by name, together the step."""

    level: int
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        """Milliseconds."""
        return math.fsum(self.parts.values())


def steps_of(result: Result) -> list[Step]:
    """By level; none where the server counts no layer calls, or counters contradict each other.

    Steps and seconds are of whole trials, prompts included. Our counters are read up to a second late, so that they
    enter as time a layer call, times the layers: the whole run's calls a step.
    """
    grown = growth(result.counters_before, result.counters_after)
    calls_a_step = grown.get(CALLS, 0.0) / grown[STEPS] if grown.get(STEPS) else 0.0
    layers = round(calls_a_step) if math.isfinite(calls_a_step) else 0
    decode = [section.raw.trials for section in result.sections if section.probe.probe == "decode"]
    levels: dict[int, list[Trial]] = {}
    for trial in decode[0] if decode and layers else ():
        levels.setdefault(len(trial.streams), []).append(trial)
    found = [
        _step(level, trials, layers, bool(result.recipe.serve.settings.get("slots")))
        for level, trials in levels.items()
    ]
    return [step for step in found if step is not None]


def _step(level: int, trials: Sequence[Trial], layers: int, hybrid: bool) -> Step | None:
    steps, calls, kernels, waited = (
        math.fsum(t.counters.get(name, 0.0) for t in trials) for name in (STEPS, CALLS, KERNELS, WAITED)
    )
    if not steps or not calls:
        return None
    whole = 1e3 * math.fsum(trial.seconds for trial in trials) / steps
    waits, computes = (1e-3 * micros * layers / calls for micros in (waited, kernels))
    # With device slots the CPU computes while the device does: only what the device waits for is the step's.
    parts = {WAITING_CPU: waits} if hybrid else {COMPUTED: computes, WAITING_DISK: waits}
    rest = whole - math.fsum(parts.values())
    return Step(level, {**parts, REST: rest}) if 0 <= rest < math.inf else None


def steps_plot(title: str, series: Mapping[str, Sequence[Step]]) -> str | None:
    """Stacked bars, those of one level side by side; None without a step."""
    drawn = {name: steps for name, steps in series.items() if steps}
    if not drawn:
        return None
    top = _round_up(max(step.total for steps in drawn.values() for step in steps))
    levels = sorted({step.level for steps in drawn.values() for step in steps})
    group = (WIDTH - RIGHT - LEFT) / len(levels)
    bar = 0.8 * group / len(drawn)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {FONT} role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="18" font-size="13">{escape(title)}</text>',
        *_legend(drawn),
        *_scale(top),
    ]
    for index, steps in enumerate(drawn.values()):
        for step in steps:
            left = LEFT + group * (levels.index(step.level) + 0.1) + bar * index
            parts += _bar(step, left, bar, top)
            middle = left + bar / 2
            parts.append(
                f'<text x="{middle:.1f}" y="{HEIGHT - BOTTOM + 14}" text-anchor="middle">{_letter(index)}</text>'
            )
    for index, level in enumerate(levels):
        at = LEFT + group * (index + 0.5)
        parts.append(f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 30}" text-anchor="middle">{level}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 10}" text-anchor="middle">streams</text>')
    return "\n".join([*parts, "</svg>\n"])


def _bar(step: Step, left: float, width: float, top: float) -> Iterator[str]:
    """From the bottom up."""
    base = 0.0
    for name, value in step.parts.items():
        low, high = _height(base, top), _height(base + value, top)
        box = f'x="{left:.1f}" y="{high:.1f}" width="{width - 2:.1f}" height="{low - high:.1f}"'
        yield f'<rect {box} fill="{PART_COLOURS[name]}"/>'
        base += value


def _legend(drawn: Mapping[str, Sequence[Step]]) -> Iterator[str]:
    """Which bar is which, and which colour."""
    names = ", ".join(f"{_letter(index)}: {name}" for index, name in enumerate(drawn))
    yield f'<text x="{LEFT}" y="32">{escape(names)}</text>'
    at = float(LEFT)
    used = dict.fromkeys(name for steps in drawn.values() for step in steps for name in step.parts)
    for name in used:
        yield f'<rect x="{at:.0f}" y="38" width="9" height="9" fill="{PART_COLOURS[name]}"/>'
        yield f'<text x="{at + 13:.0f}" y="46">{name}</text>'
        at += 7 * len(name) + 30


def _scale(top: float) -> Iterator[str]:
    """Lines at fifths, from zero."""
    for fifth in range(6):
        at = _height(top * fifth / 5, top)
        yield f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" stroke="#eee"/>'
        yield f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{top * fifth / 5:g}</text>'
    middle = (TOP + HEIGHT - BOTTOM) / 2
    turned = f'text-anchor="middle" transform="rotate(-90 16 {middle})"'
    yield f'<text x="16" y="{middle}" {turned}>milliseconds a step</text>'


def _height(value: float, top: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP - 6) * value / top


def _round_up(value: float) -> float:
    """The next 1, 2, 4, 5 or 8 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 4, 5, 8, 10) if step * power >= value)


def _letter(index: int) -> str:
    return chr(ord("a") + index % 26)


def hit_point(result: Result) -> tuple[float, float] | None:
    """Percent of the model's experts in the fastest tier, and percent of the experts wanted that were found there."""
    placed, share = result.served.placed, result.cells.get("tiers.hit_share")
    every = placed.get("all", 0)
    fast = placed.get("device slots", placed.get("DRAM", 0))
    if not every or not fast or share is None or share.value is None or share.value <= 0:
        return None
    return 100 * fast / every, 100 * share.value
