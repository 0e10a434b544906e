"""Other weights to MXFP4 by the OCP rule, in float64, with the error that it makes.

Per row and 32 consecutive k: the scale is 2^(floor(log2(amax)) - 2), where 2 is E2M1's largest exponent; the scaled
values are rounded to nearest, ties to the even code, and what lies beyond 6 becomes 6 (OCP MX 1.0, 6.3).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moetier.contract.e2m1 import E2M1_VALUES, pack_codes
from moetier.contract.geometry import BLOCK
from moetier.contract.record import Matrix

Rows = Callable[[int, int], NDArray[np.float64]]
"""rows(start, stop) -> float64 [stop - start, K]: so that a matrix is never in memory as float64 at once."""

EMAX = 2
"""Exponent of the largest E2M1 value, 6 = 1.5 * 2^2."""
CHUNK = 1 << 15
"""Elements converted at a time: what fits the second-level cache."""
ONE_SIGNED = 0.05
"""Exact zeros are called one-signed when fewer than this share of them have the other sign."""


@dataclass(frozen=True)
class Loss:
    """Sums over weights w that became q; they add up over matrices and experts."""

    elements: int = 0
    square_error: float = 0.0
    square: float = 0.0
    error: float = 0.0
    magnitude: float = 0.0
    saturated: int = 0

    def __add__(self, other: Loss) -> Loss:
        return Loss(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    @property
    def relative_rms(self) -> float:
        """Root of sum (q - w)^2 over sum w^2."""
        return float(np.sqrt(self.square_error / self.square)) if self.square else 0.0

    @property
    def sign_bias(self) -> float:
        """Sum of (q - w) over sum of |w|: the drift to one sign that does not average out."""
        return self.error / self.magnitude if self.magnitude else 0.0

    @property
    def saturated_share(self) -> float:
        """Share of the weights beyond 6 times their scale."""
        return self.saturated / self.elements if self.elements else 0.0


class NotFiniteError(ValueError):
    """A weight is NaN or infinite."""


def requantize(rows: Rows, n: int, k: int) -> tuple[Matrix, Loss]:
    """A matrix [n, k] given by its rows -> MXFP4 and its loss. NotFiniteError names the first row with a NaN."""
    codes, scales = np.empty((n, k // 2), np.uint8), np.empty((n, k // BLOCK), np.uint8)
    step = max(1, CHUNK // k)
    loss, zeros, negative = Loss(), 0, 0
    masks: list[NDArray[np.uint8]] = []
    for start in range(0, n, step):
        stop = min(start + step, n)
        w = rows(start, stop)
        part_codes, scales[start:stop], part_loss = _convert(w, start)
        codes[start:stop] = pack_codes(part_codes)
        loss += part_loss
        zero = w == 0
        zeros += int(np.count_nonzero(zero))
        negative += int(np.count_nonzero(zero & np.signbit(w)))
        masks.append(np.packbits(zero, axis=1))
    if min(negative, zeros - negative) < ONE_SIGNED * zeros:
        _balance(codes, np.concatenate(masks), k)
    return Matrix(codes, scales), loss


def _convert(w: NDArray[np.float64], first_row: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8], Loss]:
    """Rows w [N, K] -> codes [N, K], scales [N, K/32], loss."""
    n, k = w.shape
    magnitude = np.abs(w).reshape(n, k // BLOCK, BLOCK)
    amax = magnitude.max(-1)
    if not np.isfinite(amax).all():
        row, block = np.argwhere(~np.isfinite(amax))[0]
        raise NotFiniteError(f"row {first_row + row}, columns {BLOCK * block} to {BLOCK * block + BLOCK - 1}")
    exponent = np.where(amax == 0, -127, np.clip(np.frexp(amax)[1] - 1 - EMAX, -127, 127))
    scale = np.ldexp(1.0, exponent)[..., None]
    quarters = magnitude * (4 / scale)  # exact: the scale is a power of two
    saturated = np.count_nonzero(quarters > 24)
    np.minimum(quarters, 24, out=quarters)
    cell = np.floor(quarters)
    cell += np.ceil(quarters, out=quarters)
    codes = _CODE_OF_CELL[cell.astype(np.uint8)]
    error = (E2M1_VALUES[codes] * scale - magnitude).reshape(n, k)
    negative = np.signbit(w)
    loss = Loss(
        elements=w.size,
        square_error=float(np.square(error).sum()),
        square=float(np.square(w).sum()),
        error=float(np.where(negative, -error, error).sum()),
        magnitude=float(magnitude.sum()),
        saturated=int(saturated),
    )
    return codes.reshape(n, k) | (negative.astype(np.uint8) << 3), (exponent + 127).astype(np.uint8), loss


def _code_of_cell() -> NDArray[np.uint8]:
    """Code of each cell of the magnitudes 0 to 6: cell 2i is the value i/4 alone, cell 2i + 1 what lies above it."""
    u = np.arange(49) / 8  # any value inside an odd cell has the cell's code, so its middle will do
    return np.where(u < 2, np.rint(2 * u), np.where(u < 4, np.rint(u) + 2, np.minimum(np.rint(u / 2) + 4, 7))).astype(
        np.uint8
    )


_CODE_OF_CELL = _code_of_cell()


def _balance(codes: NDArray[np.uint8], masks: NDArray[np.uint8], k: int) -> None:
    """Give the exact zeros of a matrix the sign of their column's parity (odd: negative).

    An export that writes every zero with one sign would put that sign's bias into any later format without a zero.
    """
    for start in range(0, len(codes), max(1, CHUNK // k)):
        rows = slice(start, start + max(1, CHUNK // k))
        zero = np.unpackbits(masks[rows], axis=1, count=k).astype(bool)
        codes[rows] = np.where(zero[:, 0::2], codes[rows] & 0xF0, codes[rows])
        codes[rows] = np.where(zero[:, 1::2], (codes[rows] & 0x0F) | 0x80, codes[rows])
