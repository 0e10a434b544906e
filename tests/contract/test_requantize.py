"""Re-quantization to MXFP4 against the OCP rule in rational numbers, and the error that it reports."""

from fractions import Fraction

import numpy as np
import pytest

from moetier.contract import E2M1_VALUES, e8m0_to_float, unpack_codes
from moetier.contract.e4m3 import E4M3_VALUES
from moetier.contract.requantize import CHUNK, Loss, NotFiniteError, requantize

MAGNITUDES = [Fraction(m, 2) for m in (0, 1, 2, 3, 4, 6, 8, 12)]


def by_fractions(block):
    """Codes and scale byte of one block of 32 floats, by the rule's words."""
    amax = max(abs(Fraction(float(x))) for x in block)
    if amax == 0:
        return [8 if np.signbit(x) else 0 for x in block], 0
    exponent = -1100
    while Fraction(2) ** (exponent + 1) <= amax:
        exponent += 1
    exponent = min(max(exponent - 2, -127), 127)
    codes = []
    for x in block:
        u = abs(Fraction(float(x))) / Fraction(2) ** exponent
        code = min(range(8), key=lambda c: (abs(MAGNITUDES[c] - u), c % 2))
        codes.append(code | (8 if np.signbit(x) else 0))
    return codes, exponent + 127


def values_of(matrix):
    codes = E2M1_VALUES.astype(np.float64)[unpack_codes(matrix.codes)]
    return codes * np.repeat(e8m0_to_float(matrix.scales), 32, axis=1)


def convert(w):
    w = np.asarray(w, np.float64)
    return requantize(lambda start, stop: w[start:stop], *w.shape)


def random_blocks():
    rng = np.random.default_rng(0)
    yield "normal", rng.standard_normal((4, 32))
    yield "heavy tails", rng.standard_t(2, (4, 32))
    yield "all of E2M1 times a power of two", rng.choice(E2M1_VALUES, (4, 32)).astype(np.float64) * 2.0**-9
    yield "multiples of 1/8, full of ties", rng.integers(-64, 65, (16, 32)) / 8
    yield "just beside a tie", np.nextafter(rng.integers(-64, 65, (16, 32)) / 8, rng.choice([-99, 99], (16, 32)))
    yield "one large value", np.concatenate([np.full((2, 31), 1e-3), [[7.9], [8.0]]], axis=1)
    yield "tiny beside the least scale", rng.standard_normal((4, 32)) * 2.0**-130
    yield "beyond the largest scale", rng.standard_normal((4, 32)) * 2.0**131
    yield "zeros of both signs", np.where(rng.random((2, 32)) < 0.5, 0.0, -0.0)
    yield "amax at powers of two", np.concatenate([[[2.0**e] + [2.0**e / 3] * 31] for e in range(-20, 20)])
    yield (
        "amax just under powers of two",
        np.concatenate([[[np.nextafter(2.0**e, 0)] + [2.0**e / 3] * 31] for e in range(-20, 20)]),
    )


CASES = [pytest.param(w, id=name) for name, w in random_blocks()]


@pytest.mark.parametrize("w", CASES)
def test_codes_and_scales_are_those_of_the_rule(w):
    matrix, _ = convert(w)
    for row, codes, scale in zip(w, unpack_codes(matrix.codes), matrix.scales[:, 0], strict=True):
        wanted_codes, wanted_scale = by_fractions(row)
        assert scale == wanted_scale
        assert codes[row != 0].tolist() == [code for code, x in zip(wanted_codes, row, strict=True) if x != 0]
        assert not (codes[row == 0] & 7).any()  # the signs of exact zeros may be balanced, see below


@pytest.mark.parametrize("w", CASES)
def test_the_loss_is_that_of_the_values(w):
    matrix, loss = convert(w)
    q = values_of(matrix)
    assert loss.elements == w.size
    assert loss.square_error == pytest.approx(((q - w) ** 2).sum(), rel=1e-12, abs=0)
    assert loss.error == pytest.approx((q - w).sum(), rel=1e-9, abs=1e-12 * np.abs(w).sum())
    scale = np.repeat(e8m0_to_float(matrix.scales), 32, axis=1)
    assert loss.saturated == np.count_nonzero(np.abs(w) > 6 * scale)


def test_every_mxfp4_value_comes_back():
    """Blocks of E2M1 values under any scale are unchanged, though the scale byte may be a smaller one."""
    codes = np.random.default_rng(3).integers(0, 16, (253, 64))
    scales = np.ldexp(1.0, np.arange(253) - 125)[:, None]  # two less than the largest, two more than the least
    w = E2M1_VALUES[codes] * scales
    matrix, loss = convert(w)
    assert np.array_equal(values_of(matrix), w)
    assert np.array_equal(np.signbit(values_of(matrix))[w != 0], np.signbit(w)[w != 0])
    assert (loss.square_error, loss.error, loss.saturated) == (0, 0, 0)


def test_rows_in_many_chunks_give_the_same_as_one_by_one():
    w = np.random.default_rng(4).standard_normal((3 * CHUNK // 96 + 5, 96))
    matrix, loss = convert(w)
    parts = [convert(w[row : row + 1]) for row in range(len(w))]
    assert np.array_equal(matrix.codes, np.concatenate([part.codes for part, _ in parts]))
    assert np.array_equal(matrix.scales, np.concatenate([part.scales for part, _ in parts]))
    total = sum((part for _, part in parts), Loss())
    assert loss.relative_rms == pytest.approx(total.relative_rms, rel=1e-12)
    assert (loss.elements, loss.saturated) == (total.elements, total.saturated)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused_with_its_place(bad):
    w = np.ones((3000, 64))
    w[2345, 40] = bad
    with pytest.raises(NotFiniteError, match="row 2345, columns 32 to 63"):
        convert(w)


def zero_signs(w):
    """Signs (1: negative) of the codes of exact zeros, by column parity."""
    codes = unpack_codes(convert(w)[0].codes)
    return {(int(c) % 2, int(codes[r, c]) >> 3) for r, c in np.argwhere(w == 0)}


@pytest.mark.parametrize("zero", [0.0, -0.0], ids=["positive", "negative"])
def test_zeros_of_one_sign_are_balanced_by_column(zero):
    w = np.random.default_rng(5).standard_normal((1500, 64))
    w[w < -1] = zero
    assert zero_signs(w) == {(0, 0), (1, 1)}
    codes = unpack_codes(convert(w)[0].codes)
    assert np.array_equal(codes[w != 0] >> 3, np.signbit(w[w != 0]))


def test_zeros_of_both_signs_keep_them():
    w = np.random.default_rng(6).standard_normal((20, 64))
    w[w < -1] = 0.0
    w[w > 1] = -0.0
    assert np.array_equal(unpack_codes(convert(w)[0].codes) >> 3, np.signbit(w))


def test_values_rounded_to_zero_are_no_zeros_to_balance():
    w = np.full((4, 32), 1e-3)
    w[:, 0] = 1.0
    assert not (unpack_codes(convert(w)[0].codes) >> 3).any()


def test_a_loss_of_nothing_is_nothing():
    loss = Loss()
    assert (loss.relative_rms, loss.sign_bias, loss.saturated_share) == (0, 0, 0)


@pytest.mark.parametrize("byte", range(256))
def test_e4m3_byte_has_the_value_of_its_fields(byte):
    sign, exponent, mantissa = byte >> 7, (byte >> 3) & 15, byte & 7
    if (exponent, mantissa) == (15, 7):
        assert np.isnan(E4M3_VALUES[byte])
        return
    fraction = Fraction(mantissa, 8) * Fraction(2) ** -6 if exponent == 0 else None
    magnitude = fraction if fraction is not None else (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)
    assert Fraction(float(E4M3_VALUES[byte])) == (-magnitude if sign else magnitude)
    assert np.signbit(E4M3_VALUES[byte]) == bool(sign)
