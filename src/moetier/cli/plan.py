"""`moetier plan`: what a model will do on a machine, before it is downloaded and before the machine is bought."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from moetier.doctor.cache import for_disk, load_rates
from moetier.doctor.examine import facts, software
from moetier.doctor.facts import Machine
from moetier.doctor.machine_file import read_machine
from moetier.errors import SettingsError
from moetier.plan import calibration, catalog, report
from moetier.plan.costs import engine_named
from moetier.plan.describe import DESCRIBED_THREADS, describe
from moetier.plan.geometry import Geometry
from moetier.plan.hardware import hardware_of
from moetier.plan.placement import Wanted
from moetier.plan.planner import Plan, Question, make_plan, to_json
from moetier.plan.plot import plan_svg
from moetier.plan.predict import Draft
from moetier.plan.workload import DEFAULT

DEFAULT_CONTEXT = 32768
UNFIT = 1
"""Exit code where the settings do not fit."""

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A bundled id (see --models), a checkpoint's folder, hf://ORG/NAME, or a geometry file."
    ),
]
MachineFile = Annotated[Path | None, typer.Option("--machine", help="What `moetier doctor --json` wrote.")]
Gpus = Annotated[str | None, typer.Option(help="A machine in words: 4x32GB, 1xRTX5090, or none.")]
Ram = Annotated[str | None, typer.Option(help="Its RAM: 256GB.")]
DiskOption = Annotated[str | None, typer.Option("--disk", help="What random reads of records reach: 7GB/s.")]
MemoryOption = Annotated[str | None, typer.Option("--memory", help="DRAM: 8xDDR5-4800, or a rate such as 250GB/s.")]
Pcie = Annotated[str | None, typer.Option(help="Each GPU's link: 5x16.")]
GpuRateOption = Annotated[str | None, typer.Option("--gpu-rate", help="Each GPU's memory rate: 1792GB/s.")]
Threads = Annotated[int, typer.Option(min=1, max=4096, help="CPU threads of a machine in words.")]
DiskSize = Annotated[str | None, typer.Option(help="Free space on disk: 2TB.")]
Records = Annotated[int | None, typer.Option("--dram-records", min=0, help="Experts of each layer in DRAM.")]
Slots = Annotated[int | None, typer.Option(min=0, help="Experts of each layer in slots of the devices.")]
Residents = Annotated[int, typer.Option(min=0, help="Slots fixed by heat, whose records take no DRAM.")]
Tables = Annotated[str, typer.Option(help="Lookup tables (Engram): auto, dram or disk.")]
Context = Annotated[int | None, typer.Option(min=1, help="Tokens of context (default: 32768, or all it can).")]
Streams = Annotated[int, typer.Option(min=1, max=65536, help="Sequences at once, each of that context.")]
KvFormatOption = Annotated[str | None, typer.Option("--kv-format", help="bf16, fp8, or one of the model's own.")]
KvBytes = Annotated[float | None, typer.Option(min=0, help="KV bytes a token, where the attention is not known.")]
WorkloadOption = Annotated[str, typer.Option("--workload", help="short, mixed, deep, or a file of `trace record`.")]
Chunk = Annotated[int, typer.Option(min=1, max=1 << 20, help="Tokens of a prompt that one step takes.")]
EngineOption = Annotated[str | None, typer.Option("--engine", help="vllm-graphs, vllm-eager or vllm-cpu.")]
DraftTokens = Annotated[int | None, typer.Option(min=1, max=64, help="Speculation: tokens drafted a step.")]
Accepted = Annotated[float, typer.Option(min=1, max=65, help="Tokens that come out of such a step on average.")]
CalibrationOption = Annotated[Path | None, typer.Option("--calibration", help="Corrections from `moetier calibrate`.")]


@dataclass(frozen=True)
class MachineWords:
    """A machine by a file, by words, or (all None) the one that this runs on."""

    file: Path | None = None
    gpus: str | None = None
    ram: str | None = None
    disk: str | None = None
    memory: str | None = None
    pcie: str | None = None
    gpu_rate: str | None = None
    threads: int = DESCRIBED_THREADS
    disk_size: str | None = None

    @property
    def described(self) -> bool:
        words = (self.gpus, self.ram, self.disk, self.memory, self.pcie, self.gpu_rate, self.disk_size)
        return any(word is not None for word in words)


def machine_of(words: MachineWords) -> Machine:
    """The machine that was meant; SettingsError where it is said twice or only in part."""
    if words.file is not None:
        if words.described:
            raise SettingsError("a machine by --machine or in words (--gpus, --ram, ...), not both; leave one out")
        return read_machine(words.file)
    if not words.described:
        here = facts(Path())
        return for_disk(here.model_copy(update={"rates": load_rates(here.identity)}))
    if words.gpus is None or words.ram is None:
        raise SettingsError("a machine in words needs at least --gpus (or none) and --ram")
    return describe(
        words.gpus,
        words.ram,
        words.disk,
        memory=words.memory,
        pcie=words.pcie,
        gpu_rate=words.gpu_rate,
        threads=words.threads,
        disk_size=words.disk_size,
    )


def question_of(
    geometry: Geometry,
    machine: Machine,
    wanted: Wanted,
    workload: str,
    engine: str | None,
    draft: Draft | None,
    corrections: Path | None,
) -> Question:
    """With this machine's own corrections, unless others are named."""
    chosen = engine_named(engine, hardware_of(machine, geometry.record)).name
    found = None
    if corrections is not None:
        found = calibration.load(corrections)
        if found.engine != chosen:
            raise SettingsError(f"{corrections}: corrections of engine {found.engine}; this plan is for {chosen}")
    elif machine.identity != "described" and (kept := calibration.calibration_file(machine.identity, chosen)).exists():
        found = calibration.load(kept)
    versions = software()
    vllm = versions.get("vllm") or versions.get("vllm-cpu")
    return Question(geometry, machine, wanted, workload, engine, draft, found, vllm)


def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="A bundled id (--models), a checkpoint's folder, hf://ORG/NAME, or a geometry file."
        ),
    ] = None,
    machine: MachineFile = None,
    gpus: Gpus = None,
    ram: Ram = None,
    disk: DiskOption = None,
    memory: MemoryOption = None,
    pcie: Pcie = None,
    gpu_rate: GpuRateOption = None,
    threads: Threads = DESCRIBED_THREADS,
    disk_size: DiskSize = None,
    dram_records: Records = None,
    slots: Slots = None,
    residents: Residents = 0,
    tables: Tables = "auto",
    context: Context = None,
    streams: Streams = 1,
    kv_format: KvFormatOption = None,
    kv_bytes_per_token: KvBytes = None,
    workload: WorkloadOption = DEFAULT,
    chunk: Chunk = 4096,
    engine: EngineOption = None,
    draft_tokens: DraftTokens = None,
    accepted: Accepted = 1.0,
    corrections: CalibrationOption = None,
    explain: Annotated[bool, typer.Option("--explain", help="The model behind each number, with sources.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a picture (SVG) to this file.")] = None,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(help="Two machine files, side by side.", show_default=False)
    ] = None,
    geometry_out: Annotated[Path | None, typer.Option(help="Write the model's geometry to this file.")] = None,
    models: Annotated[bool, typer.Option("--models", help="List the bundled models and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Say where every byte of MODEL goes on a machine and how fast it will be. Exit 1 if it does not fit."""
    if models or model is None:
        _list(catalog.names(), as_json)
        if not models:
            raise SettingsError("expected a MODEL; above are the bundled ones")
        return
    geometry = catalog.find(model, kv_bytes_per_token)
    if geometry_out is not None:
        _write(geometry_out, geometry.model_dump_json(indent=1) + "\n")
    wanted = Wanted(
        context=min(DEFAULT_CONTEXT, geometry.max_context) if context is None else context,
        streams=streams,
        dram_records=dram_records,
        slots=slots,
        residents=residents,
        kv_format=kv_format,
        tables=tables,
        chunk=chunk,
        draft=draft_tokens is not None,
    )
    draft = None if draft_tokens is None else _draft(draft_tokens, accepted)
    words = MachineWords(machine, gpus, ram, disk, memory, pcie, gpu_rate, threads, disk_size)
    if compare is not None:
        if machine is not None or words.described:
            raise SettingsError("--compare names two machines itself; leave --machine and its words out")
        _compare(geometry, wanted, workload, engine, draft, compare, as_json)
        return
    found = make_plan(question_of(geometry, machine_of(words), wanted, workload, engine, draft, corrections))
    if plot is not None:
        _write(plot, plan_svg(found))
    if as_json:
        typer.echo(json.dumps(to_json(found)))
    else:
        _print(report.lines(found))
        if explain:
            _print(["", *report.explanation(found)])
    if not found.fits:
        raise typer.Exit(UNFIT)


def _draft(tokens: int, accepted: float) -> Draft:
    if accepted > tokens + 1:
        raise SettingsError(f"--accepted {accepted:g}: a step with {tokens} drafted tokens brings at most {tokens + 1}")
    return Draft(tokens, accepted)


def _compare(
    geometry: Geometry,
    wanted: Wanted,
    workload: str,
    engine: str | None,
    draft: Draft | None,
    files: tuple[Path, Path],
    as_json: bool,
) -> None:
    plans: list[Plan] = []
    for file in files:
        asked = question_of(geometry, read_machine(file), replace(wanted), workload, engine, draft, None)
        plans.append(make_plan(asked))
    if as_json:
        typer.echo(json.dumps([to_json(found) for found in plans]))
        return
    for file, found in zip(files, plans, strict=True):
        _print([f"{file}:", *(f"  {problem}" for problem in found.placement.problems)])
    _print(report.compared(plans[0], plans[1], (files[0].stem[:14], files[1].stem[:14])))


def _list(names: tuple[str, ...], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps([catalog.bundled(name).model_dump() for name in names]))
        return
    for name in names:
        g = catalog.bundled(name)
        typer.echo(
            f"{name:22} {g.moe_layers} MoE layers of {g.experts} experts, top-{g.top_k}, "
            f"{g.parts.total / 2**30:.0f} GiB ({g.expert_format})"
        )


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        typer.echo(line)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise SettingsError(f"{path} cannot be written ({error.strerror}); name another file") from error
