"""E4M3 (the finite-only "fn" kind): sign, four exponent bits of bias 7, three mantissa bits; 0x7F and 0xFF are NaN."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def _table() -> NDArray[np.float64]:
    byte = np.arange(256)
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    magnitude = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), np.ldexp(1 + mantissa / 8, exponent - 7))
    magnitude[[0x7F, 0xFF]] = np.nan
    return np.where(byte & 0x80, -magnitude, magnitude)


E4M3_VALUES: NDArray[np.float64] = _table()
"""Value of each byte; index it with uint8 bytes of any shape."""
