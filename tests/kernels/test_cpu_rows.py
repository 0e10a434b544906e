"""`CpuExperts.rows`: each pair's answer before the combination, so that tiers can share a step."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from moetier.contract import Family, LayerGeometry, oracle
from moetier.kernels.cpu import CpuExperts, ThreadPool, available_isas

from .support import assert_same_bits, expected, make_inputs, make_layer, run_forward

FAMILIES = {"plain": Family(), "clamped": Family(0.75), "weight-inside": Family(10.0, route_weight_before_down=True)}
UNTOUCHED = np.float32(-12345.5)


@pytest.fixture(scope="module", params=[1, 2], ids=lambda n: f"threads{n}")
def pool(request):
    pool = ThreadPool(request.param)
    yield pool
    pool.close()


@pytest.fixture(params=available_isas())
def isa(request):
    return request.param


@pytest.fixture(params=FAMILIES.values(), ids=FAMILIES.keys())
def family(request):
    return request.param


def combine(rows, ids, weights, experts, family):
    """Contract 7 from rows float32 [T, top_k, hidden]."""
    acc = np.zeros((rows.shape[0], rows.shape[2]), np.float32)
    with np.errstate(all="ignore"):
        for token, order in enumerate(np.argsort(ids, axis=1, kind="stable")):
            for k in order:
                if 0 <= ids[token, k] < experts:
                    factor = np.float32(1) if family.route_weight_before_down else weights[token, k]
                    acc[token] += oracle.flush(rows[token, k] * factor)
    return oracle.to_bf16(acc)


def run_rows(kernel, layer, inputs, held=None):
    x, ids, weights = inputs
    addresses = layer.addresses.copy()
    if held is not None:
        addresses[~held] = 0
    out = np.full((*ids.shape, layer.geometry.hidden), UNTOUCHED, np.float32)
    listed = kernel.rows(x, ids, weights, addresses, out)
    return out, listed


@pytest.mark.parametrize(
    ("hidden", "inner", "slices"), [(96, 64, 1), (32, 32, 1), (512, 256, 4)], ids=["odd", "one-block", "slices"]
)
@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_rows_combined_are_the_layer(pool, isa, family, tokens, hidden, inner, slices):
    rng = np.random.default_rng(tokens + hidden)
    geometry = LayerGeometry(hidden, inner, experts=5, top_k=3, slices=slices)
    layer = make_layer(rng, geometry)
    inputs = x, ids, weights = make_inputs(rng, geometry, tokens)
    kernel = CpuExperts(geometry, family, pool, isa=isa, max_tokens=tokens)
    rows, _ = run_rows(kernel, layer, inputs)
    wanted = expected(layer, x, ids, weights, family)
    assert_same_bits(combine(rows, ids, weights, geometry.experts, family), wanted)
    assert_same_bits(run_forward(kernel, layer, x, ids, weights), wanted)  # nothing of the rows is left in the object


def test_two_tiers_share_a_step(pool, isa, family):
    """Two objects that hold different experts write into one buffer; bf16 input, int64 ids, some of them -1."""
    rng = np.random.default_rng(0)
    geometry = LayerGeometry(128, 96, experts=8, top_k=4)
    layer = make_layer(rng, geometry)
    x, ids, weights = make_inputs(rng, geometry, 33)
    ids[::3, 1] = -1
    ids[5] = [8, -7, 2**31 - 1, 3]
    held = rng.random(geometry.experts) < 0.5
    rows = np.full((33, 4, 128), UNTOUCHED, np.float32)
    for part in (held, ~held):
        kernel = CpuExperts(geometry, family, pool, isa=isa, max_tokens=33)
        addresses = np.where(part, layer.addresses, np.uint64(0))
        listed, pairs = kernel.rows(oracle.to_bf16(x), ids.astype(np.int64), weights, addresses, rows)
        assert part[listed].all()
        assert pairs.tolist() == [(ids == expert).sum() for expert in listed]
    outside = (ids < 0) | (ids >= 8)
    assert (rows[outside] == UNTOUCHED).all()
    assert_same_bits(combine(rows, ids, weights, 8, family), expected(layer, x, ids, weights, family))


def test_rows_of_absent_experts_stay(pool, isa, family):
    rng = np.random.default_rng(1)
    geometry = LayerGeometry(64, 64, experts=4, top_k=2)
    layer = make_layer(rng, geometry)
    inputs = make_inputs(rng, geometry, 20)
    held = np.array([True, False, True, False])
    kernel = CpuExperts(geometry, family, pool, isa=isa, max_tokens=20)
    rows, (listed, _) = run_rows(kernel, layer, inputs, held)
    computed = held[inputs[1]]
    assert listed.tolist() == [0, 2]
    assert (rows[~computed] == UNTOUCHED).all()
    assert (rows[computed] != UNTOUCHED).all()
    nothing, (listed, _) = run_rows(kernel, layer, inputs, np.zeros(4, bool))
    assert (nothing == UNTOUCHED).all()
    assert listed.size == 0


def test_an_expert_twice_in_a_token(pool, isa, family):
    rng = np.random.default_rng(2)
    geometry = LayerGeometry(64, 64, experts=3, top_k=3)
    layer = make_layer(rng, geometry)
    x, _, weights = make_inputs(rng, geometry, 25)
    ids = rng.integers(0, 3, (25, 3)).astype(np.int32)
    rows, _ = run_rows(CpuExperts(geometry, family, pool, isa=isa, max_tokens=25), layer, (x, ids, weights))
    assert_same_bits(combine(rows, ids, weights, 3, family), expected(layer, x, ids, weights, family))


def test_bad_rows_are_nan(pool, isa, family):
    rng = np.random.default_rng(3)
    geometry = LayerGeometry(64, 64, experts=3, top_k=2)
    layer = make_layer(rng, geometry)
    x, ids, weights = make_inputs(rng, geometry, 9)
    x[4, 7] = np.inf
    kernel = CpuExperts(geometry, family, pool, isa=isa, max_tokens=9)
    rows, _ = run_rows(kernel, layer, (x, ids, weights))
    assert np.isnan(rows[4]).all()
    assert np.isfinite(np.delete(rows, 4, 0)).all()
    assert kernel.bad_rows == 1


def test_every_isa_writes_the_same_rows(pool, family):
    rng = np.random.default_rng(4)
    geometry = LayerGeometry(256, 128, experts=6, top_k=3, slices=2)
    layer = make_layer(rng, geometry, (100, 140))
    inputs = make_inputs(rng, geometry, 40)
    found = {
        isa: run_rows(CpuExperts(geometry, family, pool, isa=isa, max_tokens=40), layer, inputs)[0].view(np.uint32)
        for isa in available_isas()
    }
    reference = found.pop("portable")
    assert [isa for isa, rows in found.items() if (rows != reference).any()] == []


def test_a_step_in_pieces_after_rows(pool):
    """Rows in the middle of a step drop that step, and leave no trace in the next."""
    rng = np.random.default_rng(5)
    geometry = LayerGeometry(64, 64, experts=3, top_k=2)
    layer = make_layer(rng, geometry)
    inputs = make_inputs(rng, geometry, 4)
    kernel = CpuExperts(geometry, Family(), pool, max_tokens=4)
    out = np.empty((4, 64), np.uint16)
    kernel.begin(*inputs)
    run_rows(kernel, layer, inputs)
    with pytest.raises(RuntimeError, match="no step is open"):
        kernel.finish(out)
    listed, _ = kernel.begin(*inputs)
    kernel.gate_up(np.arange(listed.size, dtype=np.int32), layer.addresses[listed])
    kernel.down(0, layer.addresses[listed])
    kernel.finish(out)
    assert_same_bits(out, expected(layer, *inputs, Family()))


def test_two_objects_on_one_pool_at_once(pool):
    rng = np.random.default_rng(6)
    geometry = LayerGeometry(256, 128, experts=4, top_k=2)
    layer = make_layer(rng, geometry)
    inputs = make_inputs(rng, geometry, 16)
    wanted, _ = run_rows(CpuExperts(geometry, Family(), pool, max_tokens=16), layer, inputs)
    good = []

    def worker():
        kernel = CpuExperts(geometry, Family(), pool, max_tokens=16)
        good.append(all((run_rows(kernel, layer, inputs)[0] == wanted).all() for _ in range(30)))

    threads = [threading.Thread(target=worker) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert good == [True] * 3


def test_misuse(pool):
    rng = np.random.default_rng(7)
    geometry = LayerGeometry(64, 64, experts=3, top_k=2)
    layer = make_layer(rng, geometry)
    x, ids, weights = make_inputs(rng, geometry, 4)
    kernel = CpuExperts(geometry, Family(), pool, max_tokens=4)
    rows = np.zeros((4, 2, 64), np.float32)
    for wrong in (rows[:3], rows[:, :, ::2], rows.astype(np.float64), rows.reshape(8, 64)):
        with pytest.raises(ValueError, match=r"out: expected float32 \[4, 2, 64\]"):
            kernel.rows(x, ids, weights, layer.addresses, wrong)
    rows.flags.writeable = False
    with pytest.raises(ValueError, match="writable"):
        kernel.rows(x, ids, weights, layer.addresses, rows)
    rows = np.zeros((4, 2, 64), np.float32)
    with pytest.raises(ValueError, match="multiple of 64"):
        kernel.rows(x, ids, weights, layer.addresses + np.uint64(4), rows)
    assert not rows.any()
