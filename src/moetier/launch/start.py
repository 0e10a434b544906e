"""Check everything that can be checked, say what lives where, then run vLLM's server until a signal."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.status import Status
from rich.text import Text

from moetier.decision.decide import Decision
from moetier.errors import RefusedError, SettingsError
from moetier.folders import temporary_roots
from moetier.kernels.cpu import ThreadPool
from moetier.kernels.cpu.isa import choose_isa
from moetier.launch import process as launcher
from moetier.launch.command import ServeRequest, check_reachable_only_with_key, example
from moetier.launch.decide import decided_here, proceed, unknown_support
from moetier.launch.explain import explain as explanation
from moetier.launch.place import check_drafter, compare, console, open_store, place, show
from moetier.launch.refused import check_arguments
from moetier.launch.scratch import scratch, sweep
from moetier.launch.started import read_started
from moetier.launch.surroundings import look, socket_root
from moetier.machine import limits as machine
from moetier.settings import Settings
from moetier.store.checkpoint import Checkpoint


def start(
    request: ServeRequest,
    build: bool = False,
    skip_support_check: bool = False,
    as_json: bool = False,
    explain: bool = False,
    on_ready: Callable[[], None] | None = None,
    notes: Sequence[str] = (),
) -> None:
    """Check, say what lives where, serve until a signal.

    on_ready: called once, when the server answers. notes: lines to say before what lives where.
    """
    settings, model = request.settings, request.model
    check_reachable_only_with_key(request)
    check_arguments(request.extra)
    check_cpus(settings)
    launcher.vllm_distribution()
    checkpoint = Checkpoint.open(model)
    decision = decided_here(checkpoint.facts, request.extra)
    require_served(decision, skip_support_check)
    if not skip_support_check:
        unknown_support(decision, console)
    launcher.check_port(request.host, request.port)
    _check_new(settings.record_trace)
    opened = open_store(checkpoint, settings.store, build)
    check_drafter(opened, request)
    cpus = machine.allowed_cpus()
    records, report = place(checkpoint, opened, request, cpus)
    compare(opened, checkpoint)  # it may take seconds: what takes none is refused before
    for line in notes:
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    show(report, as_json)
    _say_too_many_threads(settings.threads, len(report["compute_cpus"]))
    if explain:
        for line in (*request.launch, *explanation(request, records, not launcher.runs_on_cpu())):
            console.print(line, soft_wrap=True, markup=False, highlight=False)
    _sweep()
    with scratch(socket_root()) as (folder, lock):
        found = look(request, folder, launcher.runs_on_cpu())
        for line in found.lines:
            console.print(line, soft_wrap=True, markup=False, highlight=False)
        decided = settings.model_copy(
            update={
                "dram_records": records,
                "store": settings.store.resolve(),
                "cpus": settings.cpus or machine.compute_cpus(cpus),
                "record_trace": settings.record_trace and settings.record_trace.absolute(),
                "counters_folder": settings.counters_folder or folder,
                "failure_file": folder / "failure.json",
            }
        )
        changed = dataclasses.replace(
            request,
            settings=decided,
            model=model.resolve(),
            scratch=folder,
            scratch_lock=lock,
            surroundings=found.environment,
            log_file=request.log_file if request.log_kept else folder / "vllm.log",
        )
        told = _run(changed, cpus, on_ready)
    if told is None:
        console.print("ended before it was ready, bye")
    else:
        console.print(f"drained, {'heat saved, ' if _written_since(told, decided.heat_path) else ''}bye")


def _sweep() -> None:
    """Remove what servers left that were killed with their guards."""
    for folder in sweep(temporary_roots()):
        console.print(f"removed {folder}, left by a server that was killed", soft_wrap=True, highlight=False)


def _written_since(seconds: float, path: Path) -> bool:
    """Heat is written when the engine ends, unless nothing is new, or something kept it from it."""
    return path.exists() and path.stat().st_mtime >= seconds


def check_cpus(settings: Settings) -> None:
    """SettingsError where this machine lacks the instruction set, CPUs or threads that were asked for."""
    choose_isa(settings.isa)
    ThreadPool(settings.threads, settings.cpus).close()


def _say_too_many_threads(threads: int | None, cpus: int) -> None:
    if threads is not None and threads > cpus:
        console.print(
            f"threads: {threads} on {cpus} CPUs; at most {cpus} are better, for every layer waits for the slowest"
        )


def _check_new(path: Path | None) -> None:
    """SettingsError before anything is loaded, where a recording could not be written."""
    if path is not None and (path.exists() or path.is_symlink()):
        raise SettingsError(f"{path} exists already; name a new file for the trace")


def require_served(decision: Decision, skip: bool) -> None:
    """RefusedError where the model is not served, or lacks an argument that it needs."""
    proceed(decision, skip, console)
    needs = decision.conditions()
    if needs:
        raise RefusedError(f"{decision.name} {needs[0]}")


def _run(request: ServeRequest, cpus: tuple[int, ...], on_ready: Callable[[], None] | None) -> float | None:
    """Run the server with a line of progress until it answers."""
    if request.log_file is not None:
        kept = "" if request.log_kept else ", until the server ends: no state folder takes it; --log-file FILE keeps it"
        console.print(f"vLLM's log: {request.log_file}{kept}", soft_wrap=True, markup=False, highlight=False)
    with Status("starting vLLM", console=console) as status:

        def waiting(seconds: float) -> None:
            line = launcher.last_lines(request.log_file, 1) if request.log_file else ""
            status.update(Text(f"starting vLLM ({seconds:.0f} s) {line}", overflow="ellipsis", no_wrap=True))

        def ready(seconds: float) -> None:
            status.stop()
            console.print(
                f"ready after {seconds:.0f} s on http://{request.host}:{request.port}/v1; Ctrl-C ends it. Try:"
            )
            console.print(example(request), soft_wrap=True, markup=False, highlight=False)
            folder = request.settings.counters_folder
            found = read_started(folder) if folder else None
            for line in found.lines(request.planned_device_bytes) if found else ():
                console.print(line, soft_wrap=True, markup=False, highlight=False)
            if on_ready is not None:
                on_ready()

        return launcher.run(request, cpus, waiting, ready)
