"""The CPU kernels give the oracle's bits: every instruction set that this machine has, 1 and 2 threads, both APIs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moetier.contract import Family, LayerGeometry, oracle
from moetier.kernels.cpu import CpuExperts, ThreadPool, available_isas

from .support import assert_same_bits, expected, make_inputs, make_layer, run_forward, run_split

ISAS = available_isas()
PLAIN = Family()
CLAMPED = Family(swiglu_limit=0.75)
WEIGHT_INSIDE = Family(swiglu_limit=10.0, route_weight_before_down=True)
FAMILIES = {"plain": PLAIN, "clamped": CLAMPED, "weight-inside": WEIGHT_INSIDE}


@pytest.fixture(scope="module", params=[1, 2], ids=lambda n: f"threads{n}")
def pool(request):
    pool = ThreadPool(request.param)
    yield pool
    pool.close()


@pytest.fixture(params=ISAS)
def isa(request):
    return request.param


def check_layer(pool, isa, layer, inputs, family, seed=0, prefetch=None, **rank):
    x, ids, weights = inputs
    wanted = expected(layer, x, ids, weights, family, **rank)
    kernel = CpuExperts(layer.geometry, family, pool, isa=isa, max_tokens=max(1, len(x)), prefetch=prefetch, **rank)
    assert_same_bits(run_forward(kernel, layer, x, ids, weights), wanted)
    assert_same_bits(run_split(kernel, layer, x, ids.astype(np.int64), weights, np.random.default_rng(seed)), wanted)
    return wanted


# blocks along K, and S: 1 -> 1, 2 -> 2, 4 -> 4, 8 -> 8, then odd multiples of each class
@pytest.mark.parametrize("inner_blocks", [1, 2, 4, 8, 12], ids=lambda b: f"inner{32 * b}")
@pytest.mark.parametrize("hidden_blocks", [1, 2, 3, 4, 6, 8, 20, 24], ids=lambda b: f"hidden{32 * b}")
def test_every_segment_class(pool, isa, hidden_blocks, inner_blocks):
    rng = np.random.default_rng(hidden_blocks * 100 + inner_blocks)
    geometry = LayerGeometry(32 * hidden_blocks, 32 * inner_blocks, experts=5, top_k=3)
    layer = make_layer(rng, geometry)
    check_layer(pool, isa, layer, make_inputs(rng, geometry, 7), PLAIN)


# From 128 blocks along K on, one row has a kernel of its own on some processors; both ways run on all. 127 and 131 are
# segments of no power of two.
@pytest.mark.parametrize("prefetch", [True, False], ids=["by-instructions", "by-processor"])
@pytest.mark.parametrize("scales", [(118, 124), (0, 254)], ids=["usual-scales", "every-scale"])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("hidden_blocks", [127, 128, 131, 132, 144], ids=lambda b: f"hidden{32 * b}")
def test_long_rows(pool, isa, hidden_blocks, tokens, scales, prefetch):
    rng = np.random.default_rng(hidden_blocks + tokens)
    geometry = LayerGeometry(32 * hidden_blocks, 64, experts=4, top_k=2)
    layer = make_layer(rng, geometry, scales, (118, 124))
    check_layer(pool, isa, layer, make_inputs(rng, geometry, tokens), PLAIN, prefetch=prefetch)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())
@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 9, 17, 64, 300])
def test_token_counts(pool, isa, tokens, family):
    rng = np.random.default_rng(tokens)
    geometry = LayerGeometry(96, 64, experts=6, top_k=2)
    layer = make_layer(rng, geometry)
    wanted = check_layer(pool, isa, layer, make_inputs(rng, geometry, tokens), family)
    assert np.isfinite(oracle.from_bf16(wanted)).all()


@pytest.mark.parametrize(("first", "count"), [(0, 4), (0, 2), (2, 2), (0, 1), (3, 1)])
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())
def test_slices_of_a_rank(pool, isa, family, first, count):
    rng = np.random.default_rng(first * 10 + count)
    geometry = LayerGeometry(64, 256, experts=4, top_k=2, slices=4)
    layer = make_layer(rng, geometry)
    check_layer(pool, isa, layer, make_inputs(rng, geometry, 19), family, first_slice=first, slice_count=count)


@pytest.mark.parametrize("slices", [1, 2, 8])
def test_slice_counts(pool, isa, slices):
    rng = np.random.default_rng(slices)
    geometry = LayerGeometry(96, 256, experts=3, top_k=2, slices=slices)
    check_layer(pool, isa, make_layer(rng, geometry), make_inputs(rng, geometry, 5), WEIGHT_INSIDE)


def test_bf16_input_equals_float32(pool, isa):
    rng = np.random.default_rng(1)
    geometry = LayerGeometry(128, 64, experts=4, top_k=2)
    layer = make_layer(rng, geometry)
    x, ids, weights = make_inputs(rng, geometry, 33)
    kernel = CpuExperts(geometry, PLAIN, pool, isa=isa, max_tokens=33)
    assert_same_bits(
        run_forward(kernel, layer, oracle.to_bf16(x), ids, weights), expected(layer, x, ids, weights, PLAIN)
    )


def test_float32_input_below_bf16_precision(pool, isa):
    rng = np.random.default_rng(2)
    geometry = LayerGeometry(128, 64, experts=4, top_k=2)
    layer = make_layer(rng, geometry)
    _, ids, weights = make_inputs(rng, geometry, 33)
    x = rng.standard_normal((33, 128)).astype(np.float32)
    check_layer(pool, isa, layer, (x, ids, weights), CLAMPED)


def test_every_bf16_value_as_input(pool, isa):
    rng = np.random.default_rng(3)
    geometry = LayerGeometry(256, 32, experts=2, top_k=1)
    layer = make_layer(rng, geometry)
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
    _, ids, weights = make_inputs(rng, geometry, 256)
    wanted = expected(layer, oracle.from_bf16(bits), ids, weights, PLAIN)
    kernel = CpuExperts(geometry, PLAIN, pool, isa=isa, max_tokens=256)
    assert_same_bits(run_forward(kernel, layer, bits, ids, weights), wanted)
    assert kernel.bad_rows == 2  # 0x7F80.. and 0xFF80.. share their rows with large finite values


def test_mixed_magnitudes_of_every_exponent(pool, isa):
    rng = np.random.default_rng(4)
    geometry = LayerGeometry(512, 64, experts=3, top_k=2)
    layer = make_layer(rng, geometry)
    _, ids, weights = make_inputs(rng, geometry, 40)
    exponents = rng.integers(-140, 128, (40, 512))
    x = np.ldexp(rng.uniform(1, 2, (40, 512)), exponents).astype(np.float32) * rng.choice([-1, 1], (40, 512))
    check_layer(pool, isa, layer, (x.astype(np.float32), ids, weights), PLAIN)


@pytest.mark.parametrize("down", ["all", "usual"])
@pytest.mark.parametrize("scales", [(0, 254), (2, 230), (30, 130)], ids=["every", "bf16", "no-overflow"])
def test_scales_of_every_value(pool, isa, scales, down):
    rng = np.random.default_rng(5)
    geometry = LayerGeometry(256, 128, experts=4, top_k=2)
    layer = make_layer(rng, geometry, scales, scales if down == "all" else (118, 124))
    check_layer(pool, isa, layer, make_inputs(rng, geometry, 40), PLAIN)


@pytest.mark.parametrize("exponent", [-106, -60, -8, 0, 40, 121, 122])
@pytest.mark.parametrize("scale", [0, 1, 2, 22, 23, 120, 127, 200, 238, 239, 240, 252, 253, 254])
def test_edges_of_the_shift(pool, isa, scale, exponent):
    """The shift c = e + s - 128 at and around its bounds -126 and 111, and powers that bf16 operands just hold."""
    rng = np.random.default_rng(scale * 1000 + exponent + 500)
    geometry = LayerGeometry(64, 64, experts=2, top_k=1)
    layer = make_layer(rng, geometry, (scale, scale), (118, 124))
    x = rng.integers(-127, 128, (24, 64)).astype(np.float32)
    x[:, ::32] = 127
    x[0, :32] = 0
    _, ids, weights = make_inputs(rng, geometry, 24)
    with np.errstate(over="ignore"):
        x = np.ldexp(x, exponent).astype(np.float32)
    check_layer(pool, isa, layer, (x, ids, weights), PLAIN)


def test_the_largest_finite_inputs(pool, isa):
    """Their blocks have e = 122 and q = 64, and 64 * 2^122 is no float32."""
    rng = np.random.default_rng(17)
    geometry = LayerGeometry(64, 64, experts=2, top_k=1)
    layer = make_layer(rng, geometry, (2, 6), (118, 124))
    x, ids, weights = make_inputs(rng, geometry, 24)
    x = np.where(rng.random(x.shape) < 0.2, np.sign(x) * oracle.from_bf16(np.full(x.shape, 0x7F7F, np.uint16)), x)
    wanted = check_layer(pool, isa, layer, (x, ids, weights), PLAIN)
    assert np.isfinite(oracle.from_bf16(wanted)).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=["nan", "inf", "minus-inf"])
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())
def test_bad_rows_stay_in_their_rows(pool, isa, bad, family):
    rng = np.random.default_rng(6)
    geometry = LayerGeometry(128, 64, experts=3, top_k=2)
    layer = make_layer(rng, geometry)
    x, ids, weights = make_inputs(rng, geometry, 12)
    x[4, 77] = bad
    x[9] = bad
    wanted = check_layer(pool, isa, layer, (x, ids, weights), family)
    is_nan = (wanted == 0x7FC0).all(1)
    assert is_nan.tolist() == [i in (4, 9) for i in range(12)]
    kernel = CpuExperts(geometry, family, pool, isa=isa, max_tokens=12)
    kernel.begin(x, ids, weights)
    assert kernel.bad_rows == 2


@pytest.mark.parametrize("threads", [2, 7])
@pytest.mark.parametrize("bad", [None, 0, 70, 159], ids=["good", "first block", "third block", "last block"])
def test_a_row_that_threads_quantize_together(isa, threads, bad):
    """Of fewer tokens than threads each row is cut into pieces; a bad value in one makes all of the row bad."""
    rng = np.random.default_rng(11)
    geometry = LayerGeometry(160, 64, experts=3, top_k=2)
    layer = make_layer(rng, geometry)
    pool = ThreadPool(threads)
    for tokens in (1, 2):
        x, ids, weights = make_inputs(rng, geometry, tokens)
        x *= np.logspace(-3, 3, geometry.hidden, dtype=np.float32)  # the pieces' exponents differ
        if bad is not None:
            x[0, bad] = np.nan
        wanted = check_layer(pool, isa, layer, (x, ids, weights), PLAIN)
        assert (wanted == 0x7FC0).all(1).tolist() == [bad is not None, False][:tokens]
    pool.close()


def test_bad_rows_only(pool, isa):
    rng = np.random.default_rng(7)
    geometry = LayerGeometry(64, 64, experts=2, top_k=1)
    layer = make_layer(rng, geometry)
    _, ids, weights = make_inputs(rng, geometry, 3)
    wanted = check_layer(pool, isa, layer, (np.full((3, 64), np.inf, np.float32), ids, weights), PLAIN)
    assert (wanted == 0x7FC0).all()


@pytest.mark.parametrize("slices", [1, 4])
def test_overflow_inside_an_expert(pool, isa, slices):
    """Gate and up overflow for some tokens; h of those is not finite, other tokens are not touched."""
    rng = np.random.default_rng(8)
    geometry = LayerGeometry(64, 128, experts=2, top_k=2, slices=slices)
    layer = make_layer(rng, geometry, (200, 215))
    x, ids, weights = make_inputs(rng, geometry, 16)
    x[::2] *= np.float32(2.0**-90)
    x[1] *= np.float32(2.0**30)
    wanted = check_layer(pool, isa, layer, (x, ids, weights), PLAIN)
    assert 0 < (wanted == 0x7FC0).sum() < wanted.size


def test_bf16_rounding_overflows_to_infinity(pool, isa):
    """A finite sum above the largest bf16 rounds to infinity; only a sum that is not finite gives NaN."""
    rng = np.random.default_rng(9)
    geometry = LayerGeometry(64, 64, experts=1, top_k=1)
    layer = make_layer(rng, geometry)
    x, ids, weights = make_inputs(rng, geometry, 16)
    y = oracle.expert_rows(oracle.cut(layer.experts[0], 1), *oracle.quantize(x), None, PLAIN)
    weights[:, 0] = np.float32(3.402e38) / np.abs(y).max(1)
    wanted = check_layer(pool, isa, layer, (x, ids, weights), PLAIN)
    assert np.isin(wanted, [0x7F80, 0xFF80]).any()
    assert not (wanted == 0x7FC0).any()


@pytest.mark.parametrize("weight", [0.0, -1.5, 1e-38, 1e-30, 3e38, np.inf, np.nan])
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES.keys())
def test_route_weights(pool, isa, weight, family):
    rng = np.random.default_rng(10)
    geometry = LayerGeometry(64, 64, experts=3, top_k=2)
    layer = make_layer(rng, geometry)
    x, ids, weights = make_inputs(rng, geometry, 6)
    weights[::2, 1] = weight
    check_layer(pool, isa, layer, (x, ids, weights), family)


def test_zero_blocks_and_zero_codes(pool, isa):
    rng = np.random.default_rng(11)
    geometry = LayerGeometry(128, 64, experts=2, top_k=1)
    layer = make_layer(rng, geometry)
    layer.experts[0].gate.codes[:32] = 0x80  # both zeros
    x, ids, weights = make_inputs(rng, geometry, 6)
    x[0] = 0
    x[1, 32:64] = 0
    x[2] = np.float32(2.0**-101)  # below the flush
    x[3] = -0.0
    check_layer(pool, isa, type(layer)(geometry, layer.experts), (x, ids, weights), PLAIN)


def test_swiglu_over_its_whole_range(pool, isa):
    rng = np.random.default_rng(12)
    geometry = LayerGeometry(32, 256, experts=1, top_k=1)
    layer = make_layer(rng, geometry, (112, 130))
    x = (np.linspace(-3, 3, 64)[:, None] * rng.standard_normal((64, 32))).astype(np.float32)
    ids, weights = np.zeros((64, 1), np.int32), np.ones((64, 1), np.float32)
    check_layer(pool, isa, layer, (x, ids, weights), PLAIN)


def test_an_expert_twice_in_a_token(pool, isa):
    rng = np.random.default_rng(13)
    geometry = LayerGeometry(64, 64, experts=4, top_k=4)
    layer = make_layer(rng, geometry)
    x, _, weights = make_inputs(rng, geometry, 30)
    ids = rng.integers(0, 3, (30, 4)).astype(np.int32)
    check_layer(pool, isa, layer, (x, ids, weights), PLAIN)


def test_ids_outside_the_layer_are_skipped(pool, isa):
    rng = np.random.default_rng(14)
    geometry = LayerGeometry(64, 64, experts=4, top_k=3)
    layer = make_layer(rng, geometry)
    x, ids, weights = make_inputs(rng, geometry, 9)
    ids[::2, 0] = -1
    ids[1::2, 1] = 4
    ids[3] = [np.iinfo(np.int32).max, np.iinfo(np.int32).min, 17]
    wanted = check_layer(pool, isa, layer, (x, ids, weights), PLAIN)
    assert not wanted[3].any()


def test_unaligned_inputs(pool, isa):
    rng = np.random.default_rng(15)
    geometry = LayerGeometry(96, 64, experts=3, top_k=3)
    layer = make_layer(rng, geometry)
    inputs = make_inputs(rng, geometry, 5)
    shifted = []
    for array in inputs:
        memory = np.empty(array.nbytes + array.itemsize, np.uint8)
        view = memory[array.itemsize :].view(array.dtype).reshape(array.shape)
        view[:] = array
        shifted.append(view)
    check_layer(pool, isa, layer, tuple(shifted), PLAIN)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_random_calls(pool, isa, data):
    slices = data.draw(st.sampled_from([1, 2, 4]))
    experts = data.draw(st.integers(1, 9))
    geometry = LayerGeometry(
        hidden=32 * data.draw(st.integers(1, 16)),
        intermediate=32 * slices * data.draw(st.integers(1, 4)),
        experts=experts,
        top_k=data.draw(st.integers(1, min(4, experts))),
        slices=slices,
    )
    family = Family(data.draw(st.sampled_from([None, 0.5, 10.0])), data.draw(st.booleans()))
    middle = data.draw(st.integers(0, 254))
    spread = data.draw(st.sampled_from([0, 3, 20, 254]))
    scales = (max(0, middle - spread), min(254, middle + spread))
    seed = data.draw(st.integers(0, 2**32))
    rng = np.random.default_rng(seed)
    layer = make_layer(rng, geometry, scales, data.draw(st.sampled_from([None, (118, 124)])))
    x, ids, weights = make_inputs(rng, geometry, data.draw(st.integers(1, 40)), 2.0 ** data.draw(st.integers(-60, 60)))
    check_layer(pool, isa, layer, (x, ids, weights), family, seed)


def test_one_object_over_many_steps(pool, isa):
    """Nothing of a step is left in the next, whatever its size."""
    rng = np.random.default_rng(16)
    geometry = LayerGeometry(64, 96, experts=5, top_k=2)
    layer = make_layer(rng, geometry)
    kernel = CpuExperts(geometry, WEIGHT_INSIDE, pool, isa=isa, max_tokens=70)
    for tokens in (70, 1, 33, 2, 70, 5):
        x, ids, weights = make_inputs(rng, geometry, tokens)
        x[0, 0] = np.nan if tokens == 33 else x[0, 0]
        wanted = expected(layer, x, ids, weights, WEIGHT_INSIDE)
        assert_same_bits(run_forward(kernel, layer, x, ids, weights), wanted)
        assert_same_bits(run_split(kernel, layer, x, ids, weights, rng), wanted)
