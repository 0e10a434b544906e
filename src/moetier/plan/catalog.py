"""Geometries that ship with the package: facts of well-known models, so that a plan needs no download."""

from __future__ import annotations

import difflib
from pathlib import Path

from moetier.errors import CheckpointError
from moetier.plan.geometry import Geometry, parse_geometry
from moetier.plan.headers import read_folder, read_hub
from moetier.store.files import read_small
from moetier.store.remote.hub import SCHEME

FOLDER = Path(__file__).with_name("models")
LARGEST = 1 << 20


def names() -> tuple[str, ...]:
    """Ids of the bundled models."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


def bundled(name: str) -> Geometry:
    """One of `names`."""
    path = FOLDER / f"{name}.json"
    return parse_geometry(path.read_bytes(), path.name)


def find(model: str, kv_bytes_per_token: float | None = None) -> Geometry:
    """A bundled id, a checkpoint's folder, hf://ORG/NAME, or a geometry file (*.json).

    kv_bytes_per_token: of a model whose attention is not known.
    """
    if model.startswith(SCHEME):
        return read_hub(model, kv_bytes_per_token)[0]
    if model in names():
        return bundled(model)
    path = Path(model)
    if model and path.is_dir():
        return read_folder(path, kv_bytes_per_token)
    if path.is_file() and path.suffix == ".json":
        return parse_geometry(read_small(path, LARGEST), str(path))
    near = difflib.get_close_matches(model.lower(), names(), n=1, cutoff=0.5)
    raise CheckpointError(
        f"{model}: expected a bundled model, a checkpoint's folder, hf://ORG/NAME or a geometry file, found none of "
        f"them; {f'did you mean {near[0]}?' if near else 'bundled are ' + ', '.join(names())}"
    )
