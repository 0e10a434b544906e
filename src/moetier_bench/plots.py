"""Line plots of cells as SVG, the same bytes for the same figures."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from moetier_bench.breakdown import hit_point, steps_of, steps_plot
from moetier_bench.result import Result
from moetier_bench.roofline import BOTTOM, COLOURS, FONT, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axis, frame

Point = tuple[float, float, float, float]
"""x, y, and the low and high end of y."""


def by_number(result: Result, pattern: str) -> list[Point]:
    """Valid cells whose name matches a pattern with one number in it."""
    points = []
    for name, cell in result.cells.items():
        match = re.fullmatch(pattern, name)
        if match and cell.value is not None and cell.low is not None and cell.high is not None:
            points.append((float(match[1]), cell.value, cell.low, cell.high))
    return sorted(points)


def line_plot(title: str, x_label: str, y_label: str, series: Mapping[str, Sequence[Point]]) -> str | None:
    """A plot with both axes logarithmic, a line with its range for each series; None without a positive point."""
    drawn = {name: [p for p in points if min(p) > 0] for name, points in series.items()}
    drawn = {name: points for name, points in drawn.items() if points}
    if not drawn:
        return None
    every = [point for points in drawn.values() for point in points]
    x = Axis(min(p[0] for p in every) / 1.2, max(p[0] for p in every) * 1.2, LEFT, WIDTH - RIGHT)
    y = Axis(min(p[2] for p in every) / 1.3, max(p[3] for p in every) * 1.3, HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {FONT} role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="18" font-size="13">{escape(title)}</text>',
        *frame(x, y, sorted({p[0] for p in every}), x_label, y_label),
    ]
    at = float(LEFT)
    for index, (name, points) in enumerate(drawn.items()):
        colour = COLOURS[index % len(COLOURS)]
        parts += _line(points, x, y, colour)
        parts.append(f'<text x="{at:.0f}" y="38" fill="{colour}">{escape(name)}</text>')
        at += 7 * len(name) + 24
    return "\n".join([*parts, "</svg>\n"])


def _line(points: Sequence[Point], x: Axis, y: Axis, colour: str) -> Iterator[str]:
    path = "L".join(f"{x.at(a):.1f} {y.at(b):.1f}" for a, b, _, _ in points)
    yield f'<path d="M{path}" stroke="{colour}" stroke-width="1.5" fill="none"/>'
    for a, b, low, high in points:
        across = x.at(a)
        yield f'<path d="M{across:.1f} {y.at(low):.1f}V{y.at(high):.1f}" stroke="{colour}"/>'
        yield f'<circle cx="{across:.1f}" cy="{y.at(b):.1f}" r="3" fill="{colour}"/>'


PLOTS = (
    ("throughput", r"decode\.C(\d+)", "Sustained decode", "streams", "tokens a second"),
    ("ttft", r"ttft\.(\d+)", "Time to the first token of a cold prompt", "prompt tokens", "seconds"),
    ("growth", r"growth\.(\d+)", "Decode of one stream behind a context", "tokens of context", "tokens a second"),
)
"""Name of the file, cells, title, and the axes."""


def plots_of(results: Sequence[Result]) -> dict[str, str]:
    """SVG by name, of results that share a machine and a suite."""
    found = {}
    for name, pattern, title, x_label, y_label in PLOTS:
        series = {result.recipe.id: by_number(result, pattern) for result in results}
        where = f"{title}: {results[0].machine.summary}" if results else title
        svg = line_plot(where, x_label, y_label, series)
        if svg is not None:
            found[name] = svg
    if results:
        found |= _by_tier(results)
    return found


def _by_tier(results: Sequence[Result]) -> dict[str, str]:
    """Return what the tiers did: the parts of a step, and hits by how much is in the fastest tier."""
    summary = results[0].machine.summary
    steps = steps_plot(f"A mean decode step: {summary}", {r.recipe.id: steps_of(r) for r in results})
    points: dict[str, list[Point]] = {}
    for result in results:
        if (point := hit_point(result)) is not None:
            points.setdefault(result.recipe.model.name, []).append((*point, point[1], point[1]))
    # Where routing had no locality, as many would be found as are there.
    lines = {**{name: sorted(of) for name, of in points.items()}, "without locality": _diagonal(points)}
    labels = ("percent of the experts in the fastest tier", "percent found there")
    hits = line_plot(f"Experts found in the fastest tier: {summary}", *labels, lines) if points else None
    return {name: svg for name, svg in (("steps", steps), ("hits", hits)) if svg is not None}


def _diagonal(points: Mapping[str, Sequence[Point]]) -> list[Point]:
    ends = sorted({point[0] for of in points.values() for point in of} | {100.0})
    return [(share, share, share, share) for share in (ends[0], ends[-1])]
