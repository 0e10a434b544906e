"""Build a store from a checkpoint; killed at any moment it leaves nothing that opens, and resumes.

Everything is written to OUT.partial. A layer is whole once its checksum file exists, which is written after the records
are on the disk; store.json comes last; then the folder gets its name.

finished.py has what happens to a store that is there already.
"""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moetier.contract.requantize import Loss
from moetier.decision.decide import decide
from moetier.errors import CheckpointError, DamagedWeightsError, StoreError
from moetier.files import locked_folder, store_errors, sweep, sync_folder, write_all, write_durably
from moetier.store import manifest as fmt
from moetier.store.check import Checker
from moetier.store.checkpoint import Checkpoint
from moetier.store.describe import LOSS, LayerFiles, describe, entry_before, layer_files
from moetier.store.finished import LOCK, Finished, Target
from moetier.store.manifest import Manifest
from moetier.store.store import slice_sums
from moetier.store.work import Meter, Report, Workers, default_threads

PLAN = "build.json"


@dataclass(frozen=True)
class BuildReport:
    """Report of a build. bytes counts the record files; seconds is wall time."""

    store: str
    checkpoint: str
    identity: str
    source_format: str
    requantized: bool
    slices: int
    layers: int
    experts: int
    record_stride: int
    bytes: int
    layers_built: int
    layers_resumed: int
    experts_checked: int
    already_complete: bool
    content_compared: bool
    """Whether the checkpoint's whole content was read, to record its hash or to compare it."""
    seconds: float
    losses: dict[int, dict[str, float]]
    """Losses by re-quantization, per layer number; empty where the values are the checkpoint's own."""


def build_store(
    checkpoint_path: str | Path,
    out_path: str | Path,
    *,
    slices: int = 1,
    check: int = 0,
    deep: bool = False,
    threads: int | None = None,
    progress: Report | None = None,
    served: bool = True,
) -> BuildReport:
    """Build the store of a checkpoint's routed experts at `out_path`, or find that it is there already.

    slices cuts each expert for tensor parallelism. check re-reads that many random experts of each layer and compares
    every value with the checkpoint before the store gets its name. deep also records the hash of the checkpoint's
    content. served: RefusedError where the model could not be served from it on any machine (`moetier.decision`); False
    builds all the same. Memory: two records a thread and what the headers need.
    """
    checkpoint = Checkpoint.open(checkpoint_path)
    if served:
        decide(checkpoint.facts).require()
    return build_from(checkpoint, out_path, slices=slices, check=check, deep=deep, threads=threads, progress=progress)


def build_from(
    checkpoint: Checkpoint,
    out_path: str | Path,
    *,
    slices: int = 1,
    check: int = 0,
    deep: bool = False,
    threads: int | None = None,
    progress: Report | None = None,
) -> BuildReport:
    """As `build_store`, from a checkpoint that is open and of which the caller has decided that it can be served."""
    start = time.monotonic()
    target = Target(checkpoint, Path(out_path).absolute(), slices, deep, threads or default_threads())
    build, finished = _Build(target), Finished(target)
    existing = finished.manifest()
    if existing is None:
        with locked_folder(target.partial, LOCK):
            existing = finished.manifest()  # another process may have finished it while we waited for the lock
            if existing is None:
                with finished.reopened():
                    report = build.run(check, progress)
                return replace(report, seconds=time.monotonic() - start)
            build.clean(target.partial)
    with store_errors(f"{target.out} cannot be tidied"):
        build.clean(target.out)  # the build that made it may have been killed right after the rename
    existing, compared = finished.settle(existing, progress)
    report = build.report(existing, 0, 0, compared or build.check_existing(check, progress))
    return replace(report, already_complete=True, seconds=time.monotonic() - start)


class _Build:
    """One build: the steps from nothing, or from what an earlier one left, to a finished store."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.checkpoint, self.geometry, self.layout = target.checkpoint, target.geometry, target.layout
        self.out, self.partial = target.out, target.partial
        self._before: Manifest | None = None
        self._deep = target.deep
        self._local = threading.local()

    def run(self, check: int, progress: Report | None) -> BuildReport:
        """Build what is missing, check, write store.json and give the folder its name. The lock is held."""
        self.checkpoint.require_experts()
        layers = range(len(self.checkpoint.moe_layers))
        self._write_plan()
        self._read_before()
        missing = [layer for layer in layers if not self._is_whole(layer)]
        self._check_space(missing)
        with Workers(self.target.threads, "moetier-build") as pool:
            meter = Meter("build", len(layers) * self.geometry.experts, progress)
            meter.add((len(layers) - len(missing)) * self.geometry.experts)
            checker = Checker(self.checkpoint, self.layout, check, pool, progress)
            for layer in layers:
                if layer in missing:
                    try:
                        self._build_layer(layer, pool, meter)
                    except DamagedWeightsError as error:
                        also = f"{error}; then remove {self.partial}, which was begun from them"
                        raise DamagedWeightsError(also) from error
                if layer in missing or not self.checkpoint.shards.remote:
                    checker.check(layer, self._files(layer))
        manifest = describe(self.checkpoint, self.geometry, self.partial, self._deep, self._before)
        self._check_source_unchanged()
        with store_errors(f"{self.partial / fmt.FILE} cannot be written"):
            write_durably(self.partial / fmt.FILE, manifest.to_json())
        with store_errors(f"{self.partial} cannot be renamed to {self.out}"):
            self.partial.rename(self.out)
            sync_folder(self.out.parent)
            self.clean(self.out)
        return self.report(manifest, len(missing), len(layers) - len(missing), checker.checked)

    def check_existing(self, check: int, progress: Report | None) -> int:
        """Check a store that is there already; the number of experts compared."""
        with Workers(self.target.threads, "moetier-check") as pool:
            checker = Checker(self.checkpoint, self.layout, check, pool, progress)
            for layer, moe in enumerate(self.checkpoint.moe_layers):
                if not self.checkpoint.shards.remote:
                    checker.check(layer, layer_files(self.out, moe.number))
            return checker.checked

    def clean(self, folder: Path) -> None:
        """Remove what only a build needs, and what killed ones left; the folder too if nothing is left in it."""
        for path in (folder / fmt.FILE, folder / PLAN, *folder.glob("layer-*.sums"), *folder.glob(f"layer-*{LOSS}")):
            sweep(path)
        for path in (*folder.glob(f"*{LOSS}"), folder / PLAN, folder / LOCK):
            if path.exists():  # a store on a read-only disk must not be written to for nothing
                path.unlink(missing_ok=True)
        if not any(folder.iterdir()):
            folder.rmdir()

    def report(self, manifest: Manifest, built: int, resumed: int, checked: int) -> BuildReport:
        layers = len(self.checkpoint.moe_layers)
        return BuildReport(
            store=str(self.out),
            checkpoint=str(self.checkpoint.path),
            identity=manifest.checkpoint.identity,
            source_format=self.checkpoint.source_format,
            requantized=self.checkpoint.requantized,
            slices=self.geometry.slices,
            layers=layers,
            experts=self.geometry.experts,
            record_stride=self.layout.stride,
            bytes=layers * self.target.layer_bytes,
            layers_built=built,
            layers_resumed=resumed,
            experts_checked=checked,
            already_complete=False,
            content_compared=self.target.deep,
            seconds=0.0,
            losses={entry.number: entry.loss.model_dump() for entry in manifest.layers if entry.loss is not None},
        )

    def _files(self, layer: int) -> LayerFiles:
        return layer_files(self.partial, self.checkpoint.moe_layers[layer].number)

    def _write_plan(self) -> None:
        """Say what OUT.partial is being built from, or check that what lies there is of the same build."""
        plan = {
            "format": fmt.FORMAT,
            "contract": fmt.CONTRACT,
            "layout": fmt.LAYOUT,
            "slices": self.geometry.slices,
            "record_stride": self.layout.stride,
            "identity": self.target.known.sampled or self.target.known.headers,
            **({"version": self.checkpoint.shards.version} if self.checkpoint.shards.version else {}),
        }
        path = self.partial / PLAN
        if not path.exists():
            with store_errors(f"{path} cannot be written"):
                write_durably(path, json.dumps(plan).encode())
            return
        with store_errors(f"{path} cannot be read"):
            raw = path.read_bytes()
        try:
            found = json.loads(raw)
        except ValueError:
            found = None
        if found != plan:
            raise StoreError(
                f"{self.partial} is the rest of another build: expected {plan}, found {found}; remove {self.partial} "
                "and run the build again, or build into another OUT"
            )

    def _read_before(self) -> None:
        """Read store.json of a finished store whose damaged files are built anew here, if that is what lies here.

        What is whole in it stays only if it is known to be of this checkpoint by all that the new store.json will say.
        """
        path, deep = self.partial / fmt.FILE, self.target.deep
        if path.exists():
            before = Manifest.read(self.partial)
            if other := self.target.other_build(before):
                raise StoreError(
                    f"{self.partial} is the rest of another build: {other}; remove {self.partial} and run the build "
                    "again, or build into another OUT"
                )
            entry = before.checkpoint
            deep = deep or entry.content is not None
            content = self.checkpoint.identity(deep=True) if deep else None
            if self.target.known.certain_of(entry.identities) and content == entry.content:
                self._before = before
            else:
                with store_errors(f"{self.partial} cannot be written"):
                    for layer in range(len(self.checkpoint.moe_layers)):
                        self._files(layer).sums.unlink(missing_ok=True)
                    path.unlink()
        self._deep = deep

    def _is_whole(self, layer: int) -> bool:
        files = self._files(layer)
        try:
            sizes = files.records.stat().st_size, files.sums.stat().st_size
        except FileNotFoundError:
            return False
        described = not self.checkpoint.sources[layer].requantized or files.loss.exists()
        return sizes == (self.target.layer_bytes, self.target.sums_bytes) and (
            described or entry_before(self._before, self.checkpoint.moe_layers[layer].number, files) is not None
        )

    def _check_space(self, missing: list[int]) -> None:
        with store_errors(f"{self.partial} cannot be read"):
            status = os.statvfs(self.partial)
            begun = sum(
                p.stat().st_blocks * 512 for p in (self._files(layer).records for layer in missing) if p.exists()
            )
        free = status.f_bavail * status.f_frsize
        need = len(missing) * (self.target.layer_bytes + self.target.sums_bytes) - begun
        if need > free:
            raise StoreError(
                f"{self.out} needs {need / 1e9:.3f} GB more, found {free / 1e9:.3f} GB free on its file system; "
                "free some space or choose another OUT (layers that are done stay)"
            )

    def _build_layer(self, layer: int, pool: Workers, meter: Meter) -> None:
        files = self._files(layer)
        sums = np.zeros((self.geometry.experts, self.geometry.slices), np.uint64)
        losses: list[Loss | None] = [None] * self.geometry.experts
        with store_errors(f"{files.records} cannot be written"):
            files.sums.unlink(missing_ok=True)
            fd = os.open(files.records, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            try:
                os.posix_fallocate(fd, 0, self.target.layer_bytes)

                def job(expert: int) -> None:
                    record = self._buffer()
                    converted = self.checkpoint.convert(layer, expert)
                    self.layout.pack(converted.expert, record)
                    losses[expert] = converted.loss
                    sums[expert] = list(slice_sums(self.layout, record))
                    write_all(fd, record.data, expert * self.layout.stride)

                pool.map(job, range(self.geometry.experts), meter)
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
            if self.checkpoint.sources[layer].requantized:
                total = sum((loss for loss in losses if loss is not None), Loss())
                write_durably(files.loss, json.dumps(vars(total)).encode())
            write_durably(files.sums, sums.astype("<u8").tobytes())

    def _buffer(self) -> NDArray[np.uint8]:
        """The calling thread's room for one record."""
        if not hasattr(self._local, "record"):
            self._local.record = np.empty(self.layout.stride, np.uint8)
        record: NDArray[np.uint8] = self._local.record
        return record

    def _check_source_unchanged(self) -> None:
        if self.checkpoint.reopened().known != self.target.known:
            raise CheckpointError(
                f"{self.checkpoint.path} was changed during the build; remove {self.partial} and run the command again"
            )
