"""What is said of a store and a checkpoint that do not belong together, and before weights go; done as it says."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moetier.store.checkpoint import Checkpoint
from moetier.store.delete import delete_source_of
from moetier.store.heal import Healer
from moetier.store.match import compare_some, open_store
from moetier.store.store import Store
from tests.remedies.commands import moetier
from tests.remedies.places import Place, downloaded, elsewhere, remove, removed, run_it
from tests.remedies.trouble import Trouble
from tests.store.older import older_store, older_trimmed

remedy = pytest.mark.remedy
Mend = Callable[[Place, str], object]


@remedy("store/store.py", "found another store in its place; start again")
def test_a_store_that_was_replaced(trouble: Trouble, place: Place) -> None:
    place.build()
    place.make(seed=1, name="other")
    moetier("store", "build", place / "other", place / "new")
    with Store.open(place / "s") as store:
        remove(place / "s")
        (place / "new").rename(place / "s")
        with trouble:
            store.read_record(0, 0, np.empty(4096, np.uint8))
    with Store.open(place / "s") as store:
        store.read_record(0, 0, np.empty(4096, np.uint8))
    trouble.gone()


@remedy("store/store.py", "build one for this checkpoint")
def test_the_store_of_another_checkpoint(trouble: Trouble, place: Place) -> None:
    place.make(seed=1, name="other")
    place.build()
    identity = Checkpoint.open(place / "other").identity()
    with trouble:
        Store.open(place / "s", identity)
    elsewhere(place, trouble.text)
    place.build(source="other")
    Store.open(place / place.out, identity).close()
    trouble.gone()


@pytest.mark.parametrize("restore", [True, False], ids=["restored", "built-elsewhere"])
@remedy("store/heal.py", "Restore the checkpoint or build the store again")
def test_a_checkpoint_that_heals_nothing(trouble: Trouble, place: Place, restore: bool) -> None:
    place.build()
    shutil.copytree(place / "c", place / "before")
    place.tune()
    out = np.empty(4096, np.uint8)

    def heal(name: str) -> None:
        with Store.open(place / name) as store:
            Healer(store, Checkpoint.open(place / "c")).heal(0, 2, "a bad record", out)

    with trouble:
        heal("s")
    if restore:
        remove(place / "c")
        (place / "before").rename(place / "c")
    else:
        elsewhere(place, "")
        place.build()
    heal(place.out)
    trouble.gone()


@remedy("store/match.py", "was built from another checkpoint: expected identity")
def test_a_store_for_this_checkpoint(trouble: Trouble, place: Place) -> None:
    place.make(seed=1, name="other")
    place.build()
    other = Checkpoint.open(place / "other")
    with trouble:
        open_store(place / "s", other)
    run_it(place, trouble.text.replace(" OUT`", f" {place / 'elsewhere'}`"))
    open_store(place / "elsewhere", other).close()
    trouble.gone()


@pytest.mark.parametrize("older", [older_store, older_trimmed], ids=["store", "trimmed"])
@remedy("store/match.py", "compares every expert and records more")
def test_what_an_older_moetier_wrote(
    trouble: Trouble, place: Place, older: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    place.trim()
    older(place / ("s" if older == older_store else "t"))
    with open_store(place / "s", Checkpoint.open(place / "t")):
        trouble.said(caplog.text)
    told = caplog.text.replace("WHOLE_CHECKPOINT", str(place / "c")).replace("OTHER_FOLDER", str(place / "new"))
    run_it(place, told)
    caplog.clear()
    with open_store(place / "s", Checkpoint.open(place / ("t" if older == older_store else "new"))):
        assert caplog.text == ""
    trouble.gone()


@pytest.mark.parametrize("restore", [True, False], ids=["restored", "built-elsewhere"])
@remedy("store/match.py", "or restore the checkpoint")
def test_weights_that_no_sample_tells_apart(trouble: Trouble, place: Place, restore: bool) -> None:
    place.build()
    place.tune()

    def compare(name: str) -> None:
        checkpoint = Checkpoint.open(place / "c")
        with open_store(place / name, checkpoint) as store:
            compare_some(store, checkpoint, each=4)

    with trouble:
        compare("s")
    if restore:
        downloaded(place, "")
        compare("s")
    else:
        run_it(place, trouble.text.replace(" OUT ", f" {place / 'elsewhere'} "))
        compare("elsewhere")
    trouble.gone()


@remedy("store/delete.py", "nothing was deleted. Make it with")
def test_a_trimmed_copy_before_anything_is_deleted(trouble: Trouble, place: Place) -> None:
    place.build()
    with trouble:
        delete_source_of(place / "c", place / "s", place / "t")
    run_it(place, trouble.text)
    assert delete_source_of(place / "c", place / "s", place / "t").bytes
    trouble.gone()


def _linked(place: Place) -> None:
    name = next((place / "t").glob("*.safetensors")).name
    (place / "t" / "twin.safetensors").symlink_to(place / "c" / name)


@pytest.mark.parametrize(
    ("wrong", "mend"),
    [
        pytest.param(Place.spoil, removed, marks=remedy("store/delete.py", "it builds these layers anew")),
        pytest.param(_linked, removed, marks=remedy("store/delete.py", "expected a copy of its own")),
        pytest.param(
            lambda place: place.tune(place.dense(), 100, b"\x42"),
            removed,
            marks=remedy("store/trim.py", "exists and is not the trimmed"),
        ),
    ],
)
def test_nothing_is_deleted_before_it_is_elsewhere(
    trouble: Trouble, place: Place, wrong: Callable[[Place], None], mend: Mend
) -> None:
    place.trim()
    wrong(place)
    with trouble:
        delete_source_of(place / "c", place / "s", place / "t")
    mend(place, trouble.text)
    place.delete()
    trouble.gone()


@remedy("store/delete.py", "was changed meanwhile; nothing was deleted")
def test_a_checkpoint_that_changes_while_it_is_compared(trouble: Trouble, place: Place) -> None:
    place.trim()
    with trouble:
        delete_source_of(place / "c", place / "s", place / "t", lambda at: _touch(place, at))
    _touch(place, None)
    place.delete()
    trouble.gone()


def _touch(place: Place, at: Any) -> None:
    """Change config.json at the end of what is compared; None changes it back."""
    path = place / "c" / "config.json"
    text = path.read_text().rstrip()
    if at is None:
        path.write_text(text)
    elif (at.stage, at.done) == ("compare", at.total):
        path.write_text(text + " ")
