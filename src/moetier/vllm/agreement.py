"""The ranks of one model agree on what they serve before the first of them computes.

Each rank says what it would do, or why it cannot; all of them then see all of it. So a rank that fails alone fails
every rank at once, with its reason, and two that differ (another store under the same path, another version) never
compute together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from moetier import __version__
from moetier.errors import MoetierError, SettingsError
from moetier.settings import Settings
from moetier.store.store import Store

OWN = frozenset({"failure_file", "counters_folder", "store", "heat_file"})
"""Settings in which ranks may differ: where files lie on their machine."""


@dataclass(frozen=True)
class Facts:
    """Facts that a rank must have in common with the others."""

    version: str
    contract: str
    settings: str
    weights: str
    """Hash of every record's checksums."""
    geometry: str
    """Geometry of the store, its slices included."""
    layers: int

    @classmethod
    def of(cls, settings: Settings, store: Store, layers: int) -> Facts:
        manifest = store.manifest
        weights = hashlib.sha256("".join(layer.sums_sha256 for layer in manifest.layers).encode()).hexdigest()
        return cls(
            __version__,
            manifest.contract,
            settings.model_dump_json(exclude=set(OWN)),
            weights,
            f"{manifest.geometry.model_dump_json()} slices {manifest.slices}",
            layers,
        )


@dataclass(frozen=True)
class Voice:
    """Words of one rank to the others: its facts and the records a layer it has room for, or why it cannot serve."""

    facts: Facts | None = None
    records: int = 0
    error: str = ""


class RankError(MoetierError):
    """Another rank cannot serve, so this one does not."""


def agree(say: Callable[[], tuple[Facts, int]], gather: Callable[[Voice], Sequence[Voice]]) -> int:
    """Records per layer that every rank has room for; the error of the first rank that cannot serve, on all ranks.

    say: facts and records of this rank; may raise. gather: collects the voices of all ranks, in their order.
    """
    own_error: MoetierError | None = None
    try:
        facts, records = say()
        voice = Voice(facts, records)
    except MoetierError as error:
        own_error, voice = error, Voice(error=str(error))
    voices = gather(voice)
    if own_error is not None:
        raise own_error
    for rank, other in enumerate(voices):
        if other.facts is None:
            raise RankError(f"rank {rank} of {len(voices)} cannot serve: {other.error}")
        _check_equal(rank, other.facts, voices[0].facts)
    return min(other.records for other in voices)


def _check_equal(rank: int, found: Facts, expected: Facts | None) -> None:
    if found == expected or expected is None:
        return
    differences = [
        f"{name} {asdict(found)[name]} instead of {value}"
        for name, value in asdict(expected).items()
        if asdict(found)[name] != value
    ]
    raise SettingsError(
        f"the ranks do not serve the same: expected rank {rank} to have what rank 0 has, found "
        f"{'; '.join(differences)}. Give every rank the same version, settings and store"
    )
