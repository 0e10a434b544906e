"""A result: one file per recipe, suite, machine and commit, written once, never again, and able to prove itself."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from moetier.errors import StoreError
from moetier.files import read_small, sync_folder
from moetier_bench import BenchError
from moetier_bench.documents import MachineFile, Recipe, Suite, digest, sha256_of
from moetier_bench.endpoint import growth
from moetier_bench.meter import Footprint
from moetier_bench.probes import AnyProbe
from moetier_bench.probes.base import Raw, undisturbed
from moetier_bench.provenance import Code, ModelFiles, Software
from moetier_bench.samples import NO_SAMPLE, Cell, Frozen, figure

LARGEST = 256 << 20
SUMS = "SHA256SUMS"
SPACE = 64 << 20
"""Bytes that must be free before a run: more than a result takes."""


class Served(Frozen):
    """How the server was started: the command (folders by name), the recipe's variables, seconds of every start."""

    command: tuple[str, ...]
    env: dict[str, str] = Field(default_factory=dict)
    start_seconds: tuple[float, ...] = ()
    footprint: Footprint | None = None
    idle_cpus: float | None = None
    """CPUs that the idle server used."""
    idle_watts: float | None = None
    energy_of: tuple[str, ...] = ()
    """Name of what joules count."""
    placed: dict[str, int] = Field(default_factory=dict)
    """Records by the tier that they were in when it was ready; all: of the model."""
    right_at_end: int | None = None
    """Records whose bytes were right when it ended, its tables agreeing; for suites that ask."""
    wrong_at_end: str | None = None

    def cells(self) -> list[Cell]:
        """Start, footprint, idling."""
        reason = None if self.footprint is not None else "the server was not ours, or never ready"
        shape = self.footprint or Footprint(at=0, rss_mib=0)
        no_pss = None if shape.pss_mib is not None else "shared pages could not be read"
        no_gpu = None if shape.gpu_mib is not None else "no device whose memory can be read"
        no_watts = None if self.idle_watts is not None else "no energy counter can be read"
        starts = self.start_seconds
        return [
            figure("boot.start", "s", "lower", starts, None if starts else "never ready"),
            figure("boot.pss", "MiB", "lower", [shape.pss_mib or 0], reason or no_pss),
            figure("boot.gpu", "MiB", "lower", [shape.gpu_mib or 0], reason or no_gpu),
            figure("boot.idle_cpus", "CPUs", "lower", [self.idle_cpus or 0], reason),
            figure("boot.idle_power", "W", "lower", [self.idle_watts or 0], reason or no_watts),
            *self._end(),
        ]

    def _end(self) -> list[Cell]:
        if self.right_at_end is None and self.wrong_at_end is None:
            return []
        return [figure("end.records_right", "records", None, [self.right_at_end or 0], self.wrong_at_end)]


def tier_cells(before: dict[str, float], after: dict[str, float]) -> list[Cell]:
    """Over the whole run, by the server's own counters: experts in the fastest tier, records read from disk."""
    grown = growth(before, after)
    hits, misses = grown.get("moetier_hits_total", 0.0), grown.get("moetier_misses_total", 0.0)
    disk, tokens = grown.get("moetier_store_reads_total", 0.0), grown.get("vllm:generation_tokens_total", 0.0)
    reason = None if hits + misses else "the server counts no hits and misses"
    share = [hits / (hits + misses)] if hits + misses else []
    no_tokens = None if tokens else "the server counted no token"
    return [
        figure("tiers.hit_share", "share", "higher", share, reason),
        figure("tiers.disk_reads", "records/token", "lower", [disk / (tokens or 1)], reason or no_tokens),
    ]


class Section(Frozen):
    """One probe: its parameters, all it measured, and the cells that follow from that."""

    probe: AnyProbe
    raw: Raw
    cells: tuple[Cell, ...]
    seconds: float


class Load(Frozen):
    """Load averages of the machine, before and after. busiest: the most CPUs that others used during a trial; others:
    how many they used on average, from the server's being ready to the end of the probes.
    """

    before: tuple[float, ...]
    after: tuple[float, ...] = ()
    busiest: float | None = None
    others: float | None = None


class Result(Frozen):
    """Everything. status partial: a probe failed; failed: the server did not come up, or died."""

    format: Literal[1] = 1
    origin: Literal["run", "prove"] = "run"
    status: Literal["ok", "partial", "failed"]
    failure: str | None = None
    started: str = Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")
    finished: str
    recipe: Recipe
    suite: Suite
    machine: MachineFile
    hashes: dict[str, str]
    code: Code
    software: Software
    model: ModelFiles
    served: Served
    load: Load
    corpus_sha256: str
    counters_before: dict[str, float] = Field(default_factory=dict)
    counters_after: dict[str, float] = Field(default_factory=dict)
    boot: tuple[Cell, ...] = ()
    sections: tuple[Section, ...] = ()
    extra: dict[str, Any] = Field(default_factory=dict)
    """Findings of the identity check of `moetier prove`."""
    sha256: str = ""

    @property
    def cells(self) -> dict[str, Cell]:
        """All, by name."""
        return {cell.name: cell for cell in (*self.boot, *(cell for s in self.sections for cell in s.cells))}

    @property
    def name(self) -> str:
        """Where it lies below results/."""
        failed = f"__failed-{self.started.replace(':', '')}" if self.status == "failed" else ""
        return name_of(self.machine, self.recipe, self.suite, self.code, failed)

    def sealed(self) -> Result:
        """With the hash of all the rest."""
        return self.model_copy(update={"sha256": self.own_hash()})

    def own_hash(self) -> str:
        """SHA-256 of everything but the hash."""
        return sha256_of(self.model_dump(mode="json", exclude={"sha256"}))


def name_of(machine: MachineFile, recipe: Recipe, suite: Suite, code: Code, failed: str = "") -> str:
    """Where a result of these lies below results/."""
    commit = (code.commit or f"v{code.version}")[:12]
    return f"{machine.id}/{recipe.id.replace('/', '__')}__{suite.id}__{commit}{failed}.json"


def hashes_of(recipe: Recipe, suite: Suite, machine: MachineFile) -> dict[str, str]:
    """Hashes of the documents of a run."""
    return {"recipe": digest(recipe), "suite": digest(suite), "machine": digest(machine)}


def cells_of(probe: AnyProbe, raw: Raw, most_foreign_cpus: float | None) -> tuple[Cell, ...]:
    """A probe's cells from the trials during which others left the machine alone (None: from all)."""
    calm = tuple(trial for trial in raw.trials if undisturbed(trial, most_foreign_cpus))
    cells = probe.cells(raw.model_copy(update={"trials": calm}))
    if len(calm) == len(raw.trials):
        return tuple(cells)
    disturbed = f"other processes used more than {most_foreign_cpus:g} CPUs in every trial"
    return tuple(c.model_copy(update={"reason": disturbed}) if c.reason == NO_SAMPLE else c for c in cells)


def read_data(path: Path) -> bytes:
    """The bytes of a result's file; BenchError if they cannot be had."""
    try:
        return read_small(path, LARGEST)
    except (StoreError, OSError) as error:
        raise BenchError(f"{path} cannot be read: {error}") from None


def parse_result(data: bytes, where: str) -> Result:
    """The result that these bytes are; BenchError if they are none."""
    try:
        return Result.model_validate_json(data)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, found["loc"])) + (": " if found["loc"] else "")
        raise BenchError(f"{where}: expected a result of `moetier bench run`, found {place}{found['msg']}") from None


def to_text(result: Result) -> str:
    """JSON with a line for each trial and each answer, so that a difference of two files can be read."""
    return _pretty(result.model_dump(mode="json", exclude_defaults=False), 0) + "\n"


def _pretty(value: Any, depth: int) -> str:
    """Indented down to the trials, compact below."""
    pad, end = " " * (depth + 1), " " * depth
    if depth < 5 and isinstance(value, dict) and value:
        inner = ",\n".join(f"{pad}{json.dumps(k)}: {_pretty(v, depth + 1)}" for k, v in value.items())
        return f"{{\n{inner}\n{end}}}"
    if depth < 5 and isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(pad + _pretty(entry, depth + 1) for entry in value) + f"\n{end}]"
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def refuse_existing(folder: Path, name: str) -> None:
    """BenchError where a result of that name is already there."""
    if (folder / name).exists():
        raise BenchError(f"{folder / name} is there already, and a result is never overwritten: commit a change first")


def write_result(folder: Path, result: Result, name: str | None = None, data: bytes | None = None) -> Path:
    """Write below `folder` and list the file in SHA256SUMS; never replaces one. Killed in between, no half a file.

    data: the bytes of a file that is kept as it came.
    """
    path = folder / (name or result.name)
    data = data or to_text(result.sealed()).encode()
    try:
        _write(folder, path, data)
    except OSError as error:
        raise BenchError(f"{path} cannot be written: {error.strerror}; this result is lost") from error
    return path


def require_space(folder: Path) -> None:
    """BenchError where a result could not be written: better before a run than after it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise BenchError(f"{folder} cannot be made: {error.strerror}; name another with --out") from error
    if free < SPACE or not os.access(folder, os.W_OK):
        raise BenchError(
            f"{folder}: expected {SPACE >> 20} MiB that can be written, found {free >> 20}; name another --out"
        )


def _write(folder: Path, path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        refuse_existing(folder, path.relative_to(folder).as_posix())
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", suffix=".tmp") as aside:
            aside.write(data)
            aside.flush()
            os.fsync(aside.fileno())
            Path(aside.name).chmod(0o644)
            os.link(aside.name, path)
        sync_folder(path.parent)
        try:
            _list(folder, path, hashlib.sha256(data).hexdigest())
        except OSError:
            path.unlink()  # what is not listed is no result, and would be in the way of the next
            raise


def _list(folder: Path, path: Path, checksum: str) -> None:
    """Add a line to SHA256SUMS: all of it or, with OSError, nothing."""
    line = f"{checksum}  {path.relative_to(folder).as_posix()}\n".encode()
    with (folder / SUMS).open("ab", buffering=0) as sums:
        before = sums.tell()
        try:
            if sums.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(sums.fileno())
        except OSError:
            sums.truncate(before)
            raise


def listed(folder: Path) -> dict[str, str]:
    """Names and hashes of SHA256SUMS; BenchError for a line that is none, or a name that occurs twice."""
    found: dict[str, str] = {}
    with contextlib.suppress(FileNotFoundError):
        for number, line in enumerate((folder / SUMS).read_text().splitlines(), 1):
            checksum, _, name = line.partition("  ")
            if len(checksum) != 64 or not name or name in found:
                raise BenchError(f"{folder / SUMS}, line {number}: expected a hash and a new name, found {line[:80]!r}")
            found[name] = checksum
    return found


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One writer at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
