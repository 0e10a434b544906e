"""`moetier serve`: check everything that can be checked, say what lives where, then run vLLM's server."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from moetier import machine
from moetier.cli.explain import explain as explanation
from moetier.cli.store import progress_bar
from moetier.doctor.facts import CPU, Answer
from moetier.doctor.probe.gpu import probe_gpus
from moetier.doctor.support import devices_of, require
from moetier.errors import CheckpointError, SettingsError, StoreError
from moetier.kernels.cpu import ThreadPool
from moetier.kernels.cpu.isa import choose_isa
from moetier.layer.fit import ENGINE_BYTES, GIB, records_that_fit
from moetier.plan.serving import Given, Serving, plan_serving
from moetier.serve import launcher
from moetier.serve.command import (
    ServeRequest,
    api_key_of,
    check_reachable_only_with_key,
    compute_cpus,
    example,
    tensor_parallel_size,
)
from moetier.settings import Settings
from moetier.store.build import build_store
from moetier.store.checkpoint import Checkpoint, is_expert_tensor
from moetier.store.store import Store

console = Console(stderr=True)

Model = Annotated[Path, typer.Argument(metavar="MODEL", help="Checkpoint folder: config.json and *.safetensors.")]
StoreFolder = Annotated[Path, typer.Option("--store", help="Folder of the model's expert store.")]


def serve(
    context: typer.Context,
    model: Model,
    store: Annotated[
        Path | None, typer.Option(help="Folder of the model's expert store (default: MODEL-store beside it).")
    ] = None,
    build: Annotated[bool, typer.Option("--build-store", help="Build the store first if it is not there.")] = False,
    dram_records: Annotated[
        str | None,
        typer.Option(help="Experts of each layer in DRAM: a number, a share such as 25%, or auto (default: planned)."),
    ] = None,
    slots: Annotated[
        str | None, typer.Option(help="Experts of each layer in GPU memory: a number, or auto (default: planned).")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; beyond loopback an API key is needed.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    api_key: Annotated[str | None, typer.Option(help="Key that clients must give (or VLLM_API_KEY).")] = None,
    kv_cache_gib: Annotated[
        float | None,
        typer.Option(
            min=0.01, max=1e6, help="GiB of KV cache, on a GPU beside --slots (default: planned, 1 at least)."
        ),
    ] = None,
    drain_seconds: Annotated[int, typer.Option(min=0, help="Time for requests in flight after Ctrl-C.")] = 30,
    setting: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Another setting, see docs/serve.md.")
    ] = None,
    identity_check: Annotated[
        int, typer.Option(min=0, max=100_000, help="Random layer calls compared through every path at start; 0: none.")
    ] = Settings.model_fields["identity_check"].default,
    record: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Record a routing trace to this new file (`moetier trace`).")
    ] = None,
    usage_stats: Annotated[bool, typer.Option(help="Let vLLM report usage statistics.")] = False,
    log_file: Annotated[
        Path | None,
        typer.Option(help="Where vLLM's own log goes (default: serve-PORT.log in the user's state folder)."),
    ] = None,
    skip_support_check: Annotated[
        bool, typer.Option("--skip-support-check", help="Start although this model is known to fail under this vLLM.")
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Before starting, say what a step is expected to take.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="vLLM's own log goes to the terminal.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print where everything lives as one JSON object on stdout.")
    ] = False,
) -> None:
    """Serve MODEL over an OpenAI-compatible API; what follows `--` goes to vLLM."""
    values: dict[str, Any] = {"store": store or model.resolve().with_name(f"{model.resolve().name}-store")}
    values |= {"identity_check": identity_check, "record_trace": record}
    if dram_records is not None:
        values["dram_records"] = dram_records
    if slots is not None:
        values["slots"] = int(slots) if slots.isdecimal() else slots
    values |= _assignments(setting or [])
    _check_cpus(Settings.parse(values))
    key = api_key_of(api_key)
    planned, notes = _plan(model, Given.of(values, tuple(context.args)))
    settings = Settings.parse({**(planned.settings if planned else {}), **values})
    request = ServeRequest(
        model=model,
        settings=settings,
        host=host,
        port=port,
        api_key=key,
        kv_cache_gib=kv_cache_gib or max(1.0, planned.kv_cache_gib if planned else 0.0),
        drain_seconds=drain_seconds,
        usage_stats=usage_stats,
        log_file=None if verbose else log_file or _state_folder() / f"serve-{port}.log",
        extra=(*context.args, *(planned.arguments(context.args) if planned else ())),
    )
    start(request, build, skip_support_check, as_json, explain, notes=notes)


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
    _check_cpus(settings)
    _, vllm = launcher.vllm_distribution()
    checkpoint = Checkpoint.open(model)
    if not skip_support_check:
        _check_support(checkpoint.model_type, vllm)
    launcher.check_port(request.host, request.port)
    _check_new(settings.record_trace)
    opened = _open_store(checkpoint, settings.store, build)
    cpus = machine.allowed_cpus()
    records, report = _place(checkpoint, opened, request, cpus)
    for line in notes:
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    _show(report, as_json)
    if explain:
        for line in explanation(request, records, not launcher.runs_on_cpu()):
            console.print(line, soft_wrap=True, markup=False, highlight=False)
    with tempfile.TemporaryDirectory(prefix="moetier-") as folder:
        decided = settings.model_copy(
            update={
                "dram_records": records,
                "store": settings.store.resolve(),
                "cpus": settings.cpus or compute_cpus(cpus),
                "record_trace": settings.record_trace and settings.record_trace.absolute(),
                "counters_folder": settings.counters_folder or Path(folder),
                "failure_file": Path(folder) / "failure.json",
            }
        )
        served = _run(dataclasses.replace(request, settings=decided, model=model.resolve()), cpus, on_ready)
    console.print("drained, heat saved, bye" if served else "ended before it was ready, bye")


def _plan(model: Path, given: Given) -> tuple[Serving | None, tuple[str, ...]]:
    """The plan for this machine, None where none can be made; and what to say of it.

    Settings of the user that do not fit by the plan's estimate are left to the check of what is really free.
    """
    try:
        planned = plan_serving(model, given, on_gpu=not launcher.runs_on_cpu())
    except (CheckpointError, SettingsError) as error:
        if isinstance(error, CheckpointError):
            Checkpoint.open(model)  # what is wrong with it is said by its own error
        elif given.nothing:
            raise
        return None, (f"no plan: {error}",)
    return planned, tuple(planned.lines())


def _check_cpus(settings: Settings) -> None:
    """SettingsError where this machine lacks the instruction set, CPUs or threads that were asked for."""
    choose_isa(settings.isa)
    ThreadPool(settings.threads, settings.cpus).close()


def _check_new(path: Path | None) -> None:
    """SettingsError before anything is loaded, where a recording could not be written."""
    if path is not None and (path.exists() or path.is_symlink()):
        raise SettingsError(f"{path} exists already; name a new file for the trace")


def _check_support(model_type: str, vllm: str) -> None:
    """UnsupportedModelError where the table knows of a failure; one line where nothing is known."""
    devices = (CPU,) if launcher.runs_on_cpu() else devices_of(probe_gpus())
    for support in require(model_type, vllm, devices):
        if support.answer is Answer.UNKNOWN:
            console.print(f"support: {support}", soft_wrap=True, markup=False, highlight=False)


def _run(request: ServeRequest, cpus: tuple[int, ...], on_ready: Callable[[], None] | None) -> bool:
    """Run the server with a line of progress until it answers."""
    if request.log_file is not None:
        console.print(f"vLLM's log: {request.log_file}", soft_wrap=True, highlight=False)
    with Status("starting vLLM", console=console) as status:

        def waiting(seconds: float) -> None:
            line = launcher.last_line(request.log_file) if request.log_file else ""
            status.update(Text(f"starting vLLM ({seconds:.0f} s) {line}", overflow="ellipsis", no_wrap=True))

        def ready(seconds: float) -> None:
            status.stop()
            console.print(
                f"ready after {seconds:.0f} s on http://{request.host}:{request.port}/v1; Ctrl-C ends it. Try:"
            )
            console.print(example(request), soft_wrap=True, markup=False, highlight=False)
            if on_ready is not None:
                on_ready()

        return launcher.run(request, cpus, waiting, ready)


def _state_folder() -> Path:
    """Where programs keep logs, by the XDG convention."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "moetier"


def _assignments(pairs: list[str]) -> dict[str, Any]:
    """NAME=VALUE strings; a value is JSON where it is, else text."""
    values: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise typer.BadParameter(f"expected NAME=VALUE, found {pair!r}", param_hint="--set")
        try:
            values[name] = json.loads(value)
        except (ValueError, RecursionError):
            values[name] = value
    return values


def _open_store(checkpoint: Checkpoint, path: Path, build: bool) -> Store:
    if not path.exists():
        if not build:
            raise StoreError(
                f"there is no store at {path}; build it with `moetier store build {checkpoint.path} {path}` "
                "or add --build-store"
            )
        with progress_bar() as step:
            built = build_store(checkpoint.path, path, check=2, progress=step)
        console.print(f"built {path}: {built.layers} layers x {built.experts} experts in {built.seconds:.1f} s")
    return Store.open(path, checkpoint_identity=checkpoint.identity())


def _place(
    checkpoint: Checkpoint, store: Store, request: ServeRequest, cpus: tuple[int, ...]
) -> tuple[int, dict[str, Any]]:
    """Records per layer, and the report of what lives where."""
    on_cpu = launcher.runs_on_cpu()
    dense = sum(t.nbytes for name, t in checkpoint.tensors.items() if not is_expert_tensor(name))
    cache = int(request.kv_cache_gib * GIB) if on_cpu else 0
    manifest, stride = store.manifest, store.layout.stride
    experts, layers = manifest.geometry.experts, _served_layers(checkpoint, store, request)
    ranks = tensor_parallel_size(request.extra)
    other = ENGINE_BYTES + cache + (dense if on_cpu else 0)
    records = records_that_fit(request.settings, store, layers, other, ranks)
    slots = min(request.settings.slots, experts) if isinstance(request.settings.slots, int) else 0
    resident = slots - request.settings.spare_of(slots, experts)  # which DRAM does not hold too
    held = min(records, experts - resident)
    on_disk = (experts - resident - held) * layers
    tiers = [
        {"tier": "DRAM", "records": held * layers, "bytes": held * layers * stride},
        {"tier": "disk", "records": on_disk, "bytes": on_disk * stride},
        {"tier": "staging (DRAM)", "records": None, "bytes": request.settings.staging_records * stride},
        {"tier": "dense weights", "records": None, "bytes": dense},
    ]
    if on_cpu:
        tiers.append({"tier": "KV cache", "records": None, "bytes": cache})
    if request.settings.slots:
        size = slots * layers * stride if slots else None
        name = "device slots" if slots else "device slots (what fits)"
        tiers.insert(0, {"tier": name, "records": slots * layers if slots else None, "bytes": size or 0})
    report = {
        "model": str(checkpoint.path),
        "store": str(store.path),
        "contract": manifest.contract,
        "requantized": manifest.checkpoint.requantized,
        "layers": layers,
        "experts": experts,
        "records_per_layer_in_dram": records,
        "ranks": ranks,
        "compute_cpus": list(request.settings.cpus or compute_cpus(cpus)),
        "tiers": tiers,
    }
    return records, report


def _served_layers(checkpoint: Checkpoint, store: Store, request: ServeRequest) -> int:
    """MoE layers that vLLM will load: the drafter's (MTP) only where speculation is asked for."""
    if any(argument.startswith("--speculative") for argument in request.extra):
        return len(store.manifest.layers)
    return sum(layer.number < checkpoint.hidden_layers for layer in store.manifest.layers)


def _show(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(report))
        return
    table = Table(
        title=f"{report['model']}: {report['layers']} MoE layers of {report['experts']} experts", title_justify="left"
    )
    table.add_column("lives in")
    table.add_column("records", justify="right")
    table.add_column("MiB", justify="right")
    for tier in report["tiers"]:
        records = "" if tier["records"] is None else f"{tier['records']:,}"
        table.add_row(tier["tier"], records, f"{tier['bytes'] / 2**20:,.1f}")
    console.print(table)
    cpus = ", ".join(str(cpu) for cpu in report["compute_cpus"])
    if any(tier["tier"].startswith("device slots") for tier in report["tiers"]):
        console.print(f"experts ({report['contract']}) without a slot are computed by CPUs {cpus}, or streamed")
    else:
        console.print(f"experts ({report['contract']}) and attention take turns on CPUs {cpus}")
    if report["requantized"]:
        console.print("the store's experts are re-quantized: not the checkpoint's released precision")
