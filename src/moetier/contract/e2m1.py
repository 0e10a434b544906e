"""E2M1, the 4-bit float of MXFP4: sign, two exponent bits, one mantissa bit (OCP Microscaling Formats 1.0, 5.3.3).

Two codes share a byte, the low nibble first.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

E2M1_VALUES: NDArray[np.float32] = np.array(
    [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32
)
"""Value of each of the 16 codes. Codes 0 and 8 are the two zeros."""

E2M1_INTEGERS: NDArray[np.int8] = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""Twice the value of each code: the integer w of the numerics contract."""


def unpack_codes(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[..., K/2] bytes -> [..., K] codes in 0..15; the low nibble is the even k."""
    codes = np.empty((*packed.shape[:-1], packed.shape[-1] * 2), np.uint8)
    codes[..., 0::2] = packed & 0x0F
    codes[..., 1::2] = packed >> 4
    return codes


def pack_codes(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[..., K] codes in 0..15 -> [..., K/2] bytes, the inverse of `unpack_codes`."""
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).astype(np.uint8)
