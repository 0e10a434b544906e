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


@dataclass(frozen=True)
class Request:
    """A request that needs help: its number, layer, and what it asks for (views into the mailbox)."""

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
        request; change them only between requests or while helping.

    """

    def __init__(
        self, kernel: CpuExperts, pool: ThreadPool, mail: MailArrays, tables: Sequence[NDArray[np.uint64]]
    ) -> None:
        g = kernel.geometry
        assert mail.ids.shape == (mail.x.shape[0], g.top_k), "ids are not [tokens, top_k]"
        assert mail.rows.shape == (*mail.ids.shape, g.hidden), "rows are not [tokens, top_k, hidden]"
        assert mail.x.shape[0] <= kernel.max_tokens, "the kernel takes fewer tokens than the mailbox"
        assert all(table.shape == (g.experts,) and table.dtype == np.uint64 for table in tables)
        self._mail, self._tables, self._kernel = mail, list(tables), kernel
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
            [table.ctypes.data for table in tables],
            list(pool.cpus),
        )

    def wake(self) -> None:
        """A step is about to begin: look for its requests without sleeping."""
        self._native.wake()

    def await_help(self, milliseconds: int) -> Request | None:
        """A request with a record that is not in DRAM. Write its rows, then `answer`; or `refuse` it."""
        number = self._native.await_help(milliseconds)
        if not number:
            return None
        mail, box = self._mail, self._mail.box
        tokens, layer = int(box[word("tokens")]), int(box[word("layer")])
        streamed = mail.streamed[: int(box[word("streamed")])]
        return Request(
            number, layer, mail.x[:tokens], mail.ids[:tokens], mail.weights[:tokens], streamed, mail.rows[:tokens]
        )

    def answer(self, request: Request) -> None:
        """The rows of `request` are written."""
        self._native.answer(request.number)

    def refuse(self, request: Request) -> None:
        """`request` cannot be answered: the device stops."""
        self._native.refuse(request.number)

    def counts(self) -> tuple[int, int, int]:
        """Requests so far, the nanoseconds they took, and how many needed help."""
        calls, nanoseconds, helps = self._native.counts()
        return calls, nanoseconds, helps

    def layer_nanoseconds(self, layer: int) -> int:
        """What the requests of a layer took so far."""
        return self._native.layer_nanoseconds(layer)

    def close(self) -> None:
        """End the thread, after the request under way. A forked child has no such thread and waits for none."""
        self._native.close()
