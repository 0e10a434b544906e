"""`moetier store build|info|verify`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from moetier.cli.options import SkipSupportCheck
from moetier.errors import SettingsError
from moetier.launch.decide import decided_here, decision_first, proceed
from moetier.launch.progress import progress_bar
from moetier.store.build import build_from
from moetier.store.checkpoint import Checkpoint
from moetier.store.delete import Deleted, delete_source_of
from moetier.store.remote.build import build_remote
from moetier.store.remote.hub import SCHEME
from moetier.store.store import Store
from moetier.store.trim import trim_checkpoint
from moetier.store.verify import verify_store

app = typer.Typer(help="Build and check expert stores.", no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads to use (default: the CPUs allowed, at most 8).")]
StorePath = Annotated[Path, typer.Argument(metavar="STORE", help="A store's folder.")]


@app.command()
def build(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT", help="Folder of config.json and *.safetensors, or hf://ORG/NAME[@REVISION]."
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to make; an interrupted build resumes.")],
    slices: Annotated[
        int, typer.Option(min=1, help="Cut each expert in this many slices (for tensor parallelism).")
    ] = 1,
    check: Annotated[
        int, typer.Option(min=0, help="Compare this many random experts a layer with the checkpoint.")
    ] = 0,
    deep: Annotated[bool, typer.Option("--deep", help="Also record a hash of the checkpoint's whole content.")] = False,
    trim: Annotated[
        Path | None, typer.Option(help="Also write the checkpoint without its experts to this folder: serve from that.")
    ] = None,
    delete_source: Annotated[
        int,
        typer.Option(
            "--delete-source",
            count=True,
            help="Given twice: delete CHECKPOINT's weights once the store is checked and verified and --trim is done.",
        ),
    ] = 0,
    keep_shards: Annotated[int, typer.Option(min=1, help="Shards of an hf:// source on disk at a time.")] = 4,
    threads: Threads = None,
    skip_support_check: SkipSupportCheck = False,
    as_json: Json = False,
) -> None:
    """Build the store of a checkpoint's routed experts.

    Exit 2, before any expert is read, if it cannot be served here.
    """
    if delete_source and (delete_source < 2 or not check or trim is None):
        raise SettingsError(
            "--delete-source deletes the checkpoint's weights for good: give it twice, with --check N (at least 1) and "
            "--trim FOLDER"
        )
    deleted, console = Deleted(0), Console(stderr=True)

    def accept(found: Checkpoint) -> None:
        proceed(decided_here(found.facts), skip_support_check, console)

    with progress_bar() as step:
        if checkpoint.startswith(SCHEME):
            if trim is None or deep or delete_source:
                raise SettingsError(
                    f"{checkpoint} is never whole on this disk: expected --trim FOLDER (for its other weights) and "
                    "neither --deep nor --delete-source"
                )
            report = build_remote(
                checkpoint,
                out,
                trim,
                keep=keep_shards,
                slices=slices,
                check=check,
                threads=threads,
                progress=step,
                accept=accept,
            ).build
        else:
            with decision_first(checkpoint, skip_support_check, console):
                opened = Checkpoint.open(checkpoint)
            accept(opened)
            report = build_from(opened, out, slices=slices, check=check, deep=deep, threads=threads, progress=step)
            if trim is not None:
                trim_checkpoint(Checkpoint.open(checkpoint), trim, step)
            if delete_source and trim is not None:
                deleted = delete_source_of(Path(checkpoint), out, trim, step)
    if as_json:
        about = {"trimmed": None if trim is None else str(trim)}
        _print_json({**asdict(report), **about, "bytes_deleted": deleted.bytes, "stayed": deleted.stayed})
        return
    what = "was there already, nothing rebuilt" if report.already_complete else f"built in {report.seconds:.1f} s"
    if report.already_complete and report.content_compared:
        what += "; it is of the checkpoint's very content"
    rows = {
        "store": f"{report.store} ({what})",
        "records": f"{report.layers} layers x {report.experts} experts of {report.record_stride:,} bytes",
        "bytes": f"{report.bytes:,}",
        "source": report.source_format + (" (requantized to MXFP4: lossy)" if report.requantized else ""),
        "layers built / resumed": f"{report.layers_built} / {report.layers_resumed}",
        "experts checked": str(report.experts_checked),
        "checkpoint identity": report.identity,
    }
    if trim is not None:
        rows["trimmed checkpoint"] = str(trim)
    if delete_source:
        rows["deleted"] = f"{deleted.bytes:,} bytes of {checkpoint}"
        for number, file in enumerate(deleted.stayed):
            rows["stayed" if not number else " " * number] = file
    _print_rows(rows)
    _print_losses(report.losses)


@app.command()
def info(store: StorePath, as_json: Json = False) -> None:
    """Say what a store holds."""
    with Store.open(store) as opened:
        manifest = opened.manifest
    records = len(manifest.layers) * manifest.geometry.experts
    size = records * manifest.record_stride
    if as_json:
        _print_json({"store": str(store), "records": records, "bytes": size, **manifest.model_dump(mode="json")})
        return
    geometry, family = manifest.geometry, manifest.family
    requantized = " (requantized to MXFP4: lossy)" if manifest.checkpoint.requantized else ""
    _print_rows(
        {
            "store": f"{store} (format {manifest.format}, {manifest.contract}, {manifest.layout})",
            "model type": manifest.checkpoint.model_type,
            "geometry": f"hidden {geometry.hidden}, intermediate {geometry.intermediate}, "
            f"{geometry.experts} experts, top-{geometry.top_k}, slices {manifest.slices}",
            "family": f"SwiGLU limit {family.swiglu_limit or 'none'}, route weight "
            f"{'before' if family.route_weight_before_down else 'after'} the down projection",
            "layers": ", ".join(str(layer.number) for layer in manifest.layers),
            **{f"left out: layer {layer.number}": layer.reason for layer in manifest.left_out},
            "records": f"{records:,} of {manifest.record_stride:,} bytes",
            "bytes": f"{size:,}",
            "source": manifest.checkpoint.source_format + requantized,
            "checkpoint identity": manifest.checkpoint.identity,
            "built by": f"moetier {manifest.tool_version}",
        }
    )
    _print_losses({layer.number: layer.loss.model_dump() for layer in manifest.layers if layer.loss is not None})


@app.command()
def verify(
    store: StorePath,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Also make sure that the store was built from this checkpoint.")
    ] = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Check every checksum of a store; exit 1 if a record is bad."""
    with progress_bar() as step:
        report = verify_store(store, checkpoint=checkpoint, threads=threads, progress=step)
    if as_json:
        _print_json(asdict(report))
    else:
        for bad in report.bad:
            Console(stderr=True, soft_wrap=True).print(bad.reason, markup=False, highlight=False)
        _print_rows(
            {
                "store": report.store,
                "records": f"{report.records:,} in {report.layers} layers",
                "bytes": f"{report.bytes:,} read in {report.seconds:.1f} s",
                "bad records": str(len(report.bad)),
            }
        )
    if report.bad:
        raise typer.Exit(1)


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value))


def _print_losses(losses: dict[int, dict[str, float]]) -> None:
    """Print the losses of each layer by re-quantization."""
    if not losses:
        return
    table = Table("layer", "relative RMS error", "sign bias", "saturated", title="re-quantization to MXFP4")
    for number, loss in losses.items():
        table.add_row(
            str(number), f"{loss['relative_rms']:.5f}", f"{loss['sign_bias']:+.2e}", f"{loss['saturated_share']:.2%}"
        )
    Console().print(table, markup=False)


def _print_rows(rows: dict[str, str]) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table, markup=False)
