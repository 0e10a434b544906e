"""Results made in a moment: real streams of a scripted server under documents of a small checkout."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

import psutil
import yaml

from moetier_bench.corpus import Prompts
from moetier_bench.documents import MachineFile, Recipe, Suite
from moetier_bench.endpoint import connect
from moetier_bench.eval.report import Result as Answer
from moetier_bench.meter import Meter
from moetier_bench.probes import Coding, Decode, Prefill
from moetier_bench.probes.base import Target
from moetier_bench.provenance import Code, ModelFiles, machine_here, software
from moetier_bench.result import Load, Result, Section, Served, cells_of, hashes_of, tier_cells
from tests.bench.scripted import Script
from tests.bench.simulated import simulated

IDENTITY = "0" * 64
PROBES = (
    Decode(levels=(1, 2), repeats=5, seconds=0.1, warmup_seconds=0.02),
    Prefill(lengths=(32,), repeats=5),
    Coding(max_tokens=16, repeats=2),
)


def recipe(name: str = "tiny/a") -> Recipe:
    """A recipe that nothing serves."""
    return Recipe.model_validate(
        {
            "id": name,
            "summary": f"the scripted server as {name}",
            "model": {"name": "tiny", "folder": "models/tiny", "identity": IDENTITY},
            "serve": {"engine": "vllm"},
        }
    )


SUITE = Suite(id="small", summary="for tests", probes=PROBES)


@cache
def sections(gap: float) -> tuple[Section, ...]:
    """Measured once a session."""

    async def run(url: str) -> list[Section]:
        found = []
        async with connect(url, None, None) as endpoint:
            target = Target(endpoint, Prompts(endpoint), Meter(psutil.Process()), url)
            for probe in SUITE.probes:
                raw = await probe.measure(target)
                found.append(Section(probe=probe, raw=raw, cells=cells_of(probe, raw, None), seconds=1.0))
        return found

    return tuple(simulated(Script(first=0.02, gap=gap), run))


def made(name: str = "tiny/a", gap: float = 0.005, commit: str = "1" * 40) -> Result:
    """A whole result."""
    machine = MachineFile.model_validate(machine_here("here", "where the tests run"))
    served = Served(command=("{bin}/python", "-m", "server"), start_seconds=(1.5,))
    return Result(
        status="ok",
        started="2026-01-02T03:04:05Z",
        finished="2026-01-02T03:05:05Z",
        recipe=recipe(name),
        suite=SUITE,
        machine=machine,
        hashes=hashes_of(recipe(name), SUITE, machine),
        code=Code(version="0.1.0", commit=commit),
        software=software(),
        model=ModelFiles(identity=IDENTITY, bytes=1, files={"config.json": "2" * 64}),
        served=served,
        load=Load(before=(0.1, 0.1, 0.1)),
        corpus_sha256="3" * 64,
        boot=(*served.cells(), *tier_cells({}, {})),
        sections=sections(gap),
    ).sealed()


def answers(right: str, tokens: int = 20, task: str = "arithmetic") -> tuple[Answer, ...]:
    """One answer a letter: r is right, w is wrong, t is wrong because it was truncated."""
    return tuple(
        Answer(
            task, n, f"{n:016x}", False, correct=c == "r", finish_reason="length" if c == "t" else "stop", tokens=tokens
        )
        for n, c in enumerate(right)
    )


def git(root: Path, *arguments: str) -> str:
    """Git with a name of its own; returns its output."""
    who = ("-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", *who, "-C", str(root), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def checkout(root: Path) -> str:
    """A small checkout with recipes tiny/a and tiny/b; returns its commit."""
    (root / "recipes" / "tiny").mkdir(parents=True)
    for name in ("tiny/a", "tiny/b"):
        (root / "recipes" / f"{name}.yaml").write_text(yaml.safe_dump(recipe(name).model_dump(mode="json")))
    git(root, "init", "-q")
    commit_all(root)
    return git(root, "rev-parse", "HEAD")


def commit_all(root: Path) -> None:
    """Commit everything."""
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "change")
