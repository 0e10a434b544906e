"""The CPU's end of the mailbox: a native thread that computes what a device asks for, without the GIL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moetier.kernels.cpu import _native
from moetier.kernels.cpu.experts import CpuExperts
from moetier.kernels.cpu.pool import ThreadPool
from moetier.kernels.protocol import word


@dataclass(frozen=True)
class MailArrays:
    """The mailbox's memory as arrays: see protocol.h and native/core/mailbox.h.

    box int32 [words of Box]; ids int32, weights float32 [T, top_k]; x uint16 (bf16 bits) [T, hidden]; streamed int32:
    experts that the device takes from DRAM by itself; rows float32 [T, top_k, hidden].
    """

    box: NDArray[np.int32]
    ids: NDArray[np.int32]
    weights: NDArray[np.float32]
    x: NDArray[np.uint16]
    streamed: NDArray[np.int32]
    rows: NDArray[np.float32]


class OvertakenError(Exception):
    """The request was answered without help, which came too late: nothing of it may be used or moved any more."""


@dataclass(frozen=True)
class Alone:
    """Sources of the mailbox's answers where nobody helps: the store's files, and the part of each record that is read.

    files: open for reading, one a layer; sums: xxh3_64 of each slice, uint64 [experts, slices] of each layer. Sizes in
    bytes: `bytes` from `start` of a record on are read, the part begins at `shift` of that and has `used`. Everything
    must outlive the mailbox.
    """

    files: Sequence[int]
    sums: Sequence[NDArray[np.uint64]]
    stride: int
    start: int
    bytes: int
    shift: int
    used: int
    slices: int
    first_slice: int
    slice_bytes: int
    stuck_ms: int
    """After so long without progress of whoever helps, the mailbox answers by itself."""

    def native(self) -> dict[str, object]:
        """Return the fields as the binding takes them; arrays by address."""
        return {**vars(self), "files": list(self.files), "sums": [sums.ctypes.data for sums in self.sums]}


@dataclass(frozen=True)
class Request:
    """A request that needs help: its number, layer, and copies of what it asks for; `rows` is where its rows go."""

    number: int
    layer: int
    x: NDArray[np.uint16]
    ids: NDArray[np.int32]
    weights: NDArray[np.float32]
    streamed: NDArray[np.int32]
    rows: NDArray[np.float32]


class Mailbox:
    """Answers requests whose records all are in DRAM; hands the others to whoever calls `await_help`.

    Parameters
    ----------
    kernel
        Computes; of at least as many tokens as the mailbox. Nobody else may use it while the mailbox is open, but who
        helps with a request.
    pool
        Its threads; they are kept awake while requests come.
    mail
        The memory. It must outlive the mailbox.
    tables
        Of each layer, uint64 [experts]: where each expert's record lies, 0 where it is not in DRAM. Read at every
        request; change them only between requests, or while helping, after `forget`.
    alone
        Where a request that gets no help is computed from. None: it waits for help as long as it takes.

    """

    def __init__(
        self,
        kernel: CpuExperts,
        pool: ThreadPool,
        mail: MailArrays,
        tables: Sequence[NDArray[np.uint64]],
        alone: Alone | None = None,
    ) -> None:
        g = kernel.geometry
        assert mail.ids.shape == (mail.x.shape[0], g.top_k), "ids are not [tokens, top_k]"
        assert mail.rows.shape == (*mail.ids.shape, g.hidden), "rows are not [tokens, top_k, hidden]"
        assert mail.x.shape[0] <= kernel.max_tokens, "the kernel takes fewer tokens than the mailbox"
        assert all(table.shape == (g.experts,) and table.dtype == np.uint64 for table in tables)
        self._mail, self._tables, self._kernel, self._alone = mail, list(tables), kernel, alone
        self._rows = np.zeros_like(mail.rows)
        """Rows of whoever helps: those that come too late must not reach the mailbox."""
        self._native = _native.Mailbox(
            pool.native,
            kernel.native,
            g.top_k,
            g.experts,
            mail.box.ctypes.data,
            mail.ids.ctypes.data,
            mail.weights.ctypes.data,
            mail.x.ctypes.data,
            mail.rows.ctypes.data,
            g.hidden,
            [table.ctypes.data for table in tables],
            list(pool.cpus),
            alone.native() if alone is not None else None,
        )

    def wake(self) -> None:
        """A step is about to begin: look for its requests without sleeping."""
        self._native.wake()

    def await_help(self, milliseconds: int) -> Request | None:
        """Return a request with a record that is not in DRAM. Write its rows, then `answer`; or `refuse` it.

        What it asks for is copied: if help comes too late, the mailbox holds the next request meanwhile.
        """
        number = self._native.await_help(milliseconds)
        if not number:
            return None
        mail, box = self._mail, self._mail.box
        tokens, layer = int(box[word("tokens")]), int(box[word("layer")])
        x, ids, weights = mail.x[:tokens].copy(), mail.ids[:tokens].copy(), mail.weights[:tokens].copy()
        streamed = mail.streamed[: int(box[word("streamed")])].copy()
        return Request(number, layer, x, ids, weights, streamed, self._rows[:tokens])

    def answer(self, request: Request) -> bool:
        """Hand over the rows of `request`; False where it was answered without them."""
        return self._native.answer(request.number, self._rows.ctypes.data)

    def refuse(self, request: Request) -> bool:
        """`request` cannot be answered: the device stops. False where it was answered meanwhile."""
        return self._native.refuse(request.number)

    def forget(self, request: Request, expert: int) -> None:
        """To be called before an expert's DRAM is overwritten; OvertakenError where others may read it by now."""
        if not self._native.forget(request.number, expert):
            raise OvertakenError(f"request {request.number} was answered without help")

    def progress(self) -> None:
        """Whoever helps is at work."""
        self._native.progress()

    def counts(self) -> tuple[int, int, int, int]:
        """Requests so far, the nanoseconds they took, how many needed help, and how many were answered without it."""
        return self._native.counts()

    def layer_nanoseconds(self, layer: int) -> int:
        """Return what the requests of a layer took so far."""
        return self._native.layer_nanoseconds(layer)

    def close(self) -> None:
        """End the thread, after the request under way. A forked child has no such thread and waits for none."""
        self._native.close()
