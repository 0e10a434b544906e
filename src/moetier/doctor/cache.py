"""Measured rates, kept in the user's cache folder under the hardware's identity: each machine measures once."""

from __future__ import annotations

from pathlib import Path

from moetier.doctor.judge_rates import require_possible
from moetier.errors import SettingsError
from moetier.files import write_durably
from moetier.folders import cache_home
from moetier.machine.facts import Machine, Rates
from moetier.machine.file import read_rates


def rates_file(identity: str) -> Path:
    """Where the rates of this hardware are kept; SettingsError where there is no home to keep them in."""
    return cache_home() / "moetier" / f"rates-{identity}.json"


def load_rates(identity: str, file: Path | None = None) -> Rates | None:
    """The rates of this hardware, measured before, or those of `file`, which are the user's own word.

    Raises
    ------
    SettingsError
        The file is damaged or cannot be read, or the cached one is of other hardware.

    """
    if file is not None:
        return require_possible(read_rates(file), str(file))
    try:
        path = rates_file(identity)
    except SettingsError:
        return None  # no home: nothing was kept
    try:
        rates = read_rates(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SettingsError(
            f"{path}: measured rates cannot be read ({error.strerror}); set XDG_CACHE_HOME to a folder of yours"
        ) from error
    if rates.identity != identity:
        raise SettingsError(f"{path}: these are rates of {rates.identity}; measure anew: moetier doctor --measure")
    return require_possible(rates, str(path))


def save_rates(rates: Rates) -> Path:
    """Keep rates. What was measured on other disks stays: `disk_read` of one device replaces only its own."""
    path = rates_file(rates.identity)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, rates.model_dump_json(indent=1).encode())
    except OSError as error:
        raise SettingsError(
            f"{path}: measured rates cannot be kept ({error.strerror}); free space, or set XDG_CACHE_HOME to a folder "
            "that can be written; with --json they are printed all the same"
        ) from error
    return path


def with_disks_of(rates: Rates, before: Rates | None) -> Rates:
    """`rates`, and of `before` the disks that were not measured now."""
    if before is None:
        return rates
    measured = {rate.device for rate in rates.disk_read}
    kept = tuple(rate for rate in before.disk_read if rate.device not in measured)
    return rates.model_copy(update={"disk_read": (*rates.disk_read, *kept)})


def for_disk(machine: Machine) -> Machine:
    """The machine with only its own disk's rates, where it names a disk."""
    if machine.rates is None or machine.disk is None:
        return machine
    ours = tuple(rate for rate in machine.rates.disk_read if rate.device == machine.disk.device)
    return machine.model_copy(update={"rates": machine.rates.model_copy(update={"disk_read": ours})})
