"""One thread that spends a small share of one CPU on looking after what serves.

It takes turns. A record in DRAM, or in a device slot, is compared with its checksums where it lies. A row of a call
that was served is computed again by another instruction set on another core, from bytes whose checksums are right.
Tiers differ by no bit here, so both comparisons are for equality: there is no tolerance in which a fault could hide.

What differs is told, counted, and taken out of service by the engine's thread before its next step (`settle`).
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moetier.engine.counters import Checks
from moetier.engine.model import IntegrityError, TieredModel
from moetier.engine.recording import Call
from moetier.kernels.cpu import CpuExperts, ThreadPool, available_isas
from moetier.tiers.arena import Arena
from moetier.tiers.dram import DramTier

logger = logging.getLogger(__name__)

TURN_SECONDS = 0.002
"""Seconds of checks between two rests, at least: waking the thread costs some 50 us of its own."""
TRIES = 3
"""Looks at a record of which bytes were wrong and which moved meanwhile, before its turn is over."""


class Slots(Protocol):
    """The device slots of a model, as far as they are watched (`sentinel.slots`)."""

    def experts(self) -> Iterator[tuple[int, int]]:
        """Yield index of the layer and expert of each slot that is live."""

    def problem(self, index: int, expert: int) -> str | None:
        """Say what is wrong with the bytes of a slot, "" for nothing; None where it was refilled meanwhile."""

    def cure(self, index: int, expert: int, right: NDArray[np.uint8]) -> str:
        """Put the `right` bytes there, or take the slot out of service: which of them, in words. Between steps."""


@dataclass(frozen=True)
class Suspect:
    """Bytes that are wrong. address: of a record in DRAM; 0: a device slot."""

    index: int
    expert: int
    address: int
    wrong: str


class Sentinel:
    """Watches a model's tiers from `start` to `close`.

    `settle` and `sample` belong to the engine's thread, all else to the sentinel's own.
    """

    def __init__(self, tiers: TieredModel, share: float, *, halt: bool, seed: int | None = None) -> None:
        """share: of one CPU's time, 0 to 1. halt: end the engine before the next step once anything differs."""
        self._tiers, self._share, self._halt = tiers, share, halt
        self.checks: Checks = tiers.checks
        self._rng = np.random.default_rng(seed)
        self._room = Arena(1, tiers.part.room, tiers.part.shift)
        """For a record, where the kernels can read it."""
        self._pool = ThreadPool(1)
        others = [isa for isa in available_isas() if isa != tiers.kernel.isa]
        self.isa = others[0] if others else tiers.kernel.isa
        """Instruction set of the second opinion; the serving one where the machine has no other."""
        self._second = tiers.make_kernel(self.isa, self._pool, 1)
        self._slots: Slots | None = None
        self._turn: Iterator[None] = iter(())
        self._suspects: list[Suspect] = []
        self._error: IntegrityError | None = None
        self.wanted = False
        """Whether the next call is looked at by `sample`."""
        self._skip = 0
        self._row: Call | None = None
        """One token of a call."""
        self._record_seconds = self._call_seconds = 0.0
        self._rounds = [time.monotonic()] * 2
        """When the round before began, and the one under way."""
        self._started = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="moetier-sentinel", daemon=True)

    def start(self) -> None:
        """Begin, once the records are loaded and the device's graphs are captured; again is nothing."""
        if self._started:
            return
        self._started = True
        self._tiers.at_close(self.close)  # before what it looks at is gone: what comes last is called first
        self._tiers.context.sampler = self
        self._thread.start()

    def watch(self, slots: Slots) -> None:
        """Look after device slots too; from any thread."""
        self._slots = slots

    # -- the engine's thread -----------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Take what is wrong out of service; between steps. IntegrityError where the engine is to end."""
        while self._suspects:
            self._cure(self._suspects.pop())
        if self._error is not None:
            raise self._error

    def sample(self, call: Call) -> None:
        """Copy a row of a call that was served, of each layer as likely; called while `wanted`."""
        if self._skip > 0 or not len(call.x):
            self._skip -= 1
            return
        row = int(self._rng.integers(len(call.x)))
        one = slice(row, row + 1)
        self._row = Call(
            call.layer, call.x[one].copy(), call.ids[one].copy(), call.weights[one].copy(), call.out[one].copy()
        )
        self.wanted = False

    def _cure(self, suspect: Suspect) -> None:
        index, expert = suspect.index, suspect.expert
        if suspect.address:
            tier = self._tiers.dram[index]
            with self._tiers.lock:
                if int(tier.addresses[expert]) != suspect.address or not self._wrong(index, expert, suspect.address):
                    return  # it was evicted meanwhile
                tier.quarantine(expert)
            done = "its room is not used any more, and the record is read anew when it is needed"
            where = "DRAM"
        else:
            assert self._slots is not None
            if not self._slots.problem(index, expert):
                return  # it was refilled meanwhile, or is cured already
            right = np.empty(self._tiers.part.bytes, np.uint8)
            self._read(index, expert, right)
            done, where = self._slots.cure(index, expert, right), "its device slot"
        self.checks.wrong_records += 1
        self._tell(
            f"layer {self._number(index)}, expert {expert}: the record in {where} has {suspect.wrong}; {done}. Answers "
            f"of the last {self._age():.0f} s may have been computed from it"
        )

    # -- the sentinel's thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.is_set():
            begun, cpu = time.perf_counter(), time.thread_time()
            try:
                self._turn_of_checks(begun)
            except Exception:  # a check that cannot be made costs that check, never the service
                logger.exception("moetier: the sentinel could not check; it goes on")
                self._stop.wait(1)
            self.checks.us += (time.thread_time() - cpu) * 1e6
            self._stop.wait((time.perf_counter() - begun) * (1 / self._share - 1))

    def _turn_of_checks(self, begun: float) -> None:
        while not self._stop.is_set() and time.perf_counter() - begun < TURN_SECONDS:
            start = time.perf_counter()
            if self._row is not None and self._call_seconds <= self._record_seconds:
                row, self._row = self._row, None
                self._check_row(row)
                self._call_seconds += time.perf_counter() - start
                continue
            if self._row is None and not self.wanted:
                self._skip = int(self._rng.integers(max(len(self._tiers.dram), 1)))
                self.wanted = True
            if not self._check_next_record():
                return
            self._record_seconds += time.perf_counter() - start

    def _check_next_record(self) -> bool:
        """Check one record; whether there is any."""
        for _ in range(2):
            if next(self._turn, self) is not self:
                return True
            self._turn = self._round()
        return False

    def _round(self) -> Iterator[None]:
        """Check every record that is in DRAM or in a slot, one at each step."""
        self._rounds = [self._rounds[1], time.monotonic()]
        for index, tier in list(self._tiers.dram.items()):
            for expert in map(int, tier.resident):
                if suspect := self._look(index, expert, tier):
                    self._suspects.append(suspect)
                self.checks.records += 1
                yield
        if self._slots is not None:
            for index, expert in self._slots.experts():
                wrong = self._slots.problem(index, expert)
                if wrong:
                    self._suspects.append(Suspect(index, expert, 0, wrong))
                self.checks.records += wrong is not None
                yield
        self.checks.rounds += 1

    def _look(self, index: int, expert: int, tier: DramTier) -> Suspect | None:
        """Compare a record in DRAM with its checksums; one that is not there, or moves from look to look, is none."""
        for _ in range(TRIES):
            address = int(tier.addresses[expert])
            wrong = self._wrong(index, expert, address) if address else ""
            if not wrong:
                return None
            if int(tier.addresses[expert]) == address:
                return Suspect(index, expert, address, wrong)
        return None

    def _wrong(self, index: int, expert: int, address: int) -> str:
        """Say what is wrong with a record in DRAM, "" for nothing."""
        part = self._tiers.part
        return self._tiers.store.problem(index, expert, _bytes_at(address, part.bytes), part.first)

    def _check_row(self, call: Call) -> None:
        found = self._computed(self._second, call, int(self._rng.choice(self._tiers.pool.cpus)))
        self.checks.calls += 1
        if not np.array_equal(found, call.out):
            self.checks.wrong_calls += 1
            self._tell(f"layer {self._number(call.layer)}: {self._diagnosis(call, found)}")

    def _computed(self, kernel: CpuExperts, call: Call, cpu: int) -> NDArray[np.uint16]:
        """Compute a row on one CPU from bytes with the right checksums, one expert after the other."""
        with suppress(OSError):  # a CPU that was taken from us meanwhile
            os.sched_setaffinity(threading.get_native_id(), {cpu})
        experts, _ = kernel.begin(call.x, call.ids, call.weights)
        here = np.array([self._room.address(0)], np.uint64)
        for place, expert in enumerate(map(int, experts)):
            self._fetch(call.layer, expert)
            kernel.gate_up(np.array([place], np.int32), here)
            kernel.down(place, here)
        out = np.empty_like(call.out)
        kernel.finish(out)
        return out

    def _fetch(self, index: int, expert: int) -> None:
        """Bring the right bytes of a record into our room: those in DRAM, or where they are not right the store's."""
        address = int(self._tiers.dram[index].addresses[expert])
        ours = self._tiers.part.of(self._room.view(0))
        if address:
            ours[:] = _bytes_at(address, ours.size)
            if not self._tiers.store.problem(index, expert, ours, self._tiers.part.first):
                return
        self._read(index, expert, ours)

    def _read(self, index: int, expert: int, out: NDArray[np.uint8]) -> None:
        """Read a rank's part of a record from the store, apart from the reads that serve, which are counted."""
        part, whole = self._tiers.part, np.empty(self._tiers.store.layout.stride, np.uint8)
        self._tiers.store.read_record(index, expert, whole)
        out[:] = whole[part.begin : part.end]

    def _diagnosis(self, call: Call, found: NDArray[np.uint16]) -> str:
        """Say whether bytes or arithmetic were wrong, and where, of a row whose bits differ from `found`."""
        tier = self._tiers.dram[call.layer]
        serving = self._tiers.make_kernel(self._tiers.kernel.isa, self._pool, 1)
        cpus = self._tiers.pool.cpus
        differ = int((found != call.out).sum())
        what = f"{differ} of {found.size} values of a row that was served differ from those that {self.isa} computes"
        for expert in map(int, np.unique(call.ids[(call.ids >= 0) & (call.ids < self._tiers.part.geometry.experts)])):
            if suspect := self._look(call.layer, expert, tier):
                self._suspects.append(suspect)
                return f"{what}: bytes were wrong, expert {expert} has {suspect.wrong}"
        bad = [cpu for cpu in cpus if not np.array_equal(self._computed(serving, call, cpu), found)]
        if len(bad) == len(cpus):
            return (
                f"{what}: arithmetic, {serving.isa} and {self.isa} differ from each other on every CPU: a fault of "
                "moetier or of this processor; please report it"
            )
        if bad:
            others = ",".join(map(str, sorted(set(cpus) - set(bad)))) or "OTHERS"
            return (
                f"{what}: arithmetic was wrong, and still is on CPU {', '.join(map(str, bad))}; serve without it: "
                f"`--set cpus={others}`"
            )
        return (
            f"{what}: once, for the same row is right on every CPU now and the bytes are right: memory that held the "
            "row or a core was at fault for a moment"
        )

    # -- both --------------------------------------------------------------------------------------------------------

    def _tell(self, text: str) -> None:
        logger.error("moetier: corruption found: %s", text)
        if self._halt:
            self._error = IntegrityError(
                f"corruption found: {text}. The engine ends, as halt_on_corruption asks: until it is known why, this "
                "machine's answers are not to be trusted"
            )

    def _number(self, index: int) -> int:
        return self._tiers.store.manifest.layers[index].number

    def _age(self) -> float:
        """Seconds since the round before the one under way began: so old may the last look at a record be."""
        return time.monotonic() - self._rounds[0]

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._tiers.context.sampler = None
        if self._thread.is_alive():
            self._thread.join()
        self._pool.close()


def _bytes_at(address: int, size: int) -> NDArray[np.uint8]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
