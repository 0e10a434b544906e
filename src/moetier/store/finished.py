"""A store that is there already when its build is asked for: left alone, compared, or repaired.

Where files of it are missing or damaged, it goes back to OUT.partial, and those layers are built anew. Where it says
less of its checkpoint than is asked for now, every expert is compared before more is written down.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from moetier.contract import LayerGeometry, RecordLayout
from moetier.errors import StoreError
from moetier.files import locked_folder, store_errors, sync_folder, write_durably
from moetier.store import manifest as fmt
from moetier.store.checkpoint import Checkpoint
from moetier.store.describe import LayerFiles, layer_files
from moetier.store.identity import Identity
from moetier.store.manifest import Manifest
from moetier.store.match import compare_all
from moetier.store.store import Store
from moetier.store.work import Report

logger = logging.getLogger(__name__)

PARTIAL = ".partial"
LOCK = "build.lock"


@dataclass(frozen=True)
class Target:
    """The store that a build shall end with."""

    checkpoint: Checkpoint
    out: Path
    slices: int
    deep: bool
    threads: int

    def __post_init__(self) -> None:
        if not self.out.name:
            raise StoreError(f"{self.out}: expected the name of a new folder, found the root; choose another OUT")

    @property
    def partial(self) -> Path:
        """Where it is built."""
        return self.out.with_name(self.out.name + PARTIAL)

    @cached_property
    def geometry(self) -> LayerGeometry:
        return replace(self.checkpoint.geometry, slices=self.slices)

    @cached_property
    def layout(self) -> RecordLayout:
        return RecordLayout.of(self.geometry)

    @cached_property
    def known(self) -> Identity:
        """Return what the checkpoint is known by before the build; of one that is fetched meanwhile, its headers."""
        return self.checkpoint.known

    @property
    def layer_bytes(self) -> int:
        """Bytes of a layer's records."""
        return self.geometry.experts * self.layout.stride

    @property
    def sums_bytes(self) -> int:
        """Bytes of a layer's checksums."""
        return 8 * self.geometry.experts * self.geometry.slices

    def other_build(self, found: Manifest) -> str:
        """Return what tells a store from this one, as expected and found; "" if nothing does."""
        if values := self.known.differs(found.checkpoint.identities):
            return f"expected checkpoint identity {values[0]}, found {values[1]}"
        if self.geometry.slices != found.slices:
            return f"expected slices {self.geometry.slices}, found {found.slices}"
        return ""


class Finished:
    """The store at OUT."""

    def __init__(self, target: Target) -> None:
        self.target, self.checkpoint = target, target.checkpoint
        self.out, self.partial = target.out, target.partial

    def manifest(self) -> Manifest | None:
        """The manifest of a whole store at OUT that is the one to build; None if OUT is free, or has damaged files.

        StoreError if anything else is in the way.
        """
        if self.out.is_symlink() and not (self.out / fmt.FILE).exists():
            raise StoreError(
                f"{self.out} is a link that leads to no store: expected a free name; name the folder itself, or "
                "remove the link"
            )
        if not self.out.exists() or (self.out.is_dir() and not any(self.out.iterdir())):
            return None
        remedy = f"choose another OUT, or remove {self.out} yourself and run the build again"
        if not (self.out / fmt.FILE).exists():
            raise StoreError(f"{self.out} exists and is no store: expected a free name; {remedy}")
        found = Manifest.read(self.out)
        if other := self.target.other_build(found):
            raise StoreError(f"{self.out} is the store of another build: {other}; {remedy}")
        if self._damaged(found):
            return None
        Store.open(self.out).close()
        return found

    @contextmanager
    def reopened(self) -> Iterator[None]:
        """Make a store with damaged files at OUT a build that is not finished; what is whole in it stays.

        The lock of OUT.partial is held, and that of the folder which takes its place.
        """
        if not (self.out / fmt.FILE).exists():
            yield
            return
        self.checkpoint.require_experts()
        if self.out.is_symlink():
            raise StoreError(f"{self.out} has damaged files, and is a link: expected the folder itself; name that")
        if {path.name for path in self.partial.iterdir()} - {LOCK}:
            raise StoreError(
                f"{self.out} has damaged files, and {self.partial} is in the way of building them anew: remove "
                f"{self.partial} and run the build again"
            )
        with locked_folder(self.out, LOCK):
            logger.warning("%s has damaged files; until they are built anew it is %s", self.out, self.partial)
            with store_errors(f"{self.out} cannot be renamed to {self.partial}"):
                for files in self._damaged(Manifest.read(self.out)):
                    files.sums.unlink(missing_ok=True)
                (self.partial / LOCK).unlink()
                self.out.rename(self.partial)
                sync_folder(self.out.parent)
            yield

    def settle(self, found: Manifest, progress: Report | None) -> tuple[Manifest, int]:
        """Compare a finished store with the checkpoint where it says less than is asked for now, and write that down.

        Gives the manifest, and how many experts were compared. An older moetier knew a checkpoint by its headers, and
        a build without `deep` did not hash it: then every expert is compared. With `deep`, the content always is.
        """
        entry, whole = found.checkpoint, not self.checkpoint.shards.remote and self.checkpoint.origin is None
        content = self.checkpoint.identity(deep=True) if self.target.deep else None
        if content is not None and entry.content is not None and content != entry.content:
            raise StoreError(
                f"{self.out} was built from other weights than {self.checkpoint.path} holds now: expected content "
                f"{entry.content}, found {content}; restore the checkpoint, or build its store into another folder"
            )
        certain = not whole or self.target.known.certain_of(entry.identities)
        if certain and (content is None or content == entry.content):
            return found, 0
        compared = 0
        if content is None or content != entry.content:
            with Store.open(self.out) as store:
                compared = compare_all(store, self.checkpoint, self.target.threads, progress)
        entry = entry.model_copy(
            update={
                "identity": self.checkpoint.identity(),
                "headers": self.checkpoint.headers,
                "content": content or entry.content,
            }
        )
        found = found.model_copy(update={"checkpoint": entry})
        with store_errors(f"{self.out / fmt.FILE} cannot be written"):
            write_durably(self.out / fmt.FILE, found.to_json())
        return found, compared

    def _damaged(self, found: Manifest) -> list[LayerFiles]:
        """Files of the layers of a finished store that are missing, or whose checksums are not those of store.json."""
        layers = (layer_files(self.out, layer.number) for layer in found.layers)
        return [files for files, layer in zip(layers, found.layers, strict=True) if not self._fits(files, layer)]

    def _fits(self, files: LayerFiles, layer: fmt.LayerEntry) -> bool:
        try:
            sums = files.sums.read_bytes() if files.sums.stat().st_size == self.target.sums_bytes else b""
            whole = files.records.is_file() and files.records.stat().st_size == self.target.layer_bytes
        except FileNotFoundError:
            return False
        return whole and hashlib.sha256(sums).hexdigest() == layer.sums_sha256
