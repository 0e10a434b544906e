"""Kernels that are all wrong alike differ from the definition."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from moetier.contract import Family, LayerGeometry, oracle
from moetier.identity.calls import IdentityError
from moetier.identity.oracle import check_against_oracle, small
from moetier.kernels.cpu import CpuExperts, ThreadPool, available_isas

KINDS = {
    "V4": (LayerGeometry(4096, 2048, 256, 8), Family(swiglu_limit=7.0, route_weight_before_down=True)),
    "plain": (LayerGeometry(512, 256, 64, 6), Family()),
    "sliced": (LayerGeometry(2880, 2880, 128, 4, slices=2), Family(swiglu_limit=10.0)),
    "odd": (LayerGeometry(96, 32, 1, 1), Family()),
}


@pytest.fixture
def pool() -> Iterator[ThreadPool]:
    pool = ThreadPool(2)
    yield pool
    pool.close()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kernel_gives_the_oracle_s_bits(kind: str, pool: ThreadPool) -> None:
    assert check_against_oracle(*KINDS[kind], available_isas(), pool) == len(available_isas())


@pytest.mark.parametrize("kind", KINDS)
def test_the_small_layer_is_of_the_same_kind(kind: str) -> None:
    whole = KINDS[kind][0]
    g = small(whole)
    assert g.slices == whole.slices
    for name in ("hidden", "slice_intermediate"):
        cut, size = getattr(whole, name) // 32, getattr(g, name) // 32
        assert oracle.segments(size) == oracle.segments(cut)
        assert size <= min(cut, 24)


def test_flushed_subnormals_change_nothing() -> None:
    """Neither in the thread that asks, nor in threads that it starts, nor in the oracle."""
    torch = pytest.importorskip("torch")
    if not torch.set_flush_denormal(True):
        pytest.skip("this machine cannot flush subnormals")
    try:
        pool = ThreadPool(2)
        for geometry, family in KINDS.values():
            check_against_oracle(geometry, family, available_isas(), pool)
        pool.close()
    finally:
        torch.set_flush_denormal(False)


def test_kernels_that_are_wrong_alike_are_found(pool: ThreadPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a compiler that takes NaN for impossible: rows that are not finite come out as numbers."""
    right = CpuExperts.try_forward

    def wrong(self: CpuExperts, x: Any, ids: Any, weights: Any, addresses: Any, out: Any) -> Any:
        result = right(self, x, ids, weights, addresses, out)
        out[out == oracle.BF16_NAN] = 0
        return result

    monkeypatch.setattr(CpuExperts, "try_forward", wrong)
    with pytest.raises(IdentityError, match=f"kernel '{available_isas()[0]}' differs from the contract's definition"):
        check_against_oracle(*KINDS["plain"], available_isas(), pool)


def test_one_bit_of_one_kernel_is_found(pool: ThreadPool, monkeypatch: pytest.MonkeyPatch) -> None:
    right = CpuExperts.try_forward

    def wrong(self: CpuExperts, x: Any, ids: Any, weights: Any, addresses: Any, out: Any) -> Any:
        result = right(self, x, ids, weights, addresses, out)
        out.reshape(-1)[0] ^= np.uint16(self.isa == "portable")
        return result

    monkeypatch.setattr(CpuExperts, "try_forward", wrong)
    with pytest.raises(IdentityError, match=r"kernel 'portable' differs .* in 1 of"):
        check_against_oracle(*KINDS["V4"], available_isas(), pool)
