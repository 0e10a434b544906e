"""A roofline picture of `bench_kernel`'s result: what was reached, under what memory and arithmetic allow."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape
from typing import Any

WIDTH, HEIGHT = 720, 440
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 50, 60
FONT = 'font-family="sans-serif" font-size="11"'
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b")


@dataclass(frozen=True)
class Axis:
    """A logarithmic axis from `low` to `high` over the pixels `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> Iterator[float]:
        """1, 2 and 5 times powers of ten within the axis."""
        for exponent in range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1):
            yield from (tick for step in (1, 2, 5) if self.low <= (tick := step * 10.0**exponent) <= self.high)


def roofline_svg(result: dict[str, Any]) -> str:
    """Draw the rows of a result: operations a byte against operations a second, one colour per kernel set and threads.

    The roof of a colour is the largest read rate and peak among its rows.
    """
    series: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in result["rows"]:
        series.setdefault((row["isa"], row["threads"]), []).append(row)
    intensities = [row["gops"] / row["gbps"] for row in result["rows"]]
    speeds = [row["gops"] for row in result["rows"]] + [row["peak_gops"] for row in result["rows"]]
    x = Axis(min(intensities) / 1.5, max(intensities) * 1.5, LEFT, WIDTH - RIGHT)
    y = Axis(min(speeds) / 2, max(speeds) * 1.5, HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {FONT}>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="18" font-size="13">{escape(_title(result))}</text>',
        *frame(x, y, x.ticks(), "operations a byte of expert weights", "operations a second, 1e9"),
    ]
    for index, ((isa, threads), rows) in enumerate(series.items()):
        colour = COLOURS[index % len(COLOURS)]
        parts += _roof(rows, x, y, colour)
        parts += _points(rows, x, y, colour)
        label = escape(f"{isa}, {threads} thread{'s' if threads > 1 else ''}")
        parts.append(f'<text x="{LEFT + 150 * index}" y="38" fill="{colour}">{label}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _title(result: dict[str, Any]) -> str:
    shape = result["shape"]
    size = f"hidden {shape['hidden']}, intermediate {shape['intermediate']}, {shape['experts']} experts"
    return f"One layer call, {size}, top-{shape['top_k']}: {result['machine']['cpu']}"


def frame(x: Axis, y: Axis, marks: Iterable[float], x_label: str, y_label: str) -> Iterator[str]:
    """Axes with a line at each of `marks` on x and at 1, 2, 5 of each decade on y."""
    for mark in marks:
        at = x.at(mark)
        yield f'<path d="M{at:.1f} {y.start}V{y.end}" stroke="#eee"/>'
        yield f'<text x="{at:.1f}" y="{y.start + 16}" text-anchor="middle">{mark:g}</text>'
    for tick in y.ticks():
        at = y.at(tick)
        yield f'<path d="M{x.start} {at:.1f}H{x.end}" stroke="#eee"/>'
        yield f'<text x="{x.start - 6}" y="{at + 4:.1f}" text-anchor="end">{tick:g}</text>'
    yield f'<path d="M{x.start} {y.end}V{y.start}H{x.end}" stroke="black" fill="none"/>'
    yield f'<text x="{(x.start + x.end) / 2}" y="{HEIGHT - 16}" text-anchor="middle">{escape(x_label)}</text>'
    middle = (y.start + y.end) / 2
    turned = f'text-anchor="middle" transform="rotate(-90 16 {middle})"'
    yield f'<text x="16" y="{middle}" {turned}>{escape(y_label)}</text>'


def _roof(rows: list[dict[str, Any]], x: Axis, y: Axis, colour: str) -> Iterator[str]:
    """Memory's slope up to the ridge, arithmetic's ceiling after it."""
    read, peak = max(row["read_gbps"] for row in rows), max(row["peak_gops"] for row in rows)
    ridge = min(max(peak / read, x.low), x.high)
    first = max(x.low, y.low / read)
    points = [(first, min(read * first, peak)), (ridge, min(read * ridge, peak)), (x.high, min(read * x.high, peak))]
    path = "L".join(f"{x.at(a):.1f} {y.at(b):.1f}" for a, b in points)
    yield f'<path d="M{path}" stroke="{colour}" fill="none" stroke-dasharray="5 3"/>'


def _points(rows: list[dict[str, Any]], x: Axis, y: Axis, colour: str) -> Iterator[str]:
    for row in rows:
        across, up = x.at(row["gops"] / row["gbps"]), y.at(row["gops"])
        yield f'<circle cx="{across:.1f}" cy="{up:.1f}" r="3.5" fill="{colour}"/>'
        yield f'<text x="{across + 6:.1f}" y="{up + 11:.1f}" fill="{colour}">M={row["M"]}</text>'
