"""A picture of a plan: what lies on each device, on the host and on disk, and what a step's time goes to."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from moetier.budget import GIB
from moetier.plan.planner import Plan
from moetier.plan.predict import chunk_parts, decode_parts, draft_parts
from moetier.plan.report import number

WIDTH, LEFT, RIGHT, BAR, GAP = 900, 130, 130, 22, 54
FONT = 'font-family="sans-serif" font-size="11"'
COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf")


def plan_svg(plan: Plan) -> str:
    """The picture as one SVG document."""
    p, rows = plan.placement, list[tuple[str, dict[str, float], float, str]]()
    if plan.hardware.gpus:
        name = f"each of {p.ranks} devices" if p.ranks > 1 else "device"
        rows.append((name, _gib(p.device), p.device_limit / GIB, "GiB"))
    rows.append(("host", _gib(p.host), p.host_limit / GIB, "GiB"))
    rows.append(("disk", _gib(p.disk), sum(p.disk.values()) / GIB, "GiB"))
    case, costs = plan.case, plan.costs
    step = decode_parts(case, costs) if case.draft is None else draft_parts(case, costs, 1, case.draft)
    rows.append(("decode step", {name: 1e3 * value for name, value in step.items()}, 1e3 * sum(step.values()), "ms"))
    chunk = chunk_parts(case, costs, p.wanted.chunk)
    rows += [
        (f"prompt: {name}", {name: 1e3 * value}, 1e3 * max(chunk.values()), "ms")
        for name, value in chunk.items()
        if value
    ]
    height = 60 + GAP * len(rows) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" {FONT}>',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{escape(_title(plan))}</text>',
        f'<text x="{LEFT}" y="38">{escape(_speed(plan))}</text>',
    ]
    for index, (name, sizes, limit, unit) in enumerate(rows):
        parts += _bar(56 + GAP * index, name, sizes, limit, unit)
    return "\n".join([*parts, "</svg>\n"])


def _title(plan: Plan) -> str:
    machine = f"{plan.hardware.gpus} x {plan.hardware.gpu_name}" if plan.hardware.gpus else "no GPU"
    return f"{plan.question.geometry.name} on {machine}, {plan.hardware.ram_bytes / GIB:.0f} GiB of RAM"


def _speed(plan: Plan) -> str:
    value, low, high = plan.metrics["decode_tok_s"]
    return (
        f"{number(value)} tokens/s ({number(low)} to {number(high)}), workload {plan.case.workload.name}; "
        f"{plan.placement.slots} slots and {plan.placement.dram_records} records in DRAM "
        f"of {plan.question.geometry.experts} experts of a layer"
    )


def _gib(parts: dict[str, int]) -> dict[str, float]:
    return {name: size / GIB for name, size in parts.items()}


def _bar(top: float, name: str, sizes: dict[str, float], limit: float, unit: str) -> Iterator[str]:
    """Parts side by side on a line that is `limit` long, or as long as they are where that is more."""
    whole = max(limit, sum(sizes.values())) or 1.0
    scale, x, legend = (WIDTH - LEFT - RIGHT) / whole, float(LEFT), list[str]()
    yield f'<text x="{LEFT - 8}" y="{top + 15}" text-anchor="end">{escape(name)}</text>'
    yield f'<rect x="{LEFT}" y="{top}" width="{limit * scale:.1f}" height="{BAR}" fill="#f2f2f2" stroke="#999"/>'
    for index, (part, size) in enumerate(sizes.items()):
        width, colour = size * scale, COLOURS[index % len(COLOURS)]
        if width >= 0.05:
            yield f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>'
            legend.append(f'<tspan fill="{colour}" dx="8">{escape(part)} {number(size)}</tspan>')
        x += width
    yield f'<text x="{LEFT - 8}" y="{top + BAR + 13}" font-size="10">{"".join(legend)}</text>'
    yield f'<text x="{WIDTH - RIGHT + 8}" y="{top + 15}">{number(sum(sizes.values()))} of {number(limit)} {unit}</text>'
