"""Routed experts on the CPU, from records in memory."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moetier.contract import Family, LayerGeometry
from moetier.errors import SettingsError, StoreError
from moetier.kernels.cpu import _native
from moetier.kernels.cpu.isa import choose_isa
from moetier.kernels.cpu.pool import ThreadPool


class CpuExperts:
    """Runs the routed experts of one geometry on the CPU. One step at a time; one object serves all layers.

    A step is either one `forward`, where every routed expert's record is in memory, or `begin`, then `gate_up` and
    `down` in any split as records arrive, then `finish`. Both give the same bits. `rows` is a step whose answers are
    combined elsewhere, with those of another tier. Native work runs without the GIL. All
    memory is taken at construction.

    Parameters
    ----------
    geometry
        Sizes of the layer.
    family
        Clamp, and where the route weight applies.
    pool
        Threads that compute.
    isa
        Kernel set, one of `available_isas()`; default the best.
    max_tokens
        Most tokens of a step; the workspace grows with it (see `workspace_bytes`).
    first_slice, slice_count
        Slices of each record that this rank holds, a power of two of them; default all. Their partial results are
        combined by a pairwise tree.
    prefetch
        For tests and measurements; no bit depends on it. Whether kernels prefetch all weights by instructions, or leave
        long runs of memory to the processor's own prefetcher; default what this processor is faster with.

    Raises
    ------
    SettingsError
        The instruction set is not there, or the slices are not part of the record.
    MemoryError
        No memory for the workspace.

    """

    def __init__(
        self,
        geometry: LayerGeometry,
        family: Family,
        pool: ThreadPool,
        *,
        isa: str | None = None,
        max_tokens: int = 8192,
        first_slice: int = 0,
        slice_count: int | None = None,
        prefetch: bool | None = None,
    ) -> None:
        count = geometry.slices - first_slice if slice_count is None else slice_count
        if first_slice < 0 or count < 1 or first_slice + count > geometry.slices or count & (count - 1):
            raise SettingsError(
                f"slices {first_slice}..{first_slice + count - 1}: a rank holds a power of two of the record's "
                f"{geometry.slices} slices"
            )
        if not 1 <= max_tokens * geometry.top_k < 2**31:
            raise SettingsError(f"max_tokens {max_tokens}: expected at least 1 and fewer than 2^31 pairs in a step")
        self.geometry = geometry
        self.family = family
        self.isa = choose_isa(isa)
        self.max_tokens = max_tokens
        self._native = _native.Experts(
            pool.native,
            self.isa,
            geometry.hidden,
            geometry.slice_intermediate,
            geometry.experts,
            geometry.top_k,
            first_slice,
            count,
            max_tokens,
            family.swiglu_limit,
            family.route_weight_before_down,
            prefetch,
        )

    @property
    def native(self) -> _native.Experts:
        """The binding's object, for the mailbox."""
        return self._native

    @property
    def workspace_bytes(self) -> int:
        """Memory held for steps: 5.25 bytes a token and hidden element, 1.25 a pair and intermediate element.

        With "amxbf16" another 2 bytes a pair and intermediate element.
        """
        return self._native.workspace_bytes

    @property
    def bad_rows(self) -> int:
        """Rows of the last step's x that hold a NaN or an infinity; their outputs are NaN."""
        return self._native.bad_rows

    def begin(
        self, x: NDArray[Any], ids: NDArray[Any], weights: NDArray[np.float32]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Start a step; one that was not finished is dropped.

        Parameters
        ----------
        x
            [T, hidden], float32 or bf16 bits as uint16. T from 0 to max_tokens.
        ids
            [T, top_k], int32 or int64. Ids outside [0, experts) are skipped; a token may name an expert twice.
        weights
            [T, top_k] float32.

        Returns
        -------
        experts, pairs
            The distinct routed experts, ascending, and the number of pairs of each, both int32 [D].

        """
        self._check_inputs(x, ids, weights)
        return self._native.begin(x, ids, weights)

    def gate_up(self, experts: NDArray[np.int32], addresses: NDArray[np.uint64]) -> None:
        """Compute h of some experts: indices into the list of `begin`, in any order, each once in a step.

        addresses: where each one's record lies, multiples of 64. RuntimeError for an index out of turn; nothing is then
        computed.
        """
        _check("experts", experts, (np.int32,), (None,))
        _check("addresses", addresses, (np.uint64,), (experts.shape[0],))
        self._native.gate_up(experts, addresses)

    def down(self, first: int, addresses: NDArray[np.uint64]) -> None:
        """Add experts first, first+1, ... of the list of `begin` to their tokens' sums.

        Calls must cover the list in ascending order without gaps, each expert after its `gate_up`; else RuntimeError.
        """
        _check("addresses", addresses, (np.uint64,), (None,))
        if operator.index(first) < 0:
            raise ValueError(f"first: expected an index of the list of begin, found {first}")
        self._native.down(first, addresses)

    def finish(self, out: NDArray[np.uint16]) -> None:
        """Write the step's result, bf16 bits [T, hidden]. RuntimeError where an expert was not run."""
        _check("out", out, (np.uint16,), (self._native.tokens(), self.geometry.hidden))
        _check_writable(out)
        self._native.finish(out)

    def forward(
        self,
        x: NDArray[Any],
        ids: NDArray[Any],
        weights: NDArray[np.float32],
        addresses: NDArray[np.uint64],
        out: NDArray[np.uint16],
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """A whole step in one native call, with the result of `begin`; arguments as for `try_forward`.

        StoreError where a routed expert has no address; nothing was computed.
        """
        experts, pairs, absent = self.try_forward(x, ids, weights, addresses, out)
        if absent.size:
            raise StoreError(
                f"routed experts {experts[absent].tolist()} are not in memory: expected an address for each; load "
                "their records first, or run the step as begin, gate_up, down, finish"
            )
        return experts, pairs

    def try_forward(
        self,
        x: NDArray[Any],
        ids: NDArray[Any],
        weights: NDArray[np.float32],
        addresses: NDArray[np.uint64],
        out: NDArray[np.uint16],
    ) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """A whole step in one native call if every routed expert has an address, else nothing.

        Parameters
        ----------
        x, ids, weights
            As for `begin`.
        addresses
            uint64 [experts]: where the record of each expert of the layer lies, 0 where it is not in memory.
        out
            uint16 [T, hidden], bf16 bits; left as it is where an expert is absent.

        Returns
        -------
        experts, pairs, absent
            As for `begin`, and the indices into `experts` of those without an address, int32.

        """
        self._check_inputs(x, ids, weights)
        _check("addresses", addresses, (np.uint64,), (self.geometry.experts,))
        _check("out", out, (np.uint16,), (x.shape[0], self.geometry.hidden))
        _check_writable(out)
        return self._native.forward(x, ids, weights, addresses, out)

    def rows(
        self,
        x: NDArray[Any],
        ids: NDArray[Any],
        weights: NDArray[np.float32],
        addresses: NDArray[np.uint64],
        out: NDArray[np.float32],
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Each pair's answer y before the combination, for the experts held here, as `DeviceExperts.rows` gives it.

        Parameters
        ----------
        x, ids, weights
            As for `begin`.
        addresses
            uint64 [experts]: where the record of each expert lies, 0 where another tier computes it.
        out
            float32 [T, top_k, hidden]: y of each pair, the down projection's result. The combination multiplies it by
            the route weight, which `weights` holds here only for families that apply it before the down projection.
            Rows of pairs whose expert has no address, or an id outside the layer, stay as they are. Any writable
            memory, such as a view of pinned memory that a device reads.

        Returns
        -------
        experts, pairs
            As for `begin`, of the experts that are held.

        """
        self._check_inputs(x, ids, weights)
        _check("addresses", addresses, (np.uint64,), (self.geometry.experts,))
        _check("out", out, (np.float32,), (x.shape[0], self.geometry.top_k, self.geometry.hidden))
        _check_writable(out)
        return self._native.rows(x, ids, weights, addresses, out)

    def _check_inputs(self, x: NDArray[Any], ids: NDArray[Any], weights: NDArray[np.float32]) -> None:
        _check("x", x, (np.uint16, np.float32), (None, self.geometry.hidden))
        tokens = x.shape[0]
        if tokens > self.max_tokens:
            raise ValueError(f"x: expected at most {self.max_tokens} tokens, found {tokens}")
        _check("ids", ids, (np.int32, np.int64), (tokens, self.geometry.top_k))
        _check("weights", weights, (np.float32,), (tokens, self.geometry.top_k))


def _check(name: str, array: NDArray[Any], dtypes: tuple[type, ...], shape: tuple[int | None, ...]) -> None:
    """Raise ValueError unless `array` is C-contiguous, of one of `dtypes` and of `shape` (None: any length)."""
    fits = len(shape) == array.ndim and all(
        want is None or want == have for want, have in zip(shape, array.shape, strict=True)
    )
    if not (fits and array.dtype.type in dtypes and array.flags.c_contiguous and array.flags.aligned):
        wanted = " or ".join(np.dtype(dtype).name for dtype in dtypes)
        sizes = ", ".join("any" if want is None else str(want) for want in shape)
        order = "C-contiguous" if array.flags.c_contiguous else "strided"
        raise ValueError(
            f"{name}: expected {wanted} [{sizes}], C-contiguous and aligned, found {array.dtype.name} "
            f"{list(array.shape)}, {order}{'' if array.flags.aligned else ', unaligned'}"
        )


def _check_writable(out: NDArray[Any]) -> None:
    if not out.flags.writeable:
        raise ValueError("out: expected a writable array, found a read-only one")
