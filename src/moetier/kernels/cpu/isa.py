"""Which instruction sets the kernels can use here, and the one that is used."""

from __future__ import annotations

import os

from moetier.errors import SettingsError
from moetier.kernels.cpu import _native

ISA_VARIABLE = "MOETIER_ISA"
"""Environment variable that forces a kernel set: the choice must reach worker processes that vLLM starts."""


def machine_isas() -> tuple[str, ...]:
    """Kernel sets that this build has and this machine can run, best first."""
    return tuple(_native.available_isas())


def available_isas() -> tuple[str, ...]:
    """Kernel sets to choose from, best first; where MOETIER_ISA forces one, from that one down.

    Raises
    ------
    SettingsError
        MOETIER_ISA names something else than one of `machine_isas`.

    """
    isas = machine_isas()
    forced = os.environ.get(ISA_VARIABLE)
    return isas if not forced else isas[isas.index(_known(forced, isas, ISA_VARIABLE)) :]


def choose_isa(name: str | None = None) -> str:
    """The kernel set `name`, or the best one; SettingsError where it is unknown or this machine cannot run it."""
    return available_isas()[0] if name is None else _known(name, machine_isas(), "isa")


def _known(name: str, isas: tuple[str, ...], setting: str) -> str:
    if name not in isas:
        raise SettingsError(f"{setting}={name!r}: this machine and build offer {', '.join(isas)}; choose one of those")
    return name
