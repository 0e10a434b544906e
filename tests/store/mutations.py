"""Mutated checkpoints by class: each is right in a way that a release may be, or wrong in one thing.

A right one must give a store of exactly its values. A wrong one must be refused, or give the values that were meant.
"""

from __future__ import annotations

import logging
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moetier.errors import MoetierError
from moetier.store.build import build_store
from tests.store import mutate_files as files
from tests.store import mutate_weights as weights
from tests.store.mutants import E, same, stored_values

CLASSES = {
    "names": (
        (files.spelled, files.drafted, files.fused, files.neighbours),
        (files.renamed, files.gone, files.one_more, files.spelled_twice, files.two_names),
    ),
    "index": (
        (files.stale, files.beside, files.second_index, files.linked),
        (files.unlisted, files.astray, files.elsewhere, files.contradiction, files.no_map),
    ),
    "shards": (
        (files.numbered, files.lone),
        (files.damaged, files.incomplete, files.mixed, files.exchanged),
    ),
    "companions": (
        (weights.activation_scales, weights.shapes_or_none, files.neighbours),
        (weights.companion, weights.wrong_shape_note, weights.without_scale, weights.below_the_experts),
    ),
    "dtypes": ((weights.other_dtypes, weights.formats_by_layer), (weights.relabelled, weights.wider)),
    "scales": (
        (weights.blocks, weights.groups),
        (weights.other_block, weights.other_group, weights.not_a_number, weights.turned, weights.cut),
    ),
    "config": (
        (weights.nested, weights.aliases, weights.first_dense, weights.left_out, weights.said_right),
        (weights.wrong_size, weights.wrong_layers, weights.inputs_changed, weights.said_wrong),
    ),
}
"""Class of mutation: right ones, wrong ones."""
RIGHT = 0.4
CHECKED = 5
"""Every so many builds are checked by the second reader too."""


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant. wrong: what must not be; "" if all is well."""

    kind: str
    mutation: str
    result: str
    wrong: str = ""


def outcome(seed: int, number: int, folder: Path) -> Outcome:
    """Make mutant `number` of a campaign, build its store and compare; folder must not be there, and is removed."""
    rng = np.random.default_rng([seed, number])
    kind = tuple(CLASSES)[number % len(CLASSES)]
    right = rng.random() < RIGHT
    mutations = CLASSES[kind][0 if right else 1]
    mutation = mutations[int(rng.integers(len(mutations)))]
    mutant = mutation(rng)
    name = f"{mutation.__name__} of {mutant.kind}, number {number}"
    try:
        mutant.write(folder / "c")
        build_store(folder / "c", folder / "s", threads=1, check=E if number % CHECKED == 0 else 0)
        equal = same(stored_values(folder / "s"), mutant)
        wrong = "" if equal else f"silent difference: {name}"
        return Outcome(kind, name, "right, equal" if right else "wrong, harmless", wrong)
    except MoetierError as error:
        return Outcome(kind, name, "wrong, refused", f"false refusal: {name}: {error}" if right else "")
    except Exception as error:
        return Outcome(kind, name, "crashed", f"crash: {name}: {type(error).__name__}: {error}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def campaign(seed: int, count: int, folder: Path) -> tuple[Counter[tuple[str, str]], list[str]]:
    """Outcomes by class, and what must not be."""
    logging.getLogger("moetier.checkpoint.index").setLevel(logging.ERROR)
    counts: Counter[tuple[str, str]] = Counter()
    wrong = []
    for number in range(count):
        found = outcome(seed, number, folder / str(number))
        counts[found.kind, found.result] += 1
        if found.wrong:
            wrong.append(found.wrong)
    return counts, wrong
