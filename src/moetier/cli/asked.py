"""Options that `moetier plan` and `moetier calibrate` share: a machine, a placement, a workload, an engine."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from moetier.amounts import amount_of
from moetier.doctor.cache import for_disk, load_rates
from moetier.doctor.examine import facts
from moetier.errors import SettingsError
from moetier.machine.facts import Machine
from moetier.machine.file import read_machine
from moetier.plan.describe import DESCRIBED_THREADS, describe
from moetier.plan.geometry import Geometry
from moetier.plan.placement import Wanted
from moetier.plan.predict import Draft
from moetier.plan.workload import DEFAULT

DEFAULT_CONTEXT = 32768


def _option(text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, **more)


@dataclass(frozen=True)
class Asked:
    """A model and a machine to plan for. A machine is a file, words, or (all None) the one that this runs on."""

    machine: Annotated[Path | None, _option("What `moetier doctor --json` wrote (default: this machine).")] = None
    gpus: Annotated[str | None, _option("A machine in words: 4x32GB, 1xRTX5090, or none.")] = None
    ram: Annotated[str | None, _option("Its RAM: 256GB.")] = None
    disk: Annotated[str | None, _option("What random reads of records reach: 7GB/s.")] = None
    memory: Annotated[str | None, _option("DRAM: 8xDDR5-4800, or a rate such as 250GB/s.")] = None
    pcie: Annotated[str | None, _option("Each GPU's link: 5x16.")] = None
    gpu_rate: Annotated[str | None, _option("Each GPU's memory rate: 1792GB/s.")] = None
    threads: Annotated[int, _option("CPU threads of a machine in words.", min=1, max=4096)] = DESCRIBED_THREADS
    disk_size: Annotated[str | None, _option("Free space on disk: 2TB.")] = None
    dram_records: Annotated[str | None, _option("Experts of each layer in DRAM: a number, 25%, auto.")] = None
    slots: Annotated[str | None, _option("Experts of each layer in slots of the devices: a number, 25%, auto.")] = None
    residents: Annotated[int, _option("Slots fixed by heat, whose records take no DRAM.", min=0)] = 0
    tables: Annotated[str, _option("Lookup tables (Engram): auto, dram or disk.")] = "auto"
    context: Annotated[int | None, _option("Tokens of context (default: 32768, or all the model has).", min=1)] = None
    streams: Annotated[int, _option("Sequences at once, each of that context.", min=1, max=65536)] = 1
    kv_format: Annotated[str | None, _option("Of the KV cache: bf16, fp8, or one of the model's own.")] = None
    kv_bytes_per_token: Annotated[
        float | None, _option("KV bytes a token, where the attention is not known.", min=0)
    ] = None
    workload: Annotated[
        str, _option("Which experts are asked for: short, mixed, deep, or a `moetier trace record` file.")
    ] = DEFAULT
    chunk: Annotated[int, _option("Tokens of a prompt that one step takes.", min=1, max=1 << 20)] = Wanted.chunk
    engine: Annotated[str | None, _option("Whose time outside the experts: vllm-graphs, vllm-eager or vllm-cpu.")] = (
        None
    )
    draft_tokens: Annotated[int | None, _option("Speculation: tokens drafted a step.", min=1, max=64)] = None
    accepted: Annotated[float, _option("Tokens that come out of such a step on average.", min=1, max=65)] = 1.0

    @property
    def described(self) -> bool:
        """Whether the machine is in words."""
        words = (self.gpus, self.ram, self.disk, self.memory, self.pcie, self.gpu_rate, self.disk_size)
        return any(word is not None for word in words)

    def on(self) -> Machine:
        """The machine that was meant; SettingsError where it is said twice or only in part."""
        if self.machine is not None:
            if self.described:
                raise SettingsError("a machine by --machine or in words (--gpus, --ram, ...), not both; leave one out")
            return read_machine(self.machine)
        if not self.described:
            here = facts(Path())
            return for_disk(here.model_copy(update={"rates": load_rates(here.identity)}))
        if self.gpus is None or self.ram is None:
            raise SettingsError("a machine in words needs at least --gpus (or none) and --ram")
        return describe(
            self.gpus,
            self.ram,
            self.disk,
            memory=self.memory,
            pcie=self.pcie,
            gpu_rate=self.gpu_rate,
            threads=self.threads,
            disk_size=self.disk_size,
        )

    def wanted(self, geometry: Geometry) -> Wanted:
        """The placement that was asked for."""
        return Wanted(
            context=min(DEFAULT_CONTEXT, geometry.max_context) if self.context is None else self.context,
            streams=self.streams,
            dram_records=amount_of(self.dram_records, "--dram-records", geometry.experts),
            slots=amount_of(self.slots, "--slots", geometry.experts),
            residents=self.residents,
            kv_format=self.kv_format,
            tables=self.tables,
            chunk=self.chunk,
            draft=self.draft_tokens is not None,
        )

    @property
    def draft(self) -> Draft | None:
        """Speculation; SettingsError where more comes out of a step than goes in."""
        if self.draft_tokens is None:
            if self.accepted != 1:
                raise SettingsError(f"--accepted {self.accepted:g} is of speculation: say --draft-tokens too")
            return None
        if self.accepted > self.draft_tokens + 1:
            most = self.draft_tokens + 1
            raise SettingsError(
                f"--accepted {self.accepted:g}: a step with {self.draft_tokens} drafted tokens brings at most {most}"
            )
        return Draft(self.draft_tokens, self.accepted)


def asking(verb: Callable[..., None]) -> Callable[..., None]:
    """`verb`, whose parameter `asked` becomes one option for each field of `Asked`."""
    hints, shared = get_type_hints(Asked, include_extras=True), fields(Asked)
    own = [one for one in inspect.signature(verb, eval_str=True).parameters.values() if one.name != "asked"]
    options = [
        inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=hints[one.name])
        for one in shared
    ]

    @functools.wraps(verb)
    def command(**values: Any) -> None:
        asked = Asked(**{one.name: values.pop(one.name) for one in shared})
        verb(asked=asked, **values)

    parameters = [*(one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own), *options]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    return command
