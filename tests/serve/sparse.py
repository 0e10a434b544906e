"""A checkpoint and its store that look like some TB and occupy none: right headers over sparse files."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import numpy as np
import pytest
import xxhash

from moetier.contract import RecordLayout
from moetier.store.build import build_store
from moetier.store.checkpoint import Checkpoint
from moetier.store.manifest import FILE, GeometryEntry, Manifest
from tests.store.checkpoints import write_checkpoint


def huge(folder: Path, *, layers: int, experts: int, hidden: int, intermediate: int) -> tuple[Path, Path]:
    """(checkpoint, store). Both open as real ones do; only their records are zeros."""
    numbers = tuple(range(1, layers + 1))
    model = write_checkpoint(folder / "model", layers=numbers, experts=experts, hidden=32, intermediate=32).path
    store = folder / "store"
    build_store(model, store)
    try:
        _stretch_checkpoint(model, hidden, intermediate)
        _stretch_store(store, Checkpoint.open(model), hidden, intermediate)
    except OSError as error:
        pytest.skip(f"wants sparse files of some TB: {error.strerror}")
    return model, store


def _stretch_checkpoint(model: Path, hidden: int, intermediate: int) -> None:
    config = json.loads((model / "config.json").read_text())
    config |= {"hidden_size": hidden, "moe_intermediate_size": intermediate}
    (model / "config.json").write_text(json.dumps(config))
    (shard,) = model.glob("*.safetensors")
    with shard.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    end = 0
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        first, last = tensor["data_offsets"]
        size = last - first
        if ".mlp.experts." in name:
            rows, k = (hidden, intermediate) if "down_proj" in name else (intermediate, hidden)
            tensor["shape"] = [rows, k // (32 if name.endswith(".scale") else 2)]
            size = math.prod(tensor["shape"])
        tensor["data_offsets"] = [end, end + size]
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with shard.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def _stretch_store(store: Path, model: Checkpoint, hidden: int, intermediate: int) -> None:
    small = Manifest.read(store)
    geometry = GeometryEntry(
        hidden=hidden, intermediate=intermediate, experts=small.geometry.experts, top_k=small.geometry.top_k
    )
    manifest = small.model_copy(update={"geometry": geometry})
    stride = RecordLayout.of(manifest.layer_geometry).stride
    checkpoint = small.checkpoint.model_copy(update={"identity": model.identity(), "headers": model.headers})
    zeros = xxhash.xxh3_64_intdigest(bytes(stride))
    sums = np.full(geometry.experts, zeros, "<u8").tobytes()
    layers = tuple(
        layer.model_copy(update={"sums_sha256": hashlib.sha256(sums).hexdigest()}) for layer in manifest.layers
    )
    manifest = manifest.model_copy(update={"record_stride": stride, "checkpoint": checkpoint, "layers": layers})
    for layer in layers:
        (store / layer.sums).write_bytes(sums)
    (store / FILE).write_bytes(manifest.to_json())
    for records in store.glob("*.records"):
        with records.open("r+b") as file:
            file.truncate(geometry.experts * stride)
