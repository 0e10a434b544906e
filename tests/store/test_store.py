"""A built store: what it holds, what opening it checks, and what reading a record verifies."""

import hashlib
import json
import os
import shutil
import threading
from itertools import pairwise

import numpy as np
import pytest
import xxhash

from moetier.contract import Family, LayerGeometry
from moetier.errors import RecordReadError, StoreError
from moetier.store.build import build_store
from moetier.store.check import first_difference
from moetier.store.checkpoint import Checkpoint
from moetier.store.store import Store
from moetier.store.verify import verify_store
from tests.store.checkpoints import write_checkpoint
from tests.store.older import overwrite


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """A checkpoint and its store of two slices; never written to."""
    folder = tmp_path_factory.mktemp("pristine")
    overrides = {"model_type": "deepseek_v4", "swiglu_limit": 7.5}
    made = write_checkpoint(
        folder / "c", hidden=96, intermediate=64, naming="deepseek_v4", shards=2, config_overrides=overrides
    )
    build_store(made.path, folder / "s", slices=2)
    return made, folder / "s"


@pytest.fixture
def store(pristine, tmp_path):
    """A copy of the store that a test may damage."""
    shutil.copytree(pristine[1], tmp_path / "s")
    return tmp_path / "s"


def flip(path, at, bit=1):
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ bit]))


def test_every_record_is_the_expert_of_the_checkpoint(pristine):
    made, path = pristine
    with Store.open(path, Checkpoint.open(made.path).identity()) as store:
        record = np.empty(store.manifest.record_stride, np.uint8)
        for (number, expert), wanted in made.experts.items():
            layer = store.layer_index(number)
            store.read_record(layer, expert, record)
            assert first_difference(store.layout.unpack(record), wanted) is None
            cuts = [0, *(index * store.layout.slice_bytes for index in range(1, store.layout.slices)), record.size]
            slices = [record[begin:end].tobytes() for begin, end in pairwise(cuts)]
            assert store.checksums(layer)[expert].tolist() == [xxhash.xxh3_64_intdigest(data) for data in slices]
            raw = store.record_file(layer).read_bytes()[store.offset(expert) :][: record.size]
            assert raw == record.tobytes()


def test_the_manifest_says_what_is_in_the_store(pristine):
    made, path = pristine
    manifest = Store.open(path).manifest
    assert manifest.layer_geometry == LayerGeometry(hidden=96, intermediate=64, experts=4, top_k=2, slices=2)
    assert manifest.layer_family == Family(swiglu_limit=7.5, route_weight_before_down=True)
    assert [(layer.number, layer.name) for layer in manifest.layers] == [
        (1, "layers.1.ffn.experts"),
        (2, "layers.2.ffn.experts"),
    ]
    assert (manifest.contract, manifest.layout, manifest.checksum) == ("int8x", "tile16", "xxh3_64")
    assert manifest.checkpoint.identity == Checkpoint.open(made.path).identity()
    assert not manifest.checkpoint.requantized


def test_a_folder_holds_nothing_but_the_store(pristine):
    names = {path.name for path in pristine[1].iterdir()}
    assert names == {"store.json"} | {f"layer-0000{n}.{kind}" for n in (1, 2) for kind in ("records", "sums")}


def test_a_layer_that_is_not_in_the_store_is_an_error(pristine):
    with pytest.raises(StoreError, match=r"no experts of layer 7, only of \[1, 2\]"):
        Store.open(pristine[1]).layer_index(7)


def test_the_store_of_another_checkpoint_is_refused_with_both_identities(pristine):
    with pytest.raises(StoreError, match=f"expected identity {'0' * 64}, found .*moetier store build"):
        Store.open(pristine[1], "0" * 64)


@pytest.mark.parametrize("bit", [1, 16, 128])
@pytest.mark.parametrize("place", ["first", "middle", "padding"])
def test_a_flipped_bit_anywhere_in_a_record_is_found(store, place, bit):
    with Store.open(store) as opened:
        stride = opened.manifest.record_stride
        at = {"first": 0, "middle": stride // 2, "padding": stride - 1}[place]
        flip(opened.record_file(1), opened.offset(2) + at, bit)
        record = np.empty(stride, np.uint8)
        with pytest.raises(
            RecordReadError, match=r"layer 2, expert 2 in .*layer-00002.records: (slice [01]: )?checksum .* expected"
        ):
            opened.read_record(1, 2, record)
        for expert in (0, 1, 3):
            opened.read_record(1, expert, record)
    report = verify_store(store)
    assert [(bad.layer, bad.expert) for bad in report.bad] == [(2, 2)]
    assert report.records == 8


def test_two_records_swapped_are_found(store):
    with Store.open(store) as opened:
        stride = opened.manifest.record_stride
        file = opened.record_file(0)
        raw = file.read_bytes()
        file.write_bytes(raw[stride : 2 * stride] + raw[:stride] + raw[2 * stride :])
    assert [(bad.layer, bad.expert) for bad in verify_store(store).bad] == [(1, 0), (1, 1)]


def test_a_file_that_shrinks_while_it_is_open_is_found(store):
    with Store.open(store) as opened:
        record = np.empty(opened.manifest.record_stride, np.uint8)
        os.truncate(opened.record_file(0), opened.offset(3) + 100)
        opened.read_record(0, 2, record)
        with pytest.raises(RecordReadError, match=f"layer 1, expert 3 .*found only 100 of {record.size} bytes"):
            opened.read_record(0, 3, record)


def test_a_whole_store_verifies_on_one_thread_and_on_four(pristine):
    for threads in (1, 4):
        report = verify_store(pristine[1], threads=threads)
        assert (report.bad, report.records, report.layers) == ((), 8, 2)


def test_reads_from_many_threads_give_the_right_records(pristine):
    made, path = pristine
    wrong = []
    with Store.open(path) as store:

        def reader(seed):
            record = np.empty(store.manifest.record_stride, np.uint8)
            for item in np.random.default_rng(seed).integers(0, 8, 100):
                layer, expert = divmod(int(item), 4)
                store.read_record(layer, expert, record)
                if first_difference(store.layout.unpack(record), made.experts[made.layers[layer], expert]):
                    wrong.append((layer, expert))

        threads = [threading.Thread(target=reader, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_a_buffer_of_another_size_is_a_bug(pristine):
    with Store.open(pristine[1]) as store, pytest.raises(ValueError, match="a record has"):
        store.read_record(0, 0, np.empty(100, np.uint8))


def edit(store, change, *, seal=True):
    """Change store.json by a function of its content; seal it again if asked for."""
    path = store / "store.json"
    body = json.loads(path.read_text())
    old = body.pop("seal")
    change(body)
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    body["seal"] = hashlib.sha256(text.encode()).hexdigest() if seal else old
    path.write_text(json.dumps(body))


CHANGES = {
    "another format": (lambda b: b.update(format=2), "expected format 1, which this version reads, found 2"),
    "another contract": (lambda b: b.update(contract="fp8x"), "expected contract 'int8x'"),
    "another layout": (lambda b: b.update(layout="tile32"), "expected layout 'tile16'"),
    "another checksum": (lambda b: b.update(checksum="crc32"), "expected checksum 'xxh3_64'"),
    "an unknown key": (lambda b: b.update(extra=1), "extra"),
    "a key less": (lambda b: b.pop("slices"), "slices"),
    "a type that is not the right one": (lambda b: b["geometry"].update(hidden="96"), "geometry.hidden"),
    "a geometry that cannot be": (lambda b: b["geometry"].update(hidden=97), "no multiple of 32"),
    "another geometry": (lambda b: b["geometry"].update(hidden=128), "expected records of"),
    "another number of experts": (lambda b: b["geometry"].update(experts=8), "sums: expected 128 bytes"),
    "another stride": (lambda b: b.update(record_stride=1), "expected records of"),
    "no layers": (lambda b: b.update(layers=[]), "layers"),
    "a layer twice": (lambda b: b["layers"].append(b["layers"][0]), "a layer number twice"),
    "a file that climbs": (lambda b: b["layers"][0].update(records="../../etc/passwd"), "layers.0.records"),
    "checksums of another layer": (
        lambda b: b["layers"][0].update(sums=b["layers"][1]["sums"]),
        "layer-00002.sums: expected",
    ),
}


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES)
def test_a_store_json_that_is_wrong_is_refused(store, change, message):
    edit(store, change)
    with pytest.raises(StoreError, match=message):
        Store.open(store)


def test_a_store_json_that_was_edited_is_refused(store):
    edit(store, lambda body: body["family"].update(swiglu_limit=7.0), seal=False)
    with pytest.raises(StoreError, match="its seal does not fit"):
        Store.open(store)


def test_the_edit_of_these_tests_leaves_a_store_that_opens(store):
    edit(store, lambda body: None)
    Store.open(store).close()


FILE_DAMAGES = {
    "no store.json": (lambda s: (s / "store.json").unlink(), "is no store: expected store.json"),
    "store.json is no JSON": (lambda s: (s / "store.json").write_text("{"), "expected JSON"),
    "store.json is a list": (lambda s: (s / "store.json").write_text("[]"), "expected a JSON object"),
    "store.json is empty": (lambda s: (s / "store.json").write_text(""), "expected JSON"),
    "store.json is huge": (lambda s: os.truncate(s / "store.json", 1 << 40), "at most"),
    "records are missing": (lambda s: (s / "layer-00001.records").unlink(), "found no file"),
    "records are short": (lambda s: os.truncate(s / "layer-00001.records", 4096), "found 4096"),
    "records are long": (lambda s: os.truncate(s / "layer-00001.records", 1 << 20), "found 1048576"),
    "checksums are missing": (lambda s: (s / "layer-00002.sums").unlink(), "layer-00002.sums cannot be read"),
    "checksums are short": (lambda s: os.truncate(s / "layer-00002.sums", 8), "found 8 with"),
    "a checksum is flipped": (lambda s: flip(s / "layer-00002.sums", 3), "layer-00002.sums: expected"),
}


@pytest.mark.parametrize(("damage", "message"), FILE_DAMAGES.values(), ids=FILE_DAMAGES)
def test_a_store_with_a_damaged_file_does_not_open(store, damage, message):
    damage(store)
    with pytest.raises(StoreError, match=message):
        Store.open(store)


def test_verify_tells_the_checkpoint_and_with_deep_its_content(tmp_path):
    made = write_checkpoint(tmp_path / "c")
    build_store(made.path, tmp_path / "shallow")
    build_store(made.path, tmp_path / "deep", deep=True)
    assert not verify_store(tmp_path / "deep", checkpoint=made.path).bad
    overwrite(made.path, "model.layers.1.mlp.gate.weight", 100, b"\x42")  # no expert, and between two samples
    assert not verify_store(tmp_path / "shallow", checkpoint=made.path).bad
    with pytest.raises(StoreError, match="was built from other weights"):
        verify_store(tmp_path / "deep", checkpoint=made.path)
    other = write_checkpoint(tmp_path / "d", top_k=1)
    with pytest.raises(StoreError, match="was built from another checkpoint"):
        verify_store(tmp_path / "deep", checkpoint=other.path)


def test_no_folder_is_no_store(tmp_path):
    with pytest.raises(StoreError, match="is no store"):
        Store.open(tmp_path / "absent")


@pytest.mark.parametrize("kind", ["pipe", "huge"])
@pytest.mark.parametrize("name", ["store.json", "layer-00001.sums"])
def test_a_pipe_or_a_huge_file_is_refused_at_once(store, name, kind):
    path = store / name
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    else:
        with path.open("wb") as file:
            file.truncate(1 << 40)
    with pytest.raises(StoreError, match="expected a regular file of at most"):
        Store.open(store)


def test_a_record_file_that_is_gone_is_a_clear_error(store):
    with Store.open(store) as opened:
        opened.record_file(0).unlink()
        with pytest.raises(StoreError, match="cannot be read: No such file"):
            opened.read_record(0, 0, np.empty(opened.manifest.record_stride, np.uint8))
