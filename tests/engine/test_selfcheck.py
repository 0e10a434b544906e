"""The identity check at start: silent on a sound machine, and a wrong bit anywhere names the two paths."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from moetier.engine import TieredModel
from moetier.engine.fetch import Fetcher
from moetier.engine.model import IntegrityError
from moetier.engine.recording import Call
from moetier.identity.calls import IdentityError
from moetier.identity.start import self_check
from moetier.kernels.cpu import CpuExperts, available_isas
from moetier.settings import Settings
from moetier.store.build import build_store
from moetier.store.store import Store
from tests.store.checkpoints import write_checkpoint

CALLS = 8


@pytest.fixture(scope="module", params=[1, 4], ids=["whole", "four-slices"])
def store_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("selfcheck")
    made = write_checkpoint(folder / "model", experts=8, hidden=96, intermediate=128, top_k=3)
    build_store(made.path, folder / "store", slices=request.param)
    return folder / "store"


@pytest.fixture
def model(store_path: Path) -> Iterator[TieredModel]:
    with (
        Store.open(store_path) as store,
        TieredModel(Settings(store=store_path, threads=2), store, records=2, max_tokens=8) as model,
    ):
        yield model


def test_sound_machine(model: TieredModel) -> None:
    checked = self_check(model, CALLS)
    assert checked.calls == CALLS
    kernels = {path.partition("/")[2] for path in checked.paths}
    assert kernels == {f"{isa}/{threads} threads" for isa in available_isas() for threads in (1, 2)}
    assert {path.partition("/")[0] for path in checked.paths} == {"DRAM", "disk", "DRAM and disk"}
    assert checked.oracle == len(available_isas())
    assert checked.comparisons == CALLS * min(4, 1 + len(kernels))
    assert model.counters.calls == 0, "the check is not traffic"
    assert model.reader.counters.reads == 0
    assert not model.heat.counts.any()


def test_no_calls(model: TieredModel) -> None:
    assert self_check(model, 0).comparisons == 0


def flip(out: np.ndarray) -> None:
    out.reshape(-1)[-1] ^= 1


def test_kernel_with_one_wrong_bit(model: TieredModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all kernels, only the portable one is wrong, in the last bit of its last value."""
    right = CpuExperts.try_forward

    def wrong(self: CpuExperts, x, ids, weights, addresses, out):  # type: ignore[no-untyped-def]
        result = right(self, x, ids, weights, addresses, out)
        if self.isa == "portable":
            flip(out)
        return result

    monkeypatch.setattr(CpuExperts, "try_forward", wrong)
    if model.kernel.isa == "portable":
        pytest.skip("this machine has no other kernel")
    with pytest.raises(
        IdentityError, match=rf"'DRAM/{model.kernel.isa}/2 threads' and 'DRAM/portable/. threads?'"
    ) as error:
        self_check(model, CALLS)
    assert error.value.exit_code == 1
    assert "differ in 1 of" in str(error.value)
    assert "layer " in str(error.value)


def test_tier_with_one_wrong_bit(model: TieredModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that read from disk give one wrong bit, steps in DRAM do not."""
    right = CpuExperts.finish

    def wrong(self: CpuExperts, out: np.ndarray) -> None:
        right(self, out)
        flip(out)

    monkeypatch.setattr(CpuExperts, "finish", wrong)
    with pytest.raises(IdentityError, match=r"'DRAM/.*' and 'DRAM and disk/"):
        self_check(model, CALLS)


def test_record_that_changed_in_memory(model: TieredModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights change after their checksum was found right."""
    right = Fetcher.load

    def wrong(self: Fetcher, experts: np.ndarray) -> None:
        right(self, experts)
        if experts.size:
            self.tier.arena.view(int(self.tier._slot_of[experts[0]]))[:2048] ^= 0x07

    monkeypatch.setattr(Fetcher, "load", wrong)
    with pytest.raises(IdentityError, match="differ in"):
        self_check(model, CALLS)


def test_another_path_is_compared_too(model: TieredModel) -> None:
    """As a device's path would be."""
    calls: list[Call] = []

    def device(call: Call) -> np.ndarray:
        calls.append(call)
        return np.zeros(call.x.shape, np.uint16)

    with pytest.raises(IdentityError, match="and 'device slots' differ"):
        self_check(model, CALLS, {"device slots": device})
    assert len(calls) == 1


def test_integrity_of_what_lies_in_memory(model: TieredModel) -> None:
    layers = [model.attach(layer.number) for layer in model.store.manifest.layers]
    assert model.check_integrity() == 2 * len(layers)
    layers[1].tier.record(int(layers[1].tier.resident[0]))[model.part.shift] ^= 1
    with pytest.raises(IntegrityError, match=r"layer 2, expert \d: the record in DRAM has .*checksum") as error:
        model.check_integrity()
    assert error.value.exit_code == 1


def test_integrity_of_the_tables(model: TieredModel) -> None:
    tier = model.attach(model.store.manifest.layers[0].number).tier
    model.attach(model.store.manifest.layers[0].number)
    before = tier.addresses.copy()
    tier.addresses[tier.resident[0]] = 0
    with pytest.raises(IntegrityError, match="the DRAM tier does not agree with itself"):
        model.check_integrity()
    tier.addresses[:] = before


def test_what_raises_at_the_end_keeps_nothing_else_from_ending(store_path: Path) -> None:
    ended: list[str] = []

    def check() -> None:
        ended.append("check")
        raise IntegrityError("tables do not agree")

    with Store.open(store_path) as store:
        model = TieredModel(Settings(store=store_path, threads=1), store, records=1, max_tokens=1)
        model.at_close(check)
        model.at_close(lambda: ended.append("mailbox"))
        with pytest.raises(IntegrityError, match="do not agree"):
            model.close()
    assert ended == ["check", "mailbox"]
    assert not model._saver.is_alive()
