"""What tests do to stores and checkpoints under a server."""

from __future__ import annotations

from pathlib import Path

from moetier.store.store import Store


def flip_a_bit_of_every_record(store: Path, layer: int) -> None:
    """layer: its index in the store."""
    with Store.open(store) as opened:
        path, stride = opened.record_file(layer), opened.layout.stride
    with path.open("r+b") as file:
        for start in range(0, path.stat().st_size, stride):
            file.seek(start + 100)
            (byte,) = file.read(1)
            file.seek(start + 100)
            file.write(bytes([byte ^ 1]))


def zero_the_weights(model: Path) -> None:
    """What lies behind the header: who opened it before heals nothing from it, and a start refuses it."""
    shards = list(model.glob("*.safetensors"))
    assert shards
    for shard in shards:
        size = shard.stat().st_size
        with shard.open("r+b") as file:
            file.truncate(8 + int.from_bytes(file.read(8), "little"))
            file.truncate(size)
