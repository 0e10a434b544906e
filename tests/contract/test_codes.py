"""E2M1 and E8M0 over every byte, against definitions written independently of the package's tables."""

import math
from fractions import Fraction

import numpy as np
import pytest

from moetier.contract import E2M1_INTEGERS, E2M1_VALUES, E8M0_NAN, e8m0_to_float, unpack_codes
from moetier.contract.e2m1 import pack_codes

ALL_BYTES = np.arange(256, dtype=np.uint8)


def e2m1(code: int) -> Fraction:
    """Value by the fields: sign, two exponent bits of bias 1, one mantissa bit; exponent 0 is subnormal."""
    sign, exponent, mantissa = code >> 3, (code >> 1) & 3, code & 1
    magnitude = Fraction(mantissa, 2) if exponent == 0 else (1 + Fraction(mantissa, 2)) * Fraction(2) ** (exponent - 1)
    return -magnitude if sign else magnitude


@pytest.mark.parametrize("code", range(16))
def test_e2m1_code_has_the_value_of_its_fields(code):
    assert Fraction(float(E2M1_VALUES[code])) == e2m1(code)
    assert math.copysign(1, E2M1_VALUES[code]) == (-1 if code & 8 else 1)
    assert Fraction(int(E2M1_INTEGERS[code])) == 2 * e2m1(code)


def test_every_byte_unpacks_low_nibble_first():
    codes = unpack_codes(ALL_BYTES[:, None])
    assert codes.tolist() == [[byte % 16, byte // 16] for byte in range(256)]


def test_every_byte_packs_back():
    assert np.array_equal(pack_codes(unpack_codes(ALL_BYTES.reshape(8, 32))), ALL_BYTES.reshape(8, 32))


@pytest.mark.parametrize("byte", range(255))
def test_e8m0_byte_is_a_power_of_two(byte):
    value = e8m0_to_float(ALL_BYTES)[byte]
    assert Fraction(float(value)) == Fraction(2) ** (byte - 127)


def test_e8m0_255_is_nan():
    values = e8m0_to_float(ALL_BYTES)
    assert E8M0_NAN == 255
    assert np.flatnonzero(np.isnan(values)).tolist() == [255]
