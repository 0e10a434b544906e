"""One run: refuse what cannot be valid, serve the recipe, probe it, write the result."""

from __future__ import annotations

import asyncio
import math
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp

from moetier.bench import BenchError, corpus
from moetier.bench.corpus import Prompts
from moetier.bench.documents import Library, MachineFile, Recipe, Suite, sha256_of
from moetier.bench.endpoint import connect
from moetier.bench.here import check_machine, machine_of, set_folders
from moetier.bench.meter import Meter
from moetier.bench.probes import AnyProbe
from moetier.bench.probes.base import Target
from moetier.bench.provenance import (
    Code,
    ModelFiles,
    code_of,
    load_average,
    machine_here,
    model_files,
    package_blobs,
    software,
    stated,
)
from moetier.bench.result import (
    Load,
    Result,
    Section,
    Served,
    cells_of,
    hashes_of,
    refuse_existing,
    require_space,
    tier_cells,
    write_result,
)
from moetier.bench.server import Place, checked_at_end, command, free_port, placed, serving
from moetier.bench.sweep import Measured
from moetier.eval import EvalError

IDLE_SECONDS = 3.0
COUNTED_SECONDS = 1.5
"""After so long, our counters in /metrics have what was counted."""
Say = Callable[[str], None]


@dataclass
class _Found:
    """What a run has gathered so far."""

    starts: list[float] = field(default_factory=list)
    served: Served | None = None
    sections: list[Section] = field(default_factory=list)
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)
    others: float | None = None
    failure: str | None = None


@dataclass(frozen=True)
class Run:
    """What is to be run, all of it checked. sets: folders of evaluation sets; within: seconds for the probes."""

    root: Path
    recipe: Recipe
    suite: Suite
    machine: MachineFile
    code: Code
    model: ModelFiles
    place: Place
    sets: tuple[Path, ...]
    origin: str = "run"
    within: float | None = None

    def measure(self, say: Say, extra: dict[str, Any] | None = None) -> Result:
        """Serve and probe; what fails on the way is in the result."""
        began, load, found = _now(), load_average(), _Found()
        probes = self.suite.probes_for(self.recipe)
        try:
            self._serve(probes, found, say)
        except (BenchError, EvalError, aiohttp.ClientError, OSError, TimeoutError) as error:
            found.failure = f"{type(error).__name__}: {error}"
        names = self.place.names(self.root)
        line = tuple(replaced(word, names) for word in command(self.recipe, self.place, self.suite.check_at_end))
        served = found.served or Served(command=line, env=self.recipe.serve.env, start_seconds=tuple(found.starts))
        foreign = [t.foreign_cpus for s in found.sections for t in s.raw.trials if t.foreign_cpus is not None]
        status = "ok" if found.failure is None else "partial" if found.sections else "failed"
        return Result.model_validate(
            {
                "origin": self.origin,
                "status": status,
                "failure": None if found.failure is None else replaced(found.failure, names),
                "started": began,
                "finished": _now(),
                "recipe": self.recipe,
                "suite": self.suite,
                "machine": self.machine,
                "hashes": hashes_of(self.recipe, self.suite, self.machine),
                "code": self.code,
                "software": software(),
                "model": self.model,
                "served": served.model_copy(update={"command": line}),
                "load": Load(
                    before=load, after=load_average(), busiest=max(foreign, default=None), others=found.others
                ),
                "corpus_sha256": corpus.sha256(),
                "counters_before": found.before,
                "counters_after": found.after,
                "boot": (*served.cells(), *tier_cells(found.before, found.after)),
                "sections": found.sections,
                "extra": extra or {},
            }
        ).sealed()

    def _serve(self, probes: tuple[AnyProbe, ...], found: _Found, say: Say) -> None:
        """Start as often as the suite asks; probe the last one."""
        for number in range(1, self.suite.starts + 1):
            say(f"{self.recipe.id}: starting the server ({number} of {self.suite.starts})")
            with serving(self.recipe, self.place, self.suite.check_at_end) as server:
                found.starts.append(round(server.seconds, 3))
                say(f"{self.recipe.id}: ready after {server.seconds:.1f} s")
                if number == self.suite.starts:
                    meter = Meter(server.process)
                    found.served = self._idle(meter, found)
                    mark = meter.mark()
                    asyncio.run(self._probe(server.url, meter, probes, found, say))
                    found.others = meter.foreign_cpus(mark)
        if self.suite.check_at_end and self.recipe.serve.engine == "moetier" and found.served is not None:
            self._ended(found.served, found)

    def _ended(self, served: Served, found: _Found) -> None:
        """The server is gone: what it said of its tables."""
        right = checked_at_end(self.recipe, self.place)
        if isinstance(right, str):
            found.failure = right
            right = replaced(right, self.place.names(self.root))
            found.served = served.model_copy(update={"wrong_at_end": right})
        else:
            found.served = served.model_copy(update={"right_at_end": right})

    def _idle(self, meter: Meter, found: _Found) -> Served:
        time.sleep(1.0)
        mark = meter.mark()
        time.sleep(IDLE_SECONDS)
        after = meter.mark()
        joules = meter.joules(mark)
        return Served(
            command=(),
            env=self.recipe.serve.env,
            start_seconds=tuple(found.starts),
            footprint=meter.footprint(),
            idle_cpus=round((after.own - mark.own) / (after.at - mark.at), 4),
            idle_watts=None if joules is None else round(joules / (after.at - mark.at), 2),
            energy_of=meter.energy_of,
            placed=placed(self.place),
        )

    async def _probe(self, url: str, meter: Meter, probes: tuple[AnyProbe, ...], found: _Found, say: Say) -> None:
        async with connect(url, None, self.place.model.name) as endpoint:
            deadline = math.inf if self.within is None else time.monotonic() + self.within
            target = Target(endpoint, Prompts(endpoint), meter, url, sets=self.sets, deadline=deadline)
            found.before = await endpoint.counters()
            for probe in probes:
                if time.monotonic() > deadline:
                    found.failure = f"the {self.within:g} s that the probes were given were over before {probe.probe}"
                    break
                say(f"{self.recipe.id}: {probe.probe}")
                began = time.monotonic()
                raw = await probe.measure(target)
                cells = cells_of(probe, raw, self.suite.most_foreign_cpus)
                seconds = round(time.monotonic() - began, 1)
                found.sections.append(Section(probe=probe, raw=raw, cells=cells, seconds=seconds))
                shown = [f"{cell.name} {cell.value:g}" for cell in cells if cell.value is not None]
                say(f"  {', '.join(shown) or 'no valid cell'} ({seconds:.0f} s)")
            await asyncio.sleep(COUNTED_SECONDS)
            found.after = await endpoint.counters()


def run_recipe(
    library: Library,
    recipe: Recipe,
    suite: Suite,
    out: Path,
    say: Say,
    *,
    machine: str | None = None,
    model: Path | None = None,
    store: Path | None = None,
    allow_dirty: bool = False,
    commit: str | None = None,
    within: float | None = None,
) -> tuple[Path, Result]:
    """Run a recipe and write its result below `out`; BenchError for what cannot become a valid result.

    commit: of a copy without git. within: seconds, from when the server is ready, after which no
    further probe begins: what a start takes differs too much from one to the next to decide what is measured.
    """
    if recipe.status == "plan":
        raise BenchError(f"{recipe.id} is a plan: pin its revision, name its identity and set its status to run first")
    code = _code(library.root, commit)
    named = library.machine(machine) if machine else machine_of(library)
    check_machine(recipe, named)
    if (code.commit is None or code.changed) and not allow_dirty:
        differs = ", ".join(code.changed[:5]) or "moetier is not installed from this checkout"
        raise BenchError(f"a result is bound to a commit, and this tree is not clean: {differs}; or use --allow-dirty")
    if code.changed and out.resolve() == (library.root / "results").resolve():
        raise BenchError("a result of a changed tree does not go to results/; name another folder with --out")
    folder = model or library.model_folder(recipe.model)
    with tempfile.TemporaryDirectory(prefix="moetier-bench-") as scratch:
        place = Place(
            folder.resolve(),
            (store or library.root / "stores" / recipe.model.name).resolve(),
            Path(scratch).resolve(),
            free_port(),
        )
        files = model_files(folder)
        if recipe.model.identity not in (None, files.identity):
            raise BenchError(f"{recipe.id}: expected the checkpoint {recipe.model.identity}, found {files.identity}")
        run = Run(library.root, recipe, suite, named, code, files, place, set_folders(library.root), within=within)
        probe_name = f"{named.id}/{recipe.id.replace('/', '__')}__{suite.id}__{(code.commit or '')[:12]}.json"
        refuse_existing(out, probe_name)
        require_space(out)
        result = run.measure(say)
    return write_result(out, result), result


def _code(root: Path, commit: str | None) -> Code:
    """As git says, or where there is none as was stated."""
    code = code_of(root)
    if commit is None:
        return code
    if not re.fullmatch(r"[0-9a-f]{40}", commit):
        raise BenchError(f"--commit {commit!r}: expected the 40 digits of `git rev-parse HEAD`")
    if code.commit is not None:
        raise BenchError(f"--commit is for a copy without git; this is a checkout of {code.commit[:12]}")
    return stated(commit)


def measure_cells(
    library: Library, say: Say, model: Path | None, store: Path | None
) -> tuple[Callable[[Recipe, Suite], Measured], str]:
    """How a sweep measures a recipe here, and what its figures depend on besides: code, packages and machine."""
    here = MachineFile.model_validate(machine_here("here", "the machine of the sweep"))
    code, installed = code_of(library.root), software()

    def measure(recipe: Recipe, suite: Suite) -> Measured:
        folder = model or library.model_folder(recipe.model)
        with tempfile.TemporaryDirectory(prefix="moetier-sweep-") as scratch:
            where = (store or library.root / "stores" / recipe.model.name).resolve()
            place = Place(folder.resolve(), where, Path(scratch).resolve(), free_port())
            files = model_files(folder)
            sets = set_folders(library.root)
            result = Run(library.root, recipe, suite, here, code, files, place, sets).measure(say)
        return tuple(result.cells.values()), result.failure, result.load.others

    return measure, sha256_of([package_blobs(), installed.model_dump(mode="json"), here.identity])


def replaced(text: str, names: Mapping[str, str]) -> str:
    """A text without the folders of this machine."""
    for path, name in names.items():
        text = text.replace(path, name)
    return text


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
