"""One result as a single HTML file that needs nothing else: no script, no font, no network."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from moetier_bench.plots import plots_of
from moetier_bench.render import number, why_empty
from moetier_bench.result import Result, Section
from moetier_bench.samples import Cell

STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; }
th, td { padding: .25rem .6rem; text-align: left; vertical-align: top; }
th { border-bottom: 2px solid #888; } td { border-bottom: 1px solid #ddd; } td.n, th.n { text-align: right;
font-variant-numeric: tabular-nums; white-space: nowrap; } td.why { color: #8a3b00; } code { font-size: .9em;
overflow-wrap: anywhere; } .tiles { display: flex; flex-wrap: wrap; gap: 1rem; margin: 1rem 0; }
.tile { border: 1px solid #ccc; border-radius: .5rem; padding: .6rem 1rem; min-width: 8rem; }
.tile b { display: block; font-size: 1.5rem; } .bad { color: #b00020; } svg { max-width: 100%; height: auto; }
details { margin: .5rem 0; }
"""


def page(result: Result) -> str:
    """The whole page."""
    body = "\n".join(_body(result))
    title = escape(f"{result.recipe.id} on {result.machine.id}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>\n'
        f"<body>\n{body}\n</body></html>\n"
    )


def _body(result: Result) -> Iterator[str]:
    yield f"<h1>{escape(result.recipe.summary)}</h1>"
    kind = "" if result.status == "ok" else f' <b class="bad">{result.status}: {escape(result.failure or "")}</b>'
    yield (
        f"<p>{escape(result.machine.summary)}; suite {escape(result.suite.id)}; {escape(result.started)}; "
        f"commit {escape((result.code.commit or 'none')[:12])}{kind}</p>"
    )
    yield '<div class="tiles">'
    yield from (_tile(result.cells[name], label) for name, label in _headline(result))
    yield "</div>"
    for name, svg in plots_of([result]).items():
        yield f'<figure id="{escape(name)}">{svg}</figure>'
    yield "<h2>Start and footprint</h2>"
    yield from _cells(result.boot, result)
    for section in result.sections:
        yield from _section(section, result)
    yield from _about(result)


def _headline(result: Result) -> list[tuple[str, str]]:
    """The first, the last decode cell and the longest TTFT that are valid."""
    valid = [name for name, cell in result.cells.items() if cell.value is not None]
    decode = [name for name in valid if name.startswith("decode.C") and name.count(".") == 1]
    ttft = [name for name in valid if name.startswith("ttft.")]
    chosen = [(name, _streams(name.removeprefix("decode.C"))) for name in dict.fromkeys(decode[:1] + decode[-1:])]
    return chosen + [(name, f"TTFT, {name.removeprefix('ttft.')} tokens") for name in ttft[-1:]]


def _streams(number: str) -> str:
    return f"{number} stream{'' if number == '1' else 's'}"


def _tile(cell: Cell, label: str) -> str:
    return f'<div class="tile"><b>{number(cell.value or 0)} {escape(cell.unit)}</b>{escape(label)}</div>'


def _cells(cells: tuple[Cell, ...], result: Result) -> Iterator[str]:
    numbers = "".join(f'<th class="n">{head}</th>' for head in ("median", "range", "samples"))
    yield f"<table><tr><th>cell</th>{numbers}<th>unit</th></tr>"
    for cell in cells:
        reason = why_empty(cell, result)
        if reason is not None or cell.value is None or cell.low is None or cell.high is None:
            why = f'<td class="why" colspan="4">none: {escape(reason or "")}</td>'
            yield f"<tr><td>{escape(cell.name)}</td>{why}</tr>"
            continue
        spread = f"{number(cell.low)} to {number(cell.high)}" if len(cell.samples) > 1 else ""
        yield (
            f'<tr><td>{escape(cell.name)}</td><td class="n">{number(cell.value)}</td><td class="n">{spread}</td>'
            f'<td class="n">{len(cell.samples)}</td><td>{escape(cell.unit)}</td></tr>'
        )
    yield "</table>"


def _section(section: Section, result: Result) -> Iterator[str]:
    yield f"<h2>{escape(section.probe.probe)}</h2>"
    options = ", ".join(f"{k} {v}" for k, v in section.probe.model_dump(mode="json").items() if k != "probe")
    yield f"<p>{escape(options)}; took {section.seconds:g} s</p>"
    yield from _cells(section.cells, result)
    busy = [trial.foreign_cpus for trial in section.raw.trials if trial.foreign_cpus is not None]
    if busy:
        yield f"<p>Others used {min(busy):.2f} to {max(busy):.2f} CPUs during its {len(busy)} trials.</p>"


def _about(result: Result) -> Iterator[str]:
    yield "<h2>What was run</h2><table>"
    rows = {
        "command": " ".join(result.served.command),
        "variables": " ".join(f"{name}={value}" for name, value in result.served.env.items()),
        "model": f"{result.recipe.model.name}, checkpoint {result.model.identity}",
        "machine": f"{result.machine.cpu.model}, {len(result.machine.cpu.allowed)} CPUs, "
        f"{result.machine.memory.limit_bytes / 2**30:.0f} GiB, "
        + (", ".join(gpu.name for gpu in result.machine.gpus) or "no GPU"),
        "load": f"{result.load.before} before, {result.load.after} after",
        "packages": ", ".join(f"{name} {version}" for name, version in result.software.packages.items()),
        "seal": result.sha256,
    }
    for name, value in rows.items():
        yield f"<tr><td>{escape(name)}</td><td><code>{escape(value)}</code></td></tr>"
    yield "</table>"
