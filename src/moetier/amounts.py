"""How people write amounts: a count, a share of a whole, or what fits; and lists of CPUs. Only this file reads them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from moetier.errors import SettingsError

COUNT = re.compile(r"[0-9]{1,18}", re.ASCII)
SHARE = re.compile(r"[0-9]{1,3}(\.[0-9]{1,9})?%", re.ASCII)
AUTO = "auto"
CPU_LIST = re.compile(r"[0-9]{1,4}(-[0-9]{1,4})?(,[0-9]{1,4}(-[0-9]{1,4})?)*")
MAX_THREADS = 4096
"""More than any machine has CPUs."""


@dataclass(frozen=True)
class Amount:
    """So many of something: a count, or percent of what there is."""

    count: int | None
    percent: Fraction = Fraction()

    def of(self, whole: int) -> int:
        """Return how many of `whole` that is, a share rounded down; more than `whole` where the count is."""
        return int(self.percent * whole / 100) if self.count is None else self.count


def parse_amount(value: object) -> Amount | None:
    """Return what `value` says: a number, a share such as 25%, or "auto" (None: what fits). ValueError otherwise."""
    text = str(value) if isinstance(value, int | str) and not isinstance(value, bool) else ""
    if text == AUTO:
        return None
    if COUNT.fullmatch(text):
        return Amount(int(text))
    if SHARE.fullmatch(text) and Fraction(text[:-1]) <= 100:
        return Amount(None, Fraction(text[:-1]))  # exactly: 0.57% of 10,000 are 57
    raise ValueError(f"expected a number, a share such as 25%, or auto, found {value!r:.80}")


def amount_of(value: int | str | None, name: str, whole: int) -> int | None:
    """Return how many of `whole` an option asks for; None: as planned, or what fits. SettingsError names the option."""
    try:
        amount = None if value is None else parse_amount(value)
    except ValueError as error:
        raise SettingsError(f"{name}: {error}; give one of those") from None
    return None if amount is None else amount.of(whole)


def cpu_list(found: str | None) -> tuple[int, ...]:
    """Return the numbers of a list such as "0-3,8"; empty where it is absent or malformed."""
    cpus: set[int] = set()
    for part in (found or "").split(","):
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal()):
            return ()
        cpus.update(range(int(first), int(last) + 1))
    return tuple(sorted(cpus))
