"""Build a store and the trimmed checkpoint to serve it with from a repository that never lies whole on this disk."""

from __future__ import annotations

import functools
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moetier.checkpoint.index import INDEX_SUFFIX, choose_files, lawful
from moetier.checkpoint.shards import MAX_JSON, Shard, Shards, parse_shard, read_config, read_json
from moetier.decision.decide import decide
from moetier.errors import CheckpointError, StoreError
from moetier.files import locked_folder, store_errors, write_durably
from moetier.store.build import BuildReport, build_from
from moetier.store.checkpoint import Checkpoint
from moetier.store.manifest import FILE, Manifest
from moetier.store.match import compare_some
from moetier.store.remote.cache import RangedShards, RemoteShards, ShardCache
from moetier.store.remote.fetch import Fetcher, Patience
from moetier.store.remote.hub import Repository, open_repository
from moetier.store.store import Store
from moetier.store.trim import LOCK, PARTIAL, WEIGHTS, copy_small_files, finish, has_size, is_there, trim_shard
from moetier.store.work import Meter, Report

DOWNLOAD = ".download"
COMMIT = "moetier-commit"
SAMPLES = "samples"
LOOKS, LOOK = 16, 4096
"""Tensors of a trimmed copy that is there, and bytes of each, that are compared with the repository's."""
LOOK_SECONDS = 10.0
"""For experts of it: one a layer, as many layers as come in this time."""
SMALL = 1 << 28
"""A file that is no weight and larger than this is not fetched: it would be a second copy of something."""


@dataclass(frozen=True)
class RemoteReport:
    """Report of a build from a repository. fetched: bytes of shards that came over the network."""

    build: BuildReport
    commit: str
    trimmed: str
    fetched: int


def build_remote(
    source: str,
    out: Path,
    trimmed: Path,
    *,
    keep: int = 4,
    slices: int = 1,
    check: int = 0,
    threads: int | None = None,
    patience: Patience | None = None,
    progress: Report | None = None,
    accept: Callable[[Checkpoint], None] | None = None,
) -> RemoteReport:
    """Build the store `out` and the trimmed checkpoint `trimmed` of hf://ORG/NAME, with at most `keep` shards on disk.

    Killed, the same call resumes: layers that are whole, files that were trimmed and what was fetched of a shard stay.
    accept: called with the headers, before any weight is fetched; what it raises ends the build. None: RefusedError
    where the model could not be served on any machine.
    """
    repository = open_repository(source)
    out, trimmed = out.absolute(), trimmed.absolute()
    download, partial = out.with_name(out.name + DOWNLOAD), trimmed.with_name(trimmed.name + PARTIAL)
    fetcher = Fetcher(repository.headers, patience)
    with locked_folder(download, LOCK), locked_folder(partial, LOCK):
        folder = _small_files(repository, fetcher, download)
        checkpoint, shards = _open(repository, fetcher, folder, keep, progress)
        if accept is None:
            decide(checkpoint.facts).require()
        else:
            accept(checkpoint)
        shards.cache.arrived = shards.keep_sample
        done = is_there(checkpoint, trimmed)
        if not done:
            with store_errors(f"{partial} cannot be written"):
                copy_small_files(folder, partial)
            by_name = {shard.path.name: shard for shard in checkpoint.shards.shards}

            # A shard's other tensors are copied when it arrives: it may be gone when the store is built.
            def arrived(name: str) -> None:
                shards.keep_sample(name)
                trim_shard(Shards(folder, b"", [by_name[name]]), by_name[name], partial, checkpoint.is_stored)

            shards.cache.arrived = arrived
        if done and (out / FILE).exists():
            _compare_some(repository, checkpoint, shards, out, trimmed)
        report = build_from(checkpoint, out, slices=slices, check=check, threads=threads, progress=progress)
        if done:
            shutil.rmtree(partial)
        else:
            _trim_rest(shards, checkpoint.is_stored, partial, progress)
            finish(checkpoint, partial, trimmed)
        _check_of_one_commit(out, trimmed)
        with store_errors(f"{download} cannot be removed"):
            shutil.rmtree(download)
    return RemoteReport(report, repository.commit, str(trimmed), shards.cache.fetched)


def _compare_some(
    repository: Repository, checkpoint: Checkpoint, shards: RemoteShards, out: Path, trimmed: Path
) -> None:
    """StoreError where a finished store and trimmed checkpoint are of another commit whose headers are the same.

    A look at random places, a few ranges fetched for it: what is there is not fetched again.
    """
    ranged = Checkpoint.whole(checkpoint.path, checkpoint.config, checkpoint.config_bytes, RangedShards(shards))
    copy = Checkpoint.open(trimmed)
    remedy = f"choose other names for both, or remove {out} and {trimmed} and run the command again"
    for name in random.sample(sorted(copy.tensors), min(LOOKS, len(copy.tensors))):
        tensor, theirs = copy.tensors[name], ranged.tensors[name]
        size = min(LOOK, tensor.nbytes)
        start = (tensor.nbytes - size) // 2
        if not np.array_equal(copy.shards.read(tensor, start, size), ranged.shards.read(theirs, start, size)):
            raise StoreError(
                f"{trimmed} is of another commit than {repository.commit} of hf://{repository.name}: its tensor {name} "
                f"is another one; {remedy}"
            )
    with Store.open(out) as store:
        try:
            compare_some(store, ranged, each=1, limit=LOOK_SECONDS)
        except StoreError as error:
            raise StoreError(
                f"{out} is of another commit than {repository.commit} of hf://{repository.name}: {error}. Or {remedy}"
            ) from error


def _check_of_one_commit(out: Path, trimmed: Path) -> None:
    """StoreError where one of the two was there before, of another commit."""
    store, copy = Manifest.read(out).checkpoint.identities, Checkpoint.open(trimmed).identities
    if values := store.differs(copy):
        raise StoreError(
            f"{out} and {trimmed} are of different commits: expected identity {values[0]}, found {values[1]}; remove "
            f"{out} and {trimmed} and run the command again"
        )


def _trim_rest(shards: RemoteShards, is_stored: Callable[[str], bool], partial: Path, progress: Report | None) -> None:
    """Shards that the store did not need, or that an earlier run had."""
    meter = Meter("trim", len(shards.shards), progress)
    for shard in shards.shards:
        if not has_size(shard, partial, is_stored):  # what is there is of this commit: not fetched again to compare
            with shards.cache.hold(shard.path.name):
                trim_shard(Shards(shards.folder, b"", [shard]), shard, partial, is_stored)
        meter.add(1)


def _small_files(repository: Repository, fetcher: Fetcher, download: Path) -> Path:
    """Fetch all that is not weights, and give its folder; what is there of another commit is an error."""
    stamp, folder = download / COMMIT, download / "files"
    if not stamp.exists() and {path.name for path in download.iterdir()} - {LOCK}:
        raise CheckpointError(
            f"{download} exists and is no rest of a download, which would be removed in the end: expected a free name; "
            "choose another OUT, or remove that folder yourself"
        )
    if stamp.exists() and stamp.read_text() != repository.commit:
        begun = download.with_name(download.name.removesuffix(DOWNLOAD) + PARTIAL)
        raise CheckpointError(
            f"{download} is the rest of a download of commit {stamp.read_text()}, expected {repository.commit}: give "
            f"the first as hf://{repository.name}@COMMIT, or remove {download} and {begun} and run the command again"
        )
    with store_errors(f"{download} cannot be written"):
        write_durably(stamp, repository.commit.encode())
        folder.mkdir(exist_ok=True)
        for file in repository.files.values():
            path = folder / file.name
            index = file.name.endswith(INDEX_SUFFIX) and "/" not in file.name
            if (file.name.endswith(WEIGHTS) and not index) or file.size > (MAX_JSON if index else SMALL):
                continue
            if not path.exists() or path.stat().st_size != file.size:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_durably(path, fetcher.read(file, 0, file.size))
    return folder


def _open(
    repository: Repository, fetcher: Fetcher, folder: Path, keep: int, progress: Report | None
) -> tuple[Checkpoint, RemoteShards]:
    """The checkpoint by its headers, each fetched by itself; and its shards, which come when they are read."""
    source = f"hf://{repository.name}"
    files = choose_files(source, repository.files, lambda name: read_json(folder / name))
    names = files.names
    if not names:
        raise CheckpointError(
            f"{source}: expected safetensors files, found none; give a repository of whole safetensors weights"
        )
    meter = Meter("headers", len(names), progress)
    shards: dict[str, Shard] = {}
    for name in names:
        read = functools.partial(fetcher.read, repository.files[name])
        shards[name] = parse_shard(folder / name, repository.files[name].size, read)
        meter.add(1)
    cache = ShardCache(folder, {name: repository.files[name] for name in names}, fetcher, keep)
    config, raw = read_config(folder)
    own = lawful(source, files, shards)
    remote = RemoteShards(folder, files.index, own, cache, folder.with_name(SAMPLES), repository.commit, files.unread)
    return Checkpoint.whole(folder, config, raw, remote), remote
