"""Does this vLLM run this architecture on this device? From a table with a source for every answer (support.toml)."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import Field

from moetier.machine.facts import CPU, Answer, Fact, Gpu, Support

TABLE = Path(__file__).with_name("support.toml")


class Entry(Fact):
    """One entry of the table; its fields are explained there."""

    models: Annotated[tuple[str, ...], Field(min_length=1)]
    devices: Annotated[tuple[str, ...], Field(min_length=1)]
    since: str
    before: str
    verdict: Answer
    because: str
    sources: Annotated[tuple[str, ...], Field(min_length=1)]

    def matches(self, model_type: str, version: tuple[int, int], device: str) -> bool:
        """Whether it is about this model type, vLLM's (major, minor) and device."""
        return (
            (model_type in self.models or self.models == ("*",))
            and (self.devices == ("*",) or device in self.devices or device.partition(".")[0] in self.devices)
            and minor_of(self.since) <= version < minor_of(self.before)
        )


@cache
def table() -> tuple[Entry, ...]:
    """All entries, in order: the first that matches counts."""
    return tuple(Entry.model_validate(entry) for entry in tomllib.loads(TABLE.read_text())["entry"])


def minor_of(version: str) -> tuple[int, int]:
    """(major, minor) of a version such as 0.29.1rc1.dev9 or 0.32.0+cpu; (0, 0) for another form."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def check(model_type: str, vllm: str | None, device: str | None) -> Support:
    """Return what is known of this model type under this vLLM on this device.

    Parameters
    ----------
    model_type
        Of config.json.
    vllm
        vLLM's version; None: not installed, or not decided.
    device
        "cpu", or a compute capability such as "12.0"; None: not known.

    """
    answer, because = Answer.UNKNOWN, "nothing is known to us"
    sources: tuple[str, ...] = ()
    if vllm is None or device is None:
        because = "which vLLM it is is not known" if vllm is None else "the device's compute capability is not known"
    else:
        version = minor_of(vllm)
        entry = next((entry for entry in table() if entry.matches(model_type, version, device)), None)
        if entry is not None:
            answer, because, sources = entry.verdict, entry.because, entry.sources
    return Support(model_type=model_type, vllm=vllm, device=device, answer=answer, because=because, sources=sources)


def known_model_types() -> tuple[str, ...]:
    """Those that the table names."""
    return tuple(sorted({model for entry in table() for model in entry.models} - {"*"}))


def devices_of(gpus: tuple[Gpu, ...]) -> tuple[str | None, ...]:
    """Return what `check` wants to know of a machine's devices; without any it is the CPU."""
    return tuple(gpu.compute_capability for gpu in gpus) or (CPU,)
