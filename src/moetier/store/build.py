"""Build a store from a checkpoint; killed at any moment it leaves nothing that opens, and resumes.

Everything is written to OUT.partial. A layer is whole once its checksum file exists, which is written after the records
are on the disk; store.json comes last; then the folder gets its name.
"""

from __future__ import annotations

import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moetier.decision.decide import decide
from moetier.errors import CheckpointError, StoreError
from moetier.formats import RecordLayout
from moetier.formats.requantize import Loss
from moetier.store import manifest as fmt
from moetier.store.check import Checker
from moetier.store.checkpoint import Checkpoint
from moetier.store.describe import LOSS, LayerFiles, describe, layer_files
from moetier.store.files import locked_folder, store_errors, sync_folder, write_all, write_durably
from moetier.store.manifest import Manifest
from moetier.store.store import Store, slice_sums
from moetier.store.work import Meter, Report, default_threads, for_each

PARTIAL = ".partial"
PLAN = "build.json"
LOCK = "build.lock"


@dataclass(frozen=True)
class BuildReport:
    """What a build did. bytes counts the record files; seconds is wall time."""

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
    seconds: float
    losses: dict[int, dict[str, float]]
    """What re-quantization did, per layer number; empty where the values are the checkpoint's own."""


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
    return build_from(
        Checkpoint.open(checkpoint_path),
        out_path,
        slices=slices,
        check=check,
        deep=deep,
        threads=threads,
        progress=progress,
        served=served,
    )


def build_from(
    checkpoint: Checkpoint,
    out_path: str | Path,
    *,
    slices: int = 1,
    check: int = 0,
    deep: bool = False,
    threads: int | None = None,
    progress: Report | None = None,
    served: bool = True,
) -> BuildReport:
    """As `build_store`, from a checkpoint that is open."""
    start = time.monotonic()
    if served:
        decide(checkpoint.facts).require()
    build = _Build(checkpoint, Path(out_path).absolute(), slices, deep, threads or default_threads())
    existing = build.existing()
    if existing is None:
        with locked_folder(build.partial, LOCK):
            existing = build.existing()  # another process may have finished it while we waited for the lock
            if existing is None:
                return replace(build.run(check, progress), seconds=time.monotonic() - start)
            build.clean(build.partial)
    with store_errors(f"{build.out} cannot be tidied"):
        build.clean(build.out)  # the build that made it may have been killed right after the rename
    report = build.report(existing, 0, 0, build.check_existing(check, progress))
    return replace(report, already_complete=True, seconds=time.monotonic() - start)


class _Build:
    """One build: what is built from what, and the steps of it."""

    def __init__(self, checkpoint: Checkpoint, out: Path, slices: int, deep: bool, threads: int) -> None:
        self.checkpoint = checkpoint
        self.out = out
        if not out.name:
            raise StoreError(f"{out}: expected the name of a new folder, found the root; choose another OUT")
        self.partial = out.with_name(out.name + PARTIAL)
        self.geometry = replace(checkpoint.geometry, slices=slices)
        self.layout = RecordLayout.of(self.geometry)
        self.identity = checkpoint.identity()
        self.deep = deep
        self.threads = threads
        self.layer_bytes = self.geometry.experts * self.layout.stride
        self.sums_bytes = 8 * self.geometry.experts * self.geometry.slices
        self._local = threading.local()

    def existing(self) -> Manifest | None:
        """The manifest of a whole store at OUT that is the one to build; None if OUT is free; else StoreError."""
        if self.out.is_symlink() and not (self.out / fmt.FILE).exists():
            raise StoreError(
                f"{self.out} is a link that leads to no store: expected a free name; name the folder itself, or "
                "remove the link"
            )
        if not self.out.exists() or (self.out.is_dir() and not any(self.out.iterdir())):
            return None
        remedy = "choose another OUT, or remove that folder yourself"
        if not (self.out / fmt.FILE).exists():
            raise StoreError(f"{self.out} exists and is no store: expected a free name; {remedy}")
        with Store.open(self.out) as store:
            found = store.manifest
        for what, wanted, have in (
            ("checkpoint identity", self.identity, found.checkpoint.identity),
            ("slices", self.geometry.slices, found.slices),
        ):
            if wanted != have:
                raise StoreError(
                    f"{self.out} is the store of another build: expected {what} {wanted}, found {have}; {remedy}"
                )
        return found

    def run(self, check: int, progress: Report | None) -> BuildReport:
        """Build what is missing, check, write store.json and give the folder its name. The lock is held."""
        self.checkpoint.require_experts()
        layers = range(len(self.checkpoint.moe_layers))
        self._write_plan()
        missing = [layer for layer in layers if not self._is_whole(layer)]
        self._check_space(missing)
        with ThreadPoolExecutor(self.threads, "moetier-build") as pool:
            meter = Meter("build", len(layers) * self.geometry.experts, progress)
            meter.add((len(layers) - len(missing)) * self.geometry.experts)
            checker = Checker(self.checkpoint, self.layout, check, pool, progress)
            for layer in layers:
                if layer in missing:
                    self._build_layer(layer, pool, meter)
                if layer in missing or not self.checkpoint.shards.remote:
                    checker.check(layer, self._files(layer))
        manifest = describe(self.checkpoint, self.geometry, self.partial, self.deep)
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
        with ThreadPoolExecutor(self.threads, "moetier-check") as pool:
            checker = Checker(self.checkpoint, self.layout, check, pool, progress)
            for layer, moe in enumerate(self.checkpoint.moe_layers):
                if not self.checkpoint.shards.remote:
                    checker.check(layer, layer_files(self.out, moe.number))
            return checker.checked

    def clean(self, folder: Path) -> None:
        """Remove what only a build needs; the folder too if nothing is left in it."""
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
            identity=self.identity,
            source_format=self.checkpoint.source_format,
            requantized=self.checkpoint.requantized,
            slices=self.geometry.slices,
            layers=layers,
            experts=self.geometry.experts,
            record_stride=self.layout.stride,
            bytes=layers * self.layer_bytes,
            layers_built=built,
            layers_resumed=resumed,
            experts_checked=checked,
            already_complete=False,
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
            "identity": self.identity,
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
                f"{self.partial} is the rest of another build: expected {plan}, found {found}; "
                "remove that folder, or build into another OUT"
            )

    def _is_whole(self, layer: int) -> bool:
        try:
            files = self._files(layer)
            return files.records.stat().st_size == self.layer_bytes and files.sums.stat().st_size == self.sums_bytes
        except FileNotFoundError:
            return False

    def _check_space(self, missing: list[int]) -> None:
        with store_errors(f"{self.partial} cannot be read"):
            status = os.statvfs(self.partial)
            begun = sum(
                p.stat().st_blocks * 512 for p in (self._files(layer).records for layer in missing) if p.exists()
            )
        free = status.f_bavail * status.f_frsize
        need = len(missing) * (self.layer_bytes + self.sums_bytes) - begun
        if need > free:
            raise StoreError(
                f"{self.out} needs {need / 1e9:.3f} GB more, found {free / 1e9:.3f} GB free on its file system; "
                "free some space or choose another OUT (layers that are done stay)"
            )

    def _build_layer(self, layer: int, pool: ThreadPoolExecutor, meter: Meter) -> None:
        files = self._files(layer)
        sums = np.zeros((self.geometry.experts, self.geometry.slices), np.uint64)
        losses: list[Loss | None] = [None] * self.geometry.experts
        with store_errors(f"{files.records} cannot be written"):
            files.sums.unlink(missing_ok=True)
            fd = os.open(files.records, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            try:
                os.posix_fallocate(fd, 0, self.layer_bytes)

                def job(expert: int) -> None:
                    record = self._buffer()
                    converted = self.checkpoint.convert(layer, expert)
                    self.layout.pack(converted.expert, record)
                    losses[expert] = converted.loss
                    sums[expert] = list(slice_sums(self.layout, record))
                    write_all(fd, record.data, expert * self.layout.stride)

                for_each(pool, range(self.geometry.experts), job, meter)
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
        if self.checkpoint.reopened().identity() != self.identity:
            raise CheckpointError(
                f"{self.checkpoint.path} was changed during the build; remove {self.partial} and run the command again"
            )
