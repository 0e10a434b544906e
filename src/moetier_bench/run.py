"""One run: serve the recipe, probe it with each suite, say all that is known of it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp

from moetier_bench import BenchError, corpus
from moetier_bench.corpus import Prompts
from moetier_bench.documents import MachineFile, Recipe, Suite
from moetier_bench.endpoint import connect
from moetier_bench.eval import EvalError
from moetier_bench.meter import Meter
from moetier_bench.probes.base import Calm, Target
from moetier_bench.provenance import Code, ModelFiles, load_average, software
from moetier_bench.result import Load, Result, Section, Served, cells_of, hashes_of, tier_cells
from moetier_bench.server import Place, checked_at_end, command, placed, serving
from moetier_bench.server import Served as Started

IDLE_SECONDS = 3.0
COUNTED_SECONDS = 1.5
"""After so long, our counters in /metrics have what was counted."""
INTERRUPTED = "it was interrupted"
FAILS = (BenchError, EvalError, aiohttp.ClientError, OSError, TimeoutError)
"""Exceptions of a server's failure."""
Say = Callable[[str], None]


@dataclass
class _Boot:
    """The starts of a run's server, and what it was when it stood idle."""

    starts: list[float] = field(default_factory=list)
    served: Served | None = None


@dataclass
class _Found:
    """Gathered results of a suite so far. broken: whether its probes did not end by themselves."""

    suite: Suite
    began: str = field(default_factory=lambda: _now())
    load: tuple[float, ...] = field(default_factory=load_average)
    sections: list[Section] = field(default_factory=list)
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)
    others: float | None = None
    failure: str | None = None
    broken: bool = False

    def fail(self, error: BaseException) -> None:
        """End here, and say why."""
        interrupted = isinstance(error, KeyboardInterrupt)
        self.failure = INTERRUPTED if interrupted else f"{type(error).__name__}: {error}"
        self.broken = True


@dataclass(frozen=True)
class Run:
    """A run, all of it checked. suites: one after the other, of one server; sets: folders of evaluation
    sets; within: seconds for the probes of all suites.
    """

    root: Path
    recipe: Recipe
    suites: tuple[Suite, ...]
    machine: MachineFile
    code: Code
    model: ModelFiles
    place: Place
    sets: tuple[Path, ...]
    origin: str = "run"
    within: float | None = None

    @property
    def check_at_end(self) -> bool:
        """Whether the server compares its tables and bytes when it ends."""
        return any(suite.check_at_end for suite in self.suites)

    def measure(self, say: Say, extra: dict[str, Any] | None = None) -> Result:
        """The result of a single suite."""
        (result,) = self.results(say, extra)
        return result

    def results(self, say: Say, extra: dict[str, Any] | None = None) -> Iterator[Result]:
        """Serve and probe: each suite's result as soon as it is whole. What fails on the way is in it; suites that were
        not begun have none, unless it is the first.
        """
        boot, waiting = _Boot(), []
        found: _Found | None = _Found(self.suites[0])  # what has no result yet
        try:
            with self._started(boot, say) as server:
                meter = Meter(server.process)
                boot.served = self._idle(meter, boot)
                ends = math.inf if self.within is None else time.monotonic() + self.within
                for suite in self.suites:
                    found = found or _Found(suite)
                    self._probe_all(server.url, meter, found, ends, say)
                    broken = found.broken
                    if suite.check_at_end and self.recipe.serve.engine == "moetier" and not broken:
                        waiting.append(found)
                    else:
                        yield self._result(found, boot, extra)
                    found = None
                    if broken:
                        break
        except (*FAILS, KeyboardInterrupt) as error:
            if found is not None:  # otherwise this is about the server's end
                found.fail(error)
                yield self._result(found, boot, extra)
        for ended in waiting:
            yield self._result(ended, self._ended(ended, boot), extra)

    def _result(self, found: _Found, boot: _Boot, extra: dict[str, Any] | None) -> Result:
        """All that is known of one suite."""
        names = self.place.names(self.root)
        line = tuple(replaced(word, names) for word in command(self.recipe, self.place, self.check_at_end))
        served = boot.served or Served(command=line, env=self.recipe.serve.env, start_seconds=tuple(boot.starts))
        foreign = [t.foreign_cpus for s in found.sections for t in s.raw.trials if t.foreign_cpus is not None]
        status = "ok" if found.failure is None else "partial" if found.sections else "failed"
        load = Load(before=found.load, after=load_average(), busiest=max(foreign, default=None), others=found.others)
        return Result.model_validate(
            {
                "origin": self.origin,
                "status": status,
                "failure": None if found.failure is None else replaced(found.failure, names),
                "started": found.began,
                "finished": _now(),
                "recipe": self.recipe,
                "suite": found.suite,
                "machine": self.machine,
                "hashes": hashes_of(self.recipe, found.suite, self.machine),
                "code": self.code,
                "software": software(),
                "model": self.model,
                "served": served.model_copy(update={"command": line}),
                "load": load,
                "corpus_sha256": corpus.sha256(),
                "counters_before": found.before,
                "counters_after": found.after,
                "boot": (*served.cells(), *tier_cells(found.before, found.after)),
                "sections": found.sections,
                "extra": extra or {},
            }
        ).sealed()

    @contextmanager
    def _started(self, boot: _Boot, say: Say) -> Iterator[Started]:
        """Start as often as the suites ask and the recipe lets; the last one is to be probed."""
        asked = max(suite.starts for suite in self.suites)
        most = min(asked, self.recipe.serve.most_starts or asked)
        while True:
            say(f"{self.recipe.id}: starting the server ({len(boot.starts) + 1} of {most})")
            with serving(self.recipe, self.place, self.check_at_end) as server:
                boot.starts.append(round(server.seconds, 3))
                say(f"{self.recipe.id}: ready after {server.seconds:.1f} s")
                if len(boot.starts) == most:
                    yield server
                    return

    def _probe_all(self, url: str, meter: Meter, found: _Found, ends: float, say: Say) -> None:
        """All probes of a suite, until one fails."""
        mark = meter.mark()
        try:
            asyncio.run(self._probe(url, meter, found, ends, say))
        except (*FAILS, KeyboardInterrupt) as error:
            found.fail(error)
        found.others = meter.foreign_cpus(mark)

    def _ended(self, found: _Found, boot: _Boot) -> _Boot:
        """The server is gone: what it said of its tables."""
        right = checked_at_end(self.recipe, self.place)
        if isinstance(right, str):
            found.failure = right
            said: dict[str, Any] = {"wrong_at_end": replaced(right, self.place.names(self.root))}
        else:
            said = {"right_at_end": right}
        assert boot.served is not None
        return _Boot(boot.starts, boot.served.model_copy(update=said))

    def _idle(self, meter: Meter, boot: _Boot) -> Served:
        time.sleep(1.0)
        mark = meter.mark()
        time.sleep(IDLE_SECONDS)
        after = meter.mark()
        joules = meter.joules(mark)
        return Served(
            command=(),
            env=self.recipe.serve.env,
            start_seconds=tuple(boot.starts),
            footprint=meter.footprint(),
            idle_cpus=round((after.own - mark.own) / (after.at - mark.at), 4),
            idle_watts=None if joules is None else round(joules / (after.at - mark.at), 2),
            energy_of=meter.energy_of,
            placed=placed(self.place),
        )

    async def _probe(self, url: str, meter: Meter, found: _Found, ends: float, say: Say) -> None:
        async with connect(url, None, self.place.model.name) as endpoint:
            suite = found.suite
            target = Target(endpoint, Prompts(endpoint), meter, url, sets=self.sets, deadline=ends)
            found.before = await endpoint.counters()
            for probe in suite.probes_for(self.recipe):
                if time.monotonic() > ends:
                    found.failure = f"the {self.within:g} s that the probes were given were over before {probe.probe}"
                    break
                say(f"{self.recipe.id}: {probe.probe}")
                began = time.monotonic()
                raw = await probe.measure(replace(target, calm=Calm(suite.most_foreign_cpus)))
                cells = cells_of(probe, raw, suite.most_foreign_cpus)
                seconds = round(time.monotonic() - began, 1)
                found.sections.append(Section(probe=probe, raw=raw, cells=cells, seconds=seconds))
                shown = [f"{cell.name} {cell.value:g}" for cell in cells if cell.value is not None]
                empty: dict[str | None, list[str]] = {}
                for cell in cells:
                    if cell.value is None:
                        empty.setdefault(cell.reason, []).append(cell.name)
                unfit = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in empty.items())
                say(f"  {', '.join(shown) or 'no valid cell'} ({seconds:.0f} s)")
                say(f"  not valid: {unfit}" if empty else "  all cells valid")
            await asyncio.sleep(COUNTED_SECONDS)
            found.after = await endpoint.counters()


def replaced(text: str, names: Mapping[str, str]) -> str:
    """A text without the folders of this machine."""
    for path, name in names.items():
        text = text.replace(path, name)
    return text


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
