"""What is read of the machine beside a trial: others' CPU time, energy where it can be read, nothing where not."""

from __future__ import annotations

import asyncio
import shlex
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from moetier_bench.meter import POWERCAP, EnergyCounter, Meter, nvml_counters, nvml_devices, rapl_counters
from moetier_bench.probes import AnyProbe, Coding, Decode, Fairness, Growth, Mixed, Prefill, Prefix, Soak
from moetier_bench.probes.base import Calm, Raw
from moetier_bench.result import Served
from moetier_bench.samples import Trial

BURN = "import time\nwhile time.process_time() < 0.6: pass"
"""Work of 0.6 CPU seconds."""
SERVER = f"""
import subprocess, sys, time
sys.stdin.readline()
{BURN}
subprocess.run([sys.executable, "-c", {BURN!r}])
print("done", flush=True)
time.sleep(60)
"""


def test_work_of_the_server_and_of_its_ended_children_is_its_own() -> None:
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        try:
            meter = Meter(psutil.Process(server.pid))
            before = meter.mark()
            assert server.stdin is not None
            assert server.stdout is not None
            server.stdin.write(b"\n")
            server.stdin.flush()
            assert server.stdout.readline() == b"done\n"
            after = meter.mark()
        finally:
            server.kill()
    assert after.own - before.own >= 1.1
    assert after.busy - before.busy >= 1.1


def test_work_of_others_is_seen() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as server:
        try:
            meter = Meter(psutil.Process(server.pid))
            mark = meter.mark()
            # The shell ends at once: what it started is nobody's child here.
            other = f"{sys.executable} -c {shlex.quote(BURN + chr(10) + 'print(1)')} & exit"
            with subprocess.Popen(["sh", "-c", other], stdout=subprocess.PIPE) as shell:
                assert shell.stdout is not None
                assert shell.stdout.read() == b"1\n"
            found, seconds = meter.foreign_cpus(mark), meter.mark().at - mark.at
        finally:
            server.kill()
    assert found is not None
    assert found * seconds >= 0.5


def test_others_are_not_known_where_the_server_is_not_ours() -> None:
    meter = Meter(None)
    assert meter.foreign_cpus(meter.mark()) is None


def test_a_moment_is_judged_by_the_seconds_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = Meter(psutil.Process())
    clock = iter([0.0, 1.0, 3.0, 3.5, 3.51])
    used = iter([0.0, 0.5, 0.5, 0.5, 0.6])
    monkeypatch.setattr("moetier_bench.meter.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(meter, "_busy", lambda: next(used))
    monkeypatch.setattr(meter, "_own", lambda: 0.0)
    marks = [meter.mark() for _ in range(4)]
    # A tick of 0.1 s within 10 ms would be 10 CPUs; since 1.0 s it is one tick of 2.51 s.
    assert meter.foreign_cpus(marks[-1]) == pytest.approx(0.1 / 2.51, abs=1e-3)


@pytest.mark.parametrize(("limit", "kept"), [(None, 1), (0.5, 3), (0.05, 4)], ids=str)
def test_a_disturbed_trial_is_measured_again_but_not_for_ever(limit: float | None, kept: int) -> None:
    foreign = iter([0.9, 0.7, 0.1, 0.1, 0.1])

    async def measure() -> Trial:
        return Trial(label="C1", streams=(), foreign_cpus=next(foreign))

    assert len(asyncio.run(Calm(limit, left=3).measured(measure))) == kept


@pytest.mark.parametrize("probe", [Coding(), Mixed(), Decode(), Prefill(), Growth(), Prefix(), Fairness()], ids=repr)
def test_nothing_measured_is_no_figure(probe: AnyProbe) -> None:
    """As where others disturbed every trial: no cell is a number, such as a share of nought."""
    assert {cell.value for cell in probe.cells(Raw())} == {None}


def test_energy_of_a_shared_machine_is_not_the_servers() -> None:
    def cell(foreign: float) -> tuple[float | None, str | None]:
        traffic = Trial(label="soak", streams=(), seconds=1.0, joules=5.0, foreign_cpus=foreign)
        found = {cell.name: cell for cell in Soak().cells(Raw(trials=(traffic,)))}
        assert found["soak.throughput"].value == 0.0
        return found["soak.energy"].value, found["soak.energy"].reason

    assert cell(0.1) == (5.0, None)
    assert cell(3.0) == (None, "others used 3 CPUs meanwhile")


def domain(root: Path, place: str, name: str, energy: str, wraps: str = "1000000") -> Path:
    folder = root / place
    folder.mkdir(parents=True)
    for file, text in (("name", name), ("energy_uj", energy), ("max_energy_range_uj", wraps)):
        (folder / file).write_text(text + "\n")
    return folder


@pytest.fixture
def powercap(tmp_path: Path) -> Path:
    domain(tmp_path, "intel-rapl:0", "package-0", "250000")
    domain(tmp_path, "intel-rapl:0:0", "core", "100000")
    domain(tmp_path, "intel-rapl:1", "package-1", "500000")
    domain(tmp_path, "intel-rapl:2", "psys", "900000")
    domain(tmp_path, "intel-rapl:3", "package-2", "no number")
    (tmp_path / "intel-rapl").mkdir()
    return tmp_path


def test_packages_count_once(powercap: Path) -> None:
    counters = rapl_counters(powercap)
    assert [counter.name for counter in counters] == ["RAPL package-0", "RAPL package-1"]
    assert [counter.read() for counter in counters] == [0.25, 0.5]


def test_a_counter_that_began_again_at_zero(powercap: Path) -> None:
    (counter, _) = rapl_counters(powercap)
    assert counter.between(0.9, 0.25) == pytest.approx(0.35)
    assert counter.between(0.25, 0.9) == pytest.approx(0.65)


def test_joules_are_the_sum_of_all_counters(powercap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moetier_bench.meter.POWERCAP", powercap)
    meter = Meter(None)
    mark = meter.mark()
    (powercap / "intel-rapl:0" / "energy_uj").write_text("350000")
    (powercap / "intel-rapl:1" / "energy_uj").write_text("100000")
    rapl = meter.joules(mark)
    assert rapl is not None
    assert rapl >= 0.1 + 0.6 - 1e-6
    (powercap / "intel-rapl:1" / "energy_uj").unlink()
    assert meter.joules(mark) is None, "one that cannot be read any more leaves no sum"


@pytest.mark.skipif(bool(rapl_counters(POWERCAP) or nvml_devices()), reason="this machine has counters of energy")
def test_without_a_counter_there_is_no_figure_but_a_reason() -> None:
    meter = Meter(None)
    assert meter.energy_of == ()
    assert meter.joules(meter.mark()) is None
    cells = {cell.name: cell for cell in Served(command=(), start_seconds=(1.0,), idle_watts=None).cells()}
    assert cells["boot.idle_power"].value is None


@pytest.mark.skipif(not nvml_devices(), reason="no NVIDIA device whose energy can be read")
def test_a_device_uses_energy_while_time_goes_by() -> None:
    (counter, *_) = nvml_counters(nvml_devices())
    before = counter.read()
    time.sleep(0.5)
    assert 0 < EnergyCounter.between(counter, before, counter.read()) < 1000
