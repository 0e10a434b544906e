"""The thread that answers requests of which a record must be read, and says why where the device had to stop."""

from __future__ import annotations

import faulthandler
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from moetier.engine.hybrid.layer import HybridLayer
from moetier.errors import MoetierError
from moetier.kernels.cpu.mailbox import Mailbox, OvertakenError
from moetier.kernels.cuda.hybrid import Mail

logger = logging.getLogger(__name__)

WAIT_MS = 200
"""How long the helper waits for a request before it looks whether the model is closed."""
STUCK_SECONDS = 2.0
"""Without progress of the helper for so long, a request is answered without it."""


def stuck_ms(patience: float) -> int:
    """Return how long a request lacks help before the mailbox answers it alone, well before the device gives up."""
    return round(min(STUCK_SECONDS, patience / 4) * 1e3)


class Helper:
    """Runs from construction to `close`. layers: those of the model, which may grow.

    patience: seconds after which the device stops waiting. on_failure: told, on this thread or that of `tell_if_late`,
    why the device stops; CUDA then fails, and with it the process.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        mail: Mail,
        layers: Sequence[HybridLayer],
        patience: float,
        on_failure: Callable[[MoetierError], None],
    ) -> None:
        self._mailbox, self._mail, self._layers = mailbox, mail, layers
        self._patience, self._on_failure, self._failed = patience, on_failure, False
        self._alone = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="moetier-helper", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while not self._closed.is_set():
            request = self._mailbox.await_help(WAIT_MS)
            self._tell_if_alone()
            if request is None:
                self.tell_if_late()
                continue
            try:
                layers = {layer.index: layer for layer in self._layers}
                layers[request.layer].help(request, self._mailbox)
            except OvertakenError:
                self._mailbox.refuse(request)  # it has its answer: this only ends our part
                continue
            except Exception as error:  # the device must hear of it, whatever it is
                try:
                    self._fail(error if isinstance(error, MoetierError) else _ours(error))
                finally:
                    self._mailbox.refuse(request)
                continue
            self._mailbox.answer(request)

    def _tell_if_alone(self) -> None:
        """Say where requests were answered from disk alone: steps were slow, and no bit is another one."""
        alone = self._mailbox.counts()[3]
        if alone != self._alone:
            logger.warning(
                "%d requests of the device got no help for %d ms and were answered from disk alone, with the same "
                "bits: most likely a thread kept Python's lock while it waited for the device",
                alone - self._alone,
                stuck_ms(self._patience),
            )
            self._alone = alone

    def tell_if_late(self) -> None:
        """Say why the device stopped, if it gave up waiting for the CPU; from any thread."""
        late = self._mail.late
        if not late or self._failed:
            return
        if late == self._mail.refused:
            self._fail(MoetierError(f"the CPU's kernel refused request {late}: a fault of moetier, please report it"))
            return
        with suppress(Exception):  # stderr may be no file
            faulthandler.dump_traceback()  # what every thread was at while the device waited
        self._fail(
            MoetierError(
                f"the CPU did not answer the device within {self._patience:.0f} s (request {late}): "
                "its threads were stopped, or starved by other processes; nothing was computed from it. Start "
                "again, with fewer threads (`--set threads=N`) or more patience (`--set patience_seconds=N`)"
            )
        )

    def _fail(self, error: MoetierError) -> None:
        self._failed = True
        logger.error("%s", error, exc_info=error.__cause__)
        self._on_failure(error)

    def stop(self) -> None:
        """No request is taken any more; `join` must follow when the mailbox is closed."""
        self._closed.set()

    def join(self) -> None:
        """Wait for the request under way, and say what is left to say."""
        self._thread.join()
        self.tell_if_late()


def _ours(error: Exception) -> MoetierError:
    failure = MoetierError(f"a request of the device could not be answered, a fault of moetier: {error!r}")
    failure.__cause__ = error
    return failure
