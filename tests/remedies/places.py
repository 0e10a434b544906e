"""A checkpoint with its store and its trimmed copy, for scenarios of `moetier store`."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from moetier.store.checkpoint import Checkpoint, is_expert_tensor
from moetier.store.store import Store
from tests.remedies.commands import moetier
from tests.store.checkpoints import write_checkpoint
from tests.store.older import overwrite

WEIGHT = "model.layers.1.mlp.experts.2.up_proj.weight"


@dataclass
class Place:
    """Names in a folder of its own: c is the checkpoint, s its store, t its trimmed copy; nothing is there yet."""

    folder: Path
    out: str = "s"
    """Name of the store to build; a remedy may choose another."""
    trimmed: str = "t"

    def __truediv__(self, name: str) -> Path:
        return self.folder / name

    def make(self, seed: int = 0, name: str = "c") -> Path:
        """Write a checkpoint; `other` weights have another seed."""
        return write_checkpoint(self / name, shards=3, seed=seed).path

    def build(self, *more: str | Path, source: str = "c") -> None:
        """`moetier store build`; afterwards the store opens."""
        moetier("store", "build", self / source, self / self.out, *more)
        Store.open(self / self.out).close()

    def trim(self) -> None:
        """The same with --trim; afterwards the trimmed copy opens."""
        self.build("--trim", self / self.trimmed)
        Checkpoint.open(self / self.trimmed)

    def delete(self) -> None:
        """The same with --delete-source."""
        self.build("--check", "1", "--trim", self / "t", *["--delete-source"] * 2)
        assert not list((self / "c").glob("*.safetensors"))

    def spoil(self, layer: int = 1) -> None:
        """Records of a layer go bad on the disk."""
        with (self / "s" / f"layer-{layer:05d}.records").open("r+b") as file:
            for expert in range(4):
                file.seek(4096 * expert + 10)
                file.write(b"\xff\x00\xff")

    def tune(self, name: str = WEIGHT, at: int = 400, data: bytes = b"\x33\x77\x11") -> None:
        """Change weights of the checkpoint where no sample of them is taken."""
        overwrite(self / "c", name, at, data)

    def dense(self) -> str:
        """Name of a tensor that is no expert's."""
        return next(name for name in Checkpoint.open(self / "c").tensors if not is_expert_tensor(name))

    def edit_json(self, path: str, **keys: object) -> None:
        """Change keys of a JSON file; None removes one."""
        content = {**json.loads((self / path).read_text()), **keys}
        (self / path).write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def removed(_: Place, text: str) -> None:
    """Remove what the message says to remove."""
    for path in re.findall(r"/[^\s`;:,]+", re.split(r"\b[Rr]emove ", text)[1].partition(" run ")[0]):
        remove(Path(path.rstrip(".")))


def remove(path: Path) -> None:
    """A file, a link or a folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def elsewhere(place: Place, _: str) -> None:
    """Choose another OUT."""
    place.out = "elsewhere"


def again(_: Place, __: str) -> None:
    """Only the command again."""


def downloaded(place: Place, _: str) -> None:
    """Have the checkpoint as it was released."""
    shutil.rmtree(place / "c")
    place.make()


def run_it(_: Place, text: str) -> None:
    """Run the command that the message prints."""
    command = re.findall(r"`moetier (.*?)`", " ".join(text.split()))[-1]
    moetier(*command.split())
