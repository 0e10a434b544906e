"""E8M0, the shared scale of MXFP4: an unsigned exponent, value 2^(byte - 127), byte 255 is NaN (OCP MX 1.0, 5.4.1)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

E8M0_NAN = 255
"""The byte that stands for NaN; a checkpoint that holds one cannot be built into a store."""


def e8m0_to_float(scales: NDArray[np.uint8]) -> NDArray[np.float64]:
    """E8M0 bytes of any shape -> float64 of the same shape; 255 gives NaN. (2^-127 is subnormal in float32.)"""
    value = np.ldexp(np.float64(1), scales.astype(np.int32) - 127)
    return np.where(scales == E8M0_NAN, np.nan, value)
