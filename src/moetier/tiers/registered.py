"""Host memory that the device reads by itself: registered with the driver, which locks its pages."""

from __future__ import annotations

import torch

from moetier.errors import SettingsError


class Registered:
    """Registers memory ranges for the life of the object; the device then reads them by the host's own addresses."""

    def __init__(self) -> None:
        self._addresses: list[int] = []

    def add(self, address: int, size: int) -> None:
        """SettingsError where the driver refuses: mostly a limit on locked memory."""
        status = torch.cuda.cudart().cudaHostRegister(address, size, 0)  # type: ignore[no-untyped-call]
        if int(status) != 0:
            raise SettingsError(
                f"expected to lock {size / 2**30:.2f} GiB of DRAM for the device, found: {status}; raise the limit on "
                "locked memory (ulimit -l, or --ulimit memlock=-1 for a container), or set dram_records lower"
            )
        self._addresses.append(address)

    def close(self) -> None:
        """Unregister everything. The device must have finished with it."""
        while self._addresses:
            torch.cuda.cudart().cudaHostUnregister(self._addresses.pop())  # type: ignore[no-untyped-call]
