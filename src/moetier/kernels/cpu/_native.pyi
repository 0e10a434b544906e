"""The binding. Arrays must be C-contiguous and of the dtypes that `experts.py` checks."""

from typing import Any

from numpy.typing import NDArray

def available_isas() -> list[str]: ...

class Pool:
    def __init__(self, threads: int, cpus: list[int]) -> None: ...
    @property
    def threads(self) -> int: ...

class Experts:
    def __init__(
        self,
        pool: Pool,
        isa: str,
        hidden: int,
        inner: int,
        experts: int,
        top_k: int,
        first_slice: int,
        slices: int,
        max_tokens: int,
        limit: float | None,
        weighted: bool,
    ) -> None: ...
    @property
    def workspace_bytes(self) -> int: ...
    @property
    def bad_rows(self) -> int: ...
    def tokens(self) -> int: ...
    def begin(self, x: NDArray[Any], ids: NDArray[Any], weights: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]: ...
    def gate_up(self, indices: NDArray[Any], addresses: NDArray[Any]) -> None: ...
    def down(self, first: int, addresses: NDArray[Any]) -> None: ...
    def finish(self, out: NDArray[Any]) -> None: ...
    def forward(
        self, x: NDArray[Any], ids: NDArray[Any], weights: NDArray[Any], addresses: NDArray[Any], out: NDArray[Any]
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]: ...
