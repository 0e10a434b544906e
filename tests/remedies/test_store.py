"""What `moetier store` tells its reader to do, done: each message is provoked, its advice followed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable

import pytest

from moetier.store.checkpoint import Checkpoint
from moetier.store.store import Store
from tests.remedies.commands import moetier
from tests.remedies.places import Place, downloaded, elsewhere, remove, removed
from tests.remedies.trouble import Trouble
from tests.store.older import changed

remedy = pytest.mark.remedy
Step = Callable[[Place], object]
Mend = Callable[[Place, str], object]


@remedy("store/manifest.py", "is no store")
def test_no_store_is_built(trouble: Trouble, place: Place) -> None:
    (place / "s").mkdir()
    with trouble:
        Store.open(place / "s")
    place.build()
    trouble.gone()


def other_plan(place: Place) -> None:
    (place / "s.partial").mkdir()
    (place / "s.partial" / "build.json").write_text("{}")


def other_store(place: Place) -> None:
    place.make(seed=1, name="other")
    place.build(source="other")


def other_rest(place: Place) -> None:
    other_store(place)
    (place / "s").rename(place / "s.partial")


def not_mine(place: Place) -> None:
    (place / "s").mkdir()
    (place / "s" / "letter").write_text("a user's")


def bad_record(place: Place) -> None:
    place.build()
    place.spoil()


def of_other_weights(place: Place) -> None:
    other_store(place)
    store = json.loads((place / "s" / "store.json").read_text())
    plan = {key: store[key] for key in ("format", "contract", "layout", "slices", "record_stride")}
    (place / "s").rename(place / "s.partial")
    (place / "s.partial" / "store.json").unlink()
    plan["identity"] = Checkpoint.open(place / "c").identity()
    (place / "s.partial" / "build.json").write_text(json.dumps(plan))


def dead_link(place: Place) -> None:
    (place / "s").symlink_to(place / "real")


def linked(place: Place) -> None:
    place.build()
    (place / "s").rename(place / "real")
    (place / "s").symlink_to(place / "real")
    (place / "real" / "layer-00001.sums").unlink()


def real(place: Place, _: str) -> None:
    place.out = "real"


def in_the_way(place: Place) -> None:
    place.build()
    (place / "s" / "layer-00001.sums").unlink()
    other_plan(place)


def tuned(place: Place) -> None:
    place.build("--deep")
    shutil.copytree(place / "c", place / "before")
    place.tune()


def restored(place: Place, _: str) -> None:
    shutil.rmtree(place / "c")
    shutil.copytree(place / "before", place / "c")


def changed_note(place: Place) -> None:
    place.trim()
    place.edit_json("t/moetier-origin.json", source_format="other")


def changed_copy(place: Place) -> None:
    place.trim()
    path = next((place / "t").glob("*.safetensors"))
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def trimmed_elsewhere(place: Place, _: str) -> None:
    place.trimmed = "elsewhere"
    place.trim()


def trimmed_again(place: Place, _: str) -> None:
    remove(place / "t")
    place.trim()


def opened(place: Place) -> None:
    Checkpoint.open(place / place.trimmed)


def build(place: Place) -> None:
    place.build()


def checked(place: Place) -> None:
    place.build("--check", "4")


def deep(place: Place) -> None:
    place.build("--deep")


def verified(place: Place) -> None:
    moetier("store", "verify", place / place.out, "--checkpoint", place / "c")


def built_elsewhere(place: Place, _: str) -> None:
    place.out = "elsewhere"
    place.build()


def config(**keys: object) -> Step:
    return lambda place: place.edit_json("c/config.json", **keys)


def manifest(text: str) -> Step:
    def change(place: Place) -> None:
        place.build()
        path = place / "s" / "store.json"
        path.write_text(path.read_text().replace('"format": 1', '"format": 99') if text == "newer" else text)

    return change


def stride(place: Place) -> None:
    place.build()
    changed(place / "s", lambda store: store.update(record_stride=8192))


def layer_twice(place: Place) -> None:
    place.build()
    changed(place / "s", lambda store: store["layers"].append(store["layers"][0]))


def info(place: Place) -> None:
    moetier("store", "info", place / place.out)


def cut(place: Place) -> None:
    path = next((place / "c").glob("*.safetensors"))
    os.truncate(path, path.stat().st_size - 1)


def twice(place: Place) -> None:
    remove(place / "c" / "model.safetensors.index.json")
    for number, path in enumerate(sorted((place / "c").glob("*.safetensors"))):
        path.rename(place / "c" / f"part-{number}.safetensors")
    shutil.copy(place / "c" / "part-0.safetensors", place / "c" / "stray.safetensors")


def without_stray(place: Place, text: str) -> None:
    assert "stray.safetensors" in text
    remove(place / "c" / "stray.safetensors")


def first_gone(place: Place, _: str) -> None:
    remove(place / "s")


def misnamed(place: Place) -> None:
    (place / "c").rename(place / "real")
    (place / "c").mkdir()


def the_right_folder(place: Place, _: str) -> None:
    remove(place / "c")
    (place / "real").rename(place / "c")


def of_the_trimmed(place: Place) -> None:
    place.trim()
    (place / "c").rename(place / "real")
    (place / "t").rename(place / "c")
    place.out = "new"


CASES: list[tuple[str, str, Step, Step, tuple[Mend, ...]]] = [
    (
        "store/build.py",
        "expected {}, found {}; remove {} and run the build again",
        other_plan,
        build,
        (removed, elsewhere),
    ),
    ("store/build.py", "{} is the rest of another build: {}; remove", other_rest, build, (removed, elsewhere)),
    ("store/check.py", "which builds this layer anew", bad_record, checked, (removed,)),
    ("store/check.py", "from other weights than these", of_other_weights, checked, (removed, elsewhere)),
    ("store/finished.py", "is a link that leads to no store", dead_link, build, (first_gone, real)),
    ("store/finished.py", "remove {} yourself and run the build again", not_mine, build, (removed, elsewhere)),
    ("store/finished.py", "remove {} yourself and run the build again", other_store, build, (removed, elsewhere)),
    ("store/finished.py", "has damaged files, and is a link", linked, build, (real,)),
    ("store/finished.py", "is in the way of building them anew", in_the_way, build, (removed,)),
    ("store/finished.py", "restore the checkpoint", tuned, deep, (restored, elsewhere)),
    ("store/verify.py", "restore the checkpoint", tuned, verified, (restored, built_elsewhere)),
    (
        "store/checkpoint.py",
        "trim the whole checkpoint again, into another",
        changed_copy,
        opened,
        (trimmed_elsewhere,),
    ),
    ("store/origin.py", "trim the whole checkpoint again", changed_note, opened, (trimmed_elsewhere, trimmed_again)),
    ("store/checkpoint.py", "was trimmed and has no experts", of_the_trimmed, build, (the_right_folder,)),
    ("checkpoint/config.py", "which no model has", config(num_hidden_layers=3_000_000_000), build, (downloaded,)),
    ("store/manifest.py", "which this version reads", manifest("newer"), info, (built_elsewhere,)),
    ("store/manifest.py", "or remove this one first", manifest("{"), build, (elsewhere, first_gone)),
    ("store/store.py", "build the store again with this version, into another", stride, info, (built_elsewhere,)),
    ("store/store.py", "build the store again with this version, into another", layer_twice, info, (built_elsewhere,)),
    ("checkpoint/json_files.py", "give the folder that holds config.json", misnamed, build, (the_right_folder,)),
    ("checkpoint/shards.py", "truncated or damaged: download it again", cut, build, (downloaded,)),
    ("checkpoint/shards.py", "remove the file that does not belong", twice, build, (without_stray,)),
]


@pytest.mark.parametrize(
    ("wrong", "work", "mend"),
    [
        pytest.param(wrong, work, mend, id=f"{wrong.__name__}-{mend.__name__}", marks=remedy(path, part))
        for path, part, wrong, work, mends in CASES
        for mend in mends
    ],
)
def test_what_is_in_the_way_of_a_store(trouble: Trouble, place: Place, wrong: Step, work: Step, mend: Mend) -> None:
    wrong(place)
    with trouble:
        work(place)
    mend(place, trouble.text)
    work(place)
    trouble.gone()


@remedy("checkpoint/config.py", "serve it with vLLM as it is if it fits")
def test_a_config_of_another_family(trouble: Trouble, place: Place) -> None:
    """VLLM has its own idea of the family; its loader reads every tensor, the experts' too."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    names = set(Checkpoint.open(place / "c").tensors)
    place.edit_json("c/config.json", num_experts_per_tok=None)
    with trouble:
        Checkpoint.open(place / "c")
    source = DefaultModelLoader.Source(str(place / "c"), revision=None)
    stock = DefaultModelLoader(LoadConfig(safetensors_load_strategy="lazy"))
    assert {name for name, _ in stock._get_weights_iterator(source)} == names
    trouble.gone()
