"""--check reads by a second decoder: what the first one takes wrong shows."""

import ast
import inspect
import shutil

import numpy as np
import pytest

from moetier.checkpoint.shards import Shards
from moetier.checkpoint.sources import fp8, int4, nvfp4
from moetier.contract.requantize import requantize
from moetier.errors import StoreError
from moetier.store import second
from moetier.store.build import build_store
from moetier.store.check import first_difference
from moetier.store.checkpoint import Checkpoint
from tests.store.mutants import ENCODERS, E, made, same, stored_values
from tests.store.older import taken_for


@pytest.mark.parametrize("kind", ENCODERS)
def test_both_readers_agree_on_every_value(tmp_path, kind):
    m = made(np.random.default_rng(3), kind)
    m.write(tmp_path / "c")
    checkpoint, reader = Checkpoint.open(tmp_path / "c"), second.SecondReader(tmp_path / "c", tuple(m.files))
    for layer, moe in enumerate(checkpoint.moe_layers):
        for expert in range(E):
            assert first_difference(reader.expert(moe.name, expert), checkpoint.read_expert(layer, expert)) is None


def test_it_shares_no_code_with_the_sources():
    modules = [
        node.module for node in ast.walk(ast.parse(inspect.getsource(second))) if isinstance(node, ast.ImportFrom)
    ]
    ours = {module for module in modules if module and module.startswith("moetier")}
    assert ours == {"moetier.errors", "moetier.contract"}


def broken_decode(monkeypatch):
    monkeypatch.setattr(fp8, "E4M3_VALUES", -fp8.E4M3_VALUES)


def broken_zero(monkeypatch):
    monkeypatch.setattr(int4, "ZERO", 7)


def broken_group(monkeypatch):
    monkeypatch.setattr(nvfp4, "E4M3_VALUES", np.roll(nvfp4.E4M3_VALUES, 1))


def broken_place(monkeypatch):
    def read(self, tensor, start=0, nbytes=None):
        other = tensor.name.replace("experts.1.", "experts.0.")
        return real(self, self.tensors[other], start, nbytes)

    real = Shards.read
    monkeypatch.setattr(Shards, "read", read)


FAULTS = {
    "decodes E4M3 wrong": ("fp8 block", broken_decode),
    "another zero": ("int4", broken_zero),
    "scales of other groups": ("nvfp4", broken_group),
    "another expert": ("mxfp4", broken_place),
    "another expert, floats": ("bf16", broken_place),
}


@pytest.mark.parametrize(("kind", "fault"), FAULTS.values(), ids=FAULTS)
def test_a_fault_of_the_first_reader_shows(tmp_path, monkeypatch, kind, fault):
    m = made(np.random.default_rng(3), kind)
    m.write(tmp_path / "c")
    fault(monkeypatch)
    with pytest.raises(StoreError, match=r"store's (gate|up|down) (codes|scales) at .* differs from the checkpoint"):
        build_store(tmp_path / "c", tmp_path / "s", check=E)


@pytest.mark.parametrize("finished", [True, False])
def test_the_remedy_of_a_check_that_failed_works(tmp_path, finished):
    m, other = made(np.random.default_rng(3), "mxfp4"), made(np.random.default_rng(4), "mxfp4")
    m.single(), other.single()
    m.write(tmp_path / "c")
    build_store(tmp_path / "c", tmp_path / "s")
    shutil.rmtree(tmp_path / "c")
    other.write(tmp_path / "c")
    if finished:  # as if no sample of the identity told the two apart
        taken_for(tmp_path / "s", Checkpoint.open(tmp_path / "c"))
    else:
        (tmp_path / "s" / "store.json").unlink()
        (tmp_path / "s").rename(tmp_path / "s.partial")
    with pytest.raises(
        StoreError, match=r"from other weights than these: remove .* run the same command again"
    ) as error:
        build_store(tmp_path / "c", tmp_path / "s", check=E)
    shutil.rmtree(str(error.value).partition(": remove ")[2].partition(" and run the same command again")[0])
    build_store(tmp_path / "c", tmp_path / "s", check=E)
    assert same(stored_values(tmp_path / "s"), other)


@pytest.mark.parametrize("shape", [(32, 64), (5, 96)])
def test_it_rounds_as_the_definition_does_at_the_edges(shape):
    rng = np.random.default_rng(5)
    values = rng.choice(np.arange(-12, 13) / 4, shape) * np.exp2(rng.integers(-130, 120, (shape[0], 1)).astype(float))
    values[0] = 0
    values[1] *= rng.choice([1, 1 + 2.0**-52, 1 - 2.0**-53], shape[1])
    wanted, _ = requantize(lambda a, b: values[a:b], *shape)
    found = second.requantized(lambda part: values[part], shape[0])
    assert np.array_equal(found.codes, wanted.codes)
    assert np.array_equal(found.scales, wanted.scales)
