"""The record: all bytes of one expert in one 4 KiB-aligned piece, read as it is by every kernel.

A record is its slices one after the other; a slice is codes of w1 (gate), w3 (up), w2 (down), then scales of w1, w3,
w2, zero padding to 64 bytes; the record is padded to 4 KiB. Matrices are "tile16": tiles of 16 rows x 32 k, row tiles
outer, k tiles inner. A tile's codes are 256 bytes: row by row the 16 bytes of that block in the checkpoint's own order;
its scales are 16 bytes, byte r of row r.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from moetier.contract.geometry import BLOCK, LayerGeometry

TILE_ROWS = 16
RECORD_ALIGNMENT = 4096
SLICE_ALIGNMENT = 64


@dataclass(frozen=True)
class Matrix:
    """One MXFP4 matrix [N, K] as in a checkpoint: codes uint8 [N, K/2], scales uint8 [N, K/32]."""

    codes: NDArray[np.uint8]
    scales: NDArray[np.uint8]

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1] * 2


@dataclass(frozen=True)
class ExpertMatrices:
    """gate and up [intermediate, hidden] and down [hidden, intermediate] of one expert."""

    gate: Matrix
    up: Matrix
    down: Matrix


@dataclass(frozen=True)
class Section:
    """Where one matrix of a slice lies: byte offsets from the slice's start, and its shape [rows, k]."""

    codes: int
    scales: int
    rows: int
    k: int

    @property
    def blocks(self) -> int:
        """Blocks of 32 along K."""
        return self.k // BLOCK

    @property
    def code_bytes(self) -> int:
        return self.rows * self.k // 2

    @property
    def scale_bytes(self) -> int:
        return self.rows * self.k // BLOCK


def _round_up(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


@dataclass(frozen=True)
class RecordLayout:
    """Byte offsets of a record, and the way between checkpoint matrices and record bytes."""

    hidden: int
    intermediate: int
    slices: int = 1

    @classmethod
    def of(cls, geometry: LayerGeometry) -> RecordLayout:
        return cls(geometry.hidden, geometry.intermediate, geometry.slices)

    @cached_property
    def sections(self) -> tuple[Section, Section, Section]:
        """gate, up and down of a slice."""
        hidden, inner = self.hidden, self.intermediate // self.slices
        codes, scales = hidden * inner // 2, hidden * inner // BLOCK
        first_scale = 3 * codes
        return (
            Section(0, first_scale, inner, hidden),
            Section(codes, first_scale + scales, inner, hidden),
            Section(2 * codes, first_scale + 2 * scales, hidden, inner),
        )

    @property
    def payload_bytes(self) -> int:
        """Bytes of a slice that carry weights."""
        return 3 * (self.hidden * (self.intermediate // self.slices)) * (16 + 1) // 32

    @property
    def slice_bytes(self) -> int:
        return _round_up(self.payload_bytes, SLICE_ALIGNMENT)

    @property
    def stride(self) -> int:
        """Bytes of a record, its padding to 4 KiB included: the distance from one record to the next."""
        return _round_up(self.slices * self.slice_bytes, RECORD_ALIGNMENT)

    def pack(self, expert: ExpertMatrices, out: NDArray[np.uint8]) -> None:
        """Write `expert` as a record into `out`, uint8 [stride]. Every byte of it is written."""
        out[self.slices * self.slice_bytes :] = 0
        for index in range(self.slices):
            start = index * self.slice_bytes
            out[start + self.payload_bytes : start + self.slice_bytes] = 0
            for matrix, section in zip(self._cut(expert, index), self.sections, strict=True):
                codes, scales = start + section.codes, start + section.scales
                _to_tiles(matrix.codes, section.blocks, out[codes : codes + section.code_bytes])
                _to_tiles(matrix.scales, section.blocks, out[scales : scales + section.scale_bytes])

    def unpack(self, record: NDArray[np.uint8]) -> ExpertMatrices:
        """The matrices of a record uint8 [stride], the inverse of `pack`."""
        parts: tuple[list[Matrix], ...] = ([], [], [])
        for index in range(self.slices):
            for part, matrix in zip(parts, self.unpack_slice(record, index), strict=True):
                part.append(matrix)
        gate, up, down = parts
        return ExpertMatrices(_join(gate, axis=0), _join(up, axis=0), _join(down, axis=1))

    def unpack_slice(self, record: NDArray[np.uint8], index: int) -> tuple[Matrix, Matrix, Matrix]:
        """gate, up [slice, hidden] and down [hidden, slice] of slice `index` of a record."""
        start = index * self.slice_bytes
        gate, up, down = (
            Matrix(
                _from_tiles(record[start + s.codes :][: s.code_bytes], s.rows, s.blocks),
                _from_tiles(record[start + s.scales :][: s.scale_bytes], s.rows, s.blocks),
            )
            for s in self.sections
        )
        return gate, up, down

    def _cut(self, expert: ExpertMatrices, index: int) -> tuple[Matrix, Matrix, Matrix]:
        inner = self.intermediate // self.slices
        rows = slice(index * inner, (index + 1) * inner)
        columns = slice(rows.start // 2, rows.stop // 2)
        blocks = slice(rows.start // BLOCK, rows.stop // BLOCK)
        return (
            Matrix(expert.gate.codes[rows], expert.gate.scales[rows]),
            Matrix(expert.up.codes[rows], expert.up.scales[rows]),
            Matrix(expert.down.codes[:, columns], expert.down.scales[:, blocks]),
        )


def _to_tiles(rows: NDArray[np.uint8], blocks: int, out: NDArray[np.uint8]) -> None:
    """[N, blocks * width] -> flat [N/16][blocks][16][width]; width is 16 bytes for codes, 1 for scales."""
    n = rows.shape[0]
    piece = _piece(rows.shape[1] // blocks)
    tiles = out.view(piece).reshape(n // TILE_ROWS, blocks, TILE_ROWS)
    tiles[:] = rows.view(piece).reshape(n // TILE_ROWS, TILE_ROWS, blocks).transpose(0, 2, 1)


def _from_tiles(flat: NDArray[np.uint8], rows: int, blocks: int) -> NDArray[np.uint8]:
    tiles = flat.view(_piece(flat.size // (rows * blocks))).reshape(rows // TILE_ROWS, blocks, TILE_ROWS)
    return np.ascontiguousarray(tiles.transpose(0, 2, 1)).reshape(rows, blocks).view(np.uint8)


def _piece(width: int) -> np.dtype[np.void]:
    """Return a row's part of a tile as one element: NumPy moves it eight times as fast as that many bytes."""
    return np.dtype((np.void, width))


def _join(parts: list[Matrix], axis: int) -> Matrix:
    return Matrix(
        np.concatenate([part.codes for part in parts], axis), np.concatenate([part.scales for part in parts], axis)
    )
