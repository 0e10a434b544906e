"""All settings of the tiers: one typed object, the same on the command line and in vLLM's --additional-config."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import ErrorDetails

from moetier.amounts import AUTO, CPU_LIST, MAX_THREADS, cpu_list, parse_amount
from moetier.errors import SettingsError

PolicyName = Literal["lru", "second-touch", "frequency"]


class Settings(BaseModel):
    """Decisions of a person about tiers. Every field has a default but the store."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    store: Path = Field(description="folder of the expert store (`moetier store build`)")
    dram_records: int | str = Field(
        "auto",
        description="experts of each layer to keep in DRAM: a number, a share such as 25%, or auto (what fits)",
    )
    staging_records: int = Field(
        8, ge=1, description="records of DRAM that all layers share for experts that are read and not kept"
    )
    threads: int | None = Field(
        None, ge=1, le=MAX_THREADS, description="CPU threads that compute experts (default: the CPUs allowed)"
    )
    cpus: tuple[Annotated[int, Field(ge=0, le=999_999)], ...] | None = Field(
        None, description="CPUs that these threads may use, such as 0-3,8 (default: those allowed)"
    )
    isa: str | None = Field(None, description="instruction set of the CPU kernels (default: the best there is)")
    disk_threads: int = Field(8, ge=1, le=256, description="reads from the store that may be under way at once")
    slots: int | str = Field(
        0,
        description="experts of each layer in device slots: a number, a share such as 25%, or auto (what the device's "
        "memory leaves); 0: the CPU computes all",
    )
    spare_slots: int | None = Field(
        None, ge=0, description="how many of the slots may be refilled while serving (default: a quarter)"
    )
    staging_slots: int = Field(64, ge=2, le=64, description="device slots for records that are streamed, of all layers")
    planned_tokens: int = Field(
        64, ge=1, le=512, description="the most tokens of a step that the device plans by itself; larger ones stream"
    )
    fills_per_step: int = Field(4, ge=0, le=64, description="records copied into spare slots after a step, at most")
    patience_seconds: float = Field(
        60.0, gt=0, le=3600, description="how long the device waits for the CPU before the engine stops"
    )
    heat_file: Path | None = Field(None, description="where heat is kept (default: heat.json beside the store's files)")
    heat_save_seconds: float = Field(60.0, gt=0, le=1e9, description="seconds between saves of heat")
    record_calls: Path | None = Field(
        None, description="write every layer call (inputs and output bits) to this new folder, for identity --replay"
    )
    record_trace: Path | None = Field(
        None, description="write which experts each layer call routes to, to this new file (`moetier trace`)"
    )
    policy: PolicyName = Field("frequency", description="which expert of a layer gives way for a missed one")
    identity_check: int = Field(
        16, ge=0, le=100_000, description="random layer calls that are compared through every path at start; 0: none"
    )
    check_at_end: bool = Field(
        False, description="when the server ends, compare its tables and the bytes of every record in DRAM"
    )
    check_staging: bool = Field(
        False, description="for tests: assert at every copy that the staging slot has no other writer in this step"
    )
    sentinel: float = Field(
        0.005,
        ge=0,
        le=0.5,
        description="share of one CPU's time for checks of what serves, bytes and arithmetic, while it serves; 0: none",
    )
    halt_on_corruption: bool = Field(
        False, description="end the engine once such a check finds that bytes or arithmetic were wrong"
    )
    counters_folder: Path | None = Field(
        None, description="where each process writes what it counted, for /metrics (`moetier serve` sets it)"
    )
    failure_file: Path | None = Field(
        None, description="where the reason is written if the engine must stop (`moetier serve` sets and shows it)"
    )

    @field_validator(
        *(
            "threads",
            "cpus",
            "staging_records",
            "disk_threads",
            "identity_check",
            "spare_slots",
        ),
        *("staging_slots", "planned_tokens", "fills_per_step"),
        mode="before",
    )
    @classmethod
    def _no_booleans(cls, value: Any) -> Any:
        """Python counts true as 1; a person who writes it means something else."""
        if any(isinstance(part, bool) for part in (value if isinstance(value, list | tuple) else [value])):
            raise ValueError("expected a number, found true or false")
        return value

    @field_validator(
        "heat_file", "record_calls", "record_trace", "counters_folder", "failure_file", "store", mode="before"
    )
    @classmethod
    def _no_empty_path(cls, value: Any) -> Any:
        if value == "":
            raise ValueError("expected a path, found an empty one")
        return value

    @field_validator("cpus", mode="before")
    @classmethod
    def _cpus(cls, value: Any) -> Any:
        """As the kernel and taskset write them, one number, or a list of numbers."""
        if (type(value) is int or isinstance(value, str)) and CPU_LIST.fullmatch(str(value)):
            value = cpu_list(str(value)) or value
        if not (value is None or isinstance(value, list | tuple)):
            raise ValueError(f"expected CPUs such as 0-3,8, found {value!r}")
        return value

    @field_validator("slots", "dram_records", mode="before")
    @classmethod
    def _amounts(cls, value: Any) -> int | str:
        """One spelling for each amount: a number is an int, and nothing is 0."""
        if isinstance(value, bool):  # Python counts true as 1
            raise ValueError("expected a number, found true or false")
        amount = parse_amount(value)
        if amount is None:
            return AUTO
        return str(value) if amount.percent else amount.of(0)

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Settings:
        """Settings from plain values; SettingsError names every key that is wrong, and the nearest known one."""
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            raise SettingsError("; ".join(map(_problem, error.errors()))) from None

    def records_of(self, experts: int) -> int | None:
        """Return the records of each layer of `experts` experts to keep in DRAM; None: what fits.

        SettingsError where a layer has fewer experts than asked for.
        """
        amount = parse_amount(self.dram_records)
        if amount is not None and amount.of(experts) > experts:
            raise SettingsError(
                f"dram_records: {self.dram_records} experts of each layer were asked for, a layer has {experts}; "
                "say 100% for all"
            )
        return None if amount is None else amount.of(experts)

    def slots_of(self, experts: int) -> int | None:
        """Return the slots of each layer of `experts` experts, no more than those; None: what fits."""
        return None if (amount := parse_amount(self.slots)) is None else min(amount.of(experts), experts)

    def spare_of(self, slots: int, experts: int) -> int:
        """How many of the `slots` of a layer may be refilled: a quarter, or as said; none where all are resident."""
        if slots == experts:
            return 0
        return slots // 4 if self.spare_slots is None else min(self.spare_slots, slots)

    @property
    def heat_path(self) -> Path:
        return self.heat_file or self.store / "heat.json"


def _problem(detail: ErrorDetails) -> str:
    kind, message = detail["type"], detail["msg"]
    key = ".".join(str(part) for part in detail["loc"])
    if kind == "extra_forbidden":
        near = difflib.get_close_matches(key, Settings.model_fields, n=1, cutoff=0.4)
        return f"unknown setting {key!r}" + (f", did you mean {near[0]!r}?" if near else "; known: " + _known())
    if kind == "missing":
        return f"setting {key!r} is missing"
    if kind == "value_error":  # ours, which say what was found where it helps
        return f"setting {key!r}: {message.removeprefix('Value error, ')}"
    return f"setting {key!r}: {message.replace('Input should be', 'expected')}, found {reprlib.repr(detail['input'])}"


def _known() -> str:
    return ", ".join(Settings.model_fields)
