"""Geometries that ship with the package: facts of well-known models, so that a plan needs no download."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from moetier.contract import LayerGeometry
from moetier.decision.facts import Facts
from moetier.errors import CheckpointError
from moetier.files import read_small
from moetier.plan.geometry import Geometry, parse_geometry
from moetier.plan.headers import Headers, folder_headers, hub_headers
from moetier.store.remote.hub import SCHEME

FOLDER = Path(__file__).with_name("shapes")
LARGEST = 1 << 20


def names() -> tuple[str, ...]:
    """Ids of the bundled models."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.json")))


def bundled(name: str) -> Geometry:
    """One of `names`."""
    path = FOLDER / f"{name}.json"
    return parse_geometry(path.read_bytes(), path.name)


def layer_of(name: str, slices: int = 1) -> LayerGeometry:
    """One routed-expert layer of one of `names`."""
    g = bundled(name)
    return LayerGeometry(g.hidden, g.intermediate, g.experts, g.top_k, slices)


@dataclass(frozen=True)
class Known:
    """A bundled model or a geometry file: its geometry, and the few facts that it has for a decision."""

    stated: Geometry

    @property
    def facts(self) -> Facts:
        g = self.stated
        config = {"model_type": g.model_type, "num_hidden_layers": g.layers, "hidden_size": g.hidden}
        config |= {
            "n_routed_experts": g.experts,
            "num_experts_per_tok": g.top_k,
            "moe_intermediate_size": g.intermediate,
        }
        if g.drafter is not None and g.drafter.experts:
            config |= {"dspark_n_routed_experts": g.drafter.experts, "dspark_num_experts_per_tok": g.drafter.top_k}
        return Facts(g.name, config, {}, trimmed_format=g.expert_format, headers=False)

    def check(self) -> None:
        """Nothing: there are no headers to look at."""

    def geometry(self, kv_bytes_per_token: float | None = None) -> Geometry:
        """As it is stated."""
        return self.stated


def find(model: str, kv_bytes_per_token: float | None = None) -> Geometry:
    """The geometry of what `look` finds. kv_bytes_per_token: of a model whose attention is not known."""
    return look(model).geometry(kv_bytes_per_token)


def look(model: str) -> Known | Headers:
    """A bundled id, a checkpoint's folder, hf://ORG/NAME, or a geometry file (*.json)."""
    if model.startswith(SCHEME):
        return hub_headers(model)
    if model in names():
        return Known(bundled(model))
    path = Path(model)
    if model and path.is_dir():
        return folder_headers(path)
    if path.is_file() and path.suffix == ".json":
        return Known(parse_geometry(read_small(path, LARGEST), str(path)))
    near = difflib.get_close_matches(model.lower(), names(), n=1, cutoff=0.5)
    raise CheckpointError(
        f"{model}: expected a bundled model, a checkpoint's folder, hf://ORG/NAME or a geometry file, found none of "
        f"them; {f'did you mean {near[0]}?' if near else 'bundled are ' + ', '.join(names())}"
    )
