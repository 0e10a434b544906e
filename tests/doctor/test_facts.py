"""The facts' file: what is written is read, and nothing else."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from moetier.errors import MoetierError
from moetier.machine.facts import DiskRate, DramRate, Machine, Memory, Rates, hardware_identity
from moetier.machine.file import LARGEST, read_machine, read_rates
from tests.doctor.machines import GIB, gpu, machine

RATES = Rates(
    identity="x",
    measured_at="2026-01-01T00:00:00+00:00",
    dram_read=(DramRate(threads=8, bytes_per_s=1e11),),
    disk_read=(DiskRate(device="/dev/nvme0n1", queue_depth=4, record_bytes=18800640, bytes_per_s=7e9),),
)


@pytest.mark.parametrize(
    "found", [machine(), machine(rates=RATES), machine(gpus=(), disk=None)], ids=["sound", "measured", "no gpu"]
)
def test_what_is_written_is_read(found: Machine, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(found.to_json())
    assert read_machine(path) == found


def test_rates_from_either_file(tmp_path: Path) -> None:
    (tmp_path / "machine.json").write_text(machine(rates=RATES).to_json())
    (tmp_path / "rates.json").write_text(RATES.model_dump_json())
    assert read_rates(tmp_path / "machine.json") == read_rates(tmp_path / "rates.json") == RATES
    (tmp_path / "bare.json").write_text(machine().to_json())
    with pytest.raises(MoetierError, match="expected measured rates, found none"):
        read_rates(tmp_path / "bare.json")


def changed(at: str, value: Any) -> bytes:
    """The file of a sound machine with one value changed, "a.0.b" naming where."""
    found = json.loads(machine(rates=RATES).to_json())
    *way, last = at.split(".")
    part = found
    for step in way:
        part = part[int(step)] if isinstance(part, list) else part[step]
    part[last] = value
    return json.dumps(found).encode()


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "Invalid JSON"),
        (b"\x00\xff" * 50, "Invalid JSON"),
        (b"[" * 100_000, "Invalid JSON"),
        (b"[]", "object"),
        (b"{}", "identity"),
        (changed("schema_version", 2), "schema_version"),
        (changed("cpu.threads", 0), "cpu.threads"),
        (changed("cpu.speed", 3), "cpu.speed"),
        (changed("gpus.0.compute_capability", "sm_120"), "gpus.0.compute_capability"),
        (changed("gpus.0.memory_bytes", -1), "gpus.0.memory_bytes"),
        (changed("memory.available_bytes", "much"), "memory.available_bytes"),
        (changed("rates.dram_read.0.bytes_per_s", 0), "rates.dram_read.0.bytes_per_s"),
        (changed("rates.dram_read.0.bytes_per_s", float("inf")), "Invalid JSON|bytes_per_s"),
        (b" " * (LARGEST + 1), "at most"),
    ],
)
def test_one_error_names_what_is_wrong(content: bytes, found: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_bytes(content)
    with pytest.raises(MoetierError, match=found) as error:
        read_machine(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(MoetierError, match="regular file"):
        read_machine(tmp_path / "pipe")


def test_identity_is_of_what_decides_speed() -> None:
    found = machine()

    def of(**parts: Any) -> str:
        changed = {"cpu": found.cpu, "memory": found.memory, "gpus": found.gpus, **parts}
        return hardware_identity(changed["cpu"], changed["memory"], changed["gpus"])

    memory = Memory(total_bytes=64 * GIB - 5000, limit_bytes=9, available_bytes=1)
    moved = found.cpu.model_copy(update={"allowed": tuple(range(8, 16))})
    same = [of(), of(cpu=moved), of(memory=memory), of(gpus=(gpu(free_bytes=0, pcie_generation_now=5),))]
    assert set(same) == {found.identity}
    other = [
        of(memory=Memory(total_bytes=32 * GIB, limit_bytes=1, available_bytes=1)),
        of(gpus=()),
        of(gpus=(gpu(pcie_width=4),)),
        of(cpu=found.cpu.model_copy(update={"allowed": (0, 1)})),
        of(cpu=found.cpu.model_copy(update={"quota": 2.0})),
    ]
    assert len({*other, found.identity}) == 6
