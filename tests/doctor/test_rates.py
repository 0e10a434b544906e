"""Rates are measured, kept per hardware and disk, and taken from a file where the user says so."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moetier.doctor import cache, judge_rates
from moetier.doctor.cache import for_disk, load_rates, rates_file, save_rates, with_disks_of
from moetier.doctor.examine import examine, examine_and_measure
from moetier.doctor.measure import cpu as cpu_measure
from moetier.doctor.measure import disk as disk_measure
from moetier.doctor.measure.cpu import measure_dram, measure_kernel, thread_counts
from moetier.doctor.measure.disk import measure_disk
from moetier.doctor.measure.gpu import measure_links
from moetier.doctor.measure.others import Others
from moetier.errors import SettingsError
from moetier.machine.facts import Disk, DiskRate, DramRate, KernelRate, Rates, Verdict
from moetier.machine.file import read_machine
from moetier.machine.limits import serving_threads
from moetier.machine.probe.cpu import probe_cpu
from moetier.machine.probe.disk import probe_disk
from tests.doctor.machines import gpu, machine, write
from tests.doctor.measuring import little_to_measure

RECORD = 64 << 10


def disk_rate(device: str, speed: float) -> DiskRate:
    return DiskRate(device=device, queue_depth=1, record_bytes=RECORD, bytes_per_s=speed)


RATES = Rates(identity="abc", dram_read=(DramRate(threads=1, bytes_per_s=1e10),), disk_read=(disk_rate("a", 1e9),))


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Little to measure, and a cache of our own."""
    little_to_measure(monkeypatch, tmp_path / "cache")


# -- kept -----------------------------------------------------------------------------------------------------------


def test_kept_rates_come_back_and_nothing_else_is_left() -> None:
    assert load_rates("abc") is None
    path = save_rates(RATES)
    assert load_rates("abc") == RATES
    assert load_rates("other") is None
    assert list(path.parent.iterdir()) == [path]


def test_another_disk_keeps_its_rates() -> None:
    new = RATES.model_copy(update={"disk_read": (disk_rate("b", 2e9),)})
    both = with_disks_of(new, RATES)
    assert [rate.device for rate in both.disk_read] == ["b", "a"]
    assert with_disks_of(both.model_copy(update={"disk_read": (disk_rate("a", 3e9),)}), both).disk_read == (
        disk_rate("a", 3e9),
        disk_rate("b", 2e9),
    )
    found = for_disk(machine(disk=Disk(path="/x", device="a"), rates=both))
    assert found.rates is not None
    assert found.rates.disk_read == (disk_rate("a", 1e9),)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff" * 9, b'{"identity": 3}', RATES.model_dump_json().encode()[:-9]])
def test_a_damaged_cache_is_said_and_measured_anew(content: bytes, tmp_path: Path) -> None:
    path = rates_file("abc")
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with pytest.raises(SettingsError, match=path.name):
        load_rates("abc")
    assert save_rates(RATES) == path
    assert load_rates("abc") == RATES


def test_rates_of_other_hardware_are_not_taken() -> None:
    save_rates(RATES).rename(rates_file("new"))
    with pytest.raises(SettingsError, match="these are rates of abc"):
        load_rates("new")


def test_a_relative_cache_folder_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert rates_file("x") == tmp_path / ".cache/moetier/rates-x.json"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_rates_that_cannot_be_kept(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    save_rates(RATES)

    def full(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(cache, "write_durably", full)
    with pytest.raises(SettingsError, match=os.strerror(code)):
        save_rates(RATES.model_copy(update={"dram_read": ()}))
    assert load_rates("abc") == RATES, "the old ones are still there"


# -- measured -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cpus", "cores", "threads", "counts"),
    [(1, 1, 1, (1,)), (2, 2, 2, (1, 2)), (6, 3, 5, (1, 2, 3, 4, 5, 6)), (16, None, 16, (1, 2, 4, 8, 16))],
)
def test_thread_counts(cpus: int, cores: int | None, threads: int, counts: tuple[int, ...]) -> None:
    sound = machine().cpu
    part = {"allowed": tuple(range(cpus)), "physical_cores": cores, "threads": threads}
    assert thread_counts(sound.model_copy(update=part)) == counts


def test_dram_and_kernel() -> None:
    cpu = probe_cpu()
    assert [rate.threads for rate in measure_dram(cpu)] == list(thread_counts(cpu))
    for rate, tokens, top_k in zip(measure_kernel("64,64,8,2", 1), (1, 3, 1), (2, 2, 1), strict=True):
        assert (rate.tokens, rate.threads, rate.hidden, rate.intermediate) == (tokens, 1, 64, 64)
        assert top_k - 1e-9 <= rate.experts <= min(8, top_k * tokens) + 1e-9
        assert rate.bytes_per_s == pytest.approx(rate.experts * 3 * 64 * 64 * 17 / 32 / rate.seconds)


def test_too_little_memory_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_measure, "MEMORY_SHARE", 1e-9)
    with pytest.raises(SettingsError, match="stop other processes"):
        measure_dram(probe_cpu())


@pytest.mark.parametrize("store", [True, False], ids=["a store's files", "an empty folder"])
def test_disk(store: bool, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("a", "b") if store else ():
        (folder / name).write_bytes(os.urandom(3 << 20))
    (folder / "below").mkdir()
    (folder / "small").write_bytes(b"x")
    before = sorted(folder.iterdir())
    rates = measure_disk(probe_disk(folder), RECORD)
    assert [rate.queue_depth for rate in rates] == [1, 4]
    assert {rate.record_bytes for rate in rates} == {RECORD}
    assert sorted(folder.iterdir()) == before


def test_a_disk_without_o_direct(tmp_path: Path) -> None:
    disk = probe_disk(tmp_path).model_copy(update={"o_direct": False})
    assert {rate.direct for rate in measure_disk(disk, RECORD)} == {False}


def test_a_disk_without_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(disk_measure, "FREE_SHARE", 1e-12)
    with pytest.raises(SettingsError, match="expected room for two records"):
        measure_disk(probe_disk(tmp_path), RECORD)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_measured() -> None:
    with pytest.raises(SettingsError, match=r"cannot be measured|expected room"):
        measure_disk(probe_disk(Path("/proc/self/fdinfo")), RECORD)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "killed"])
def test_a_measurement_that_is_ended_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    script = "\n".join(
        (
            "import signal",
            "from pathlib import Path",
            "from moetier.doctor.measure import disk",
            "from moetier.machine.probe.disk import probe_disk",
            "signal.signal(signal.SIGINT, signal.default_int_handler)",  # a background job inherits that it is ignored
            "disk.SECONDS, disk.SPAN, disk.PIECE = 600, 4 << 20, 1 << 20",
            "found = probe_disk(Path('data'))",
            "print('begun', flush=True)",
            "disk.measure_disk(found, 65536)",
        )
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"begun\n"
        deadline = time.monotonic() + 300
        while opened(process.pid, folder) < 2:  # to be written, and to be read from
            assert process.poll() is None
            assert time.monotonic() < deadline, "nothing is measured"
            time.sleep(0.01)
        process.send_signal(number)
        assert process.wait(timeout=300) != 0
    finally:
        process.kill()
    assert list(folder.iterdir()) == []


def opened(pid: int, folder: Path) -> int:
    """How many files of a folder a process has open, those without a name included."""
    count = 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            count += link.readlink().is_relative_to(folder)
    return count


def test_no_device_no_link() -> None:
    links = measure_links(())
    assert (links.host_to_device, links.device_to_host, links.device_copy) == ((), (), ())


def test_devices_without_a_build_that_can_use_them() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("wants a build of torch that cannot use a device")
    with pytest.raises(SettingsError, match="CUDA build of torch"):
        measure_links((gpu(),))


# -- the whole ------------------------------------------------------------------------------------------------------


def test_measured_once_known_afterwards(tmp_path: Path) -> None:
    lines: list[str] = []
    measured, unsaved = examine_and_measure(tmp_path, "64,64,8,2", lines.append)
    assert unsaved is None
    assert len(lines) == 3 + bool(measured.gpus), "disk, DRAM, kernel, and devices where there are any"
    assert measured.rates is not None
    threads = serving_threads(measured.cpu.allowed, beside_device=bool(measured.gpus))
    assert {rate.threads for rate in measured.rates.kernel} == {threads}, "as many as will serve"
    again = examine(tmp_path)
    assert again.rates == measured.rates
    file = tmp_path / "machine.json"
    file.write_text(again.to_json())
    assert read_machine(file) == again


def test_rates_of_a_busy_machine_are_shown_and_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(judge_rates, "MOST_OTHERS", -1.0)  # nothing is quiet enough
    found, unsaved = examine_and_measure(tmp_path, "64,64,8,2", lambda line: None)
    assert found.rates is not None
    assert "expected a quiet machine" in str(unsaved)
    assert [finding.about for finding in found.findings if "while these were measured" in finding.text] == ["rates"]
    assert load_rates(found.identity) is None


def stat(root: Path, *lines: str) -> Path:
    return write(root, {"proc/stat": "cpu  9 9 9 9 9 9 9 9 0 0\n" + "\n".join(lines) + "\nintr 5\n"})


def test_what_others_use(tmp_path: Path) -> None:
    tick = os.sysconf("SC_CLK_TCK")
    stat(tmp_path, "cpu0 100 0 0 7 7 0 0 0 0 0", "cpu1 0 0 0 0 0 0 0 0 0 0", "cpu2 5 0 0 0 0 0 0 0 0 0")
    others = Others((0, 1), tmp_path)
    assert others.cpus() == 0.0
    busy = 3600 * tick  # an hour of work and of stolen time since, on the two that are ours
    stat(
        tmp_path, f"cpu0 {100 + busy} 0 0 9 9 0 0 0 0 0", f"cpu1 0 0 0 0 0 0 0 {busy} 0 0", f"cpu2 {busy} 0 0 0 0 0 0 0"
    )
    found = others.cpus()
    assert found is not None
    assert found > 100
    assert Others((9,), tmp_path).cpus() is None
    assert Others((0,), tmp_path / "nowhere").cpus() is None


def test_our_own_work_is_not_others() -> None:
    mine = os.sched_getaffinity(0)
    one = min(mine)
    os.sched_setaffinity(0, {one})
    try:
        others, start, own = Others([one]), time.monotonic(), time.process_time()
        while time.process_time() - own < 0.5:
            pass
        found, seconds = others.cpus(), time.monotonic() - start
    finally:
        os.sched_setaffinity(0, mine)
    if found is None:
        pytest.skip("/proc/stat is hidden")
    assert found * seconds + 0.5 <= seconds + 0.1, "one CPU's time is ours or theirs, not both"


def test_a_file_instead_of_the_cache(tmp_path: Path) -> None:
    save_rates(RATES.model_copy(update={"identity": examine(tmp_path).identity}))
    stated = RATES.model_copy(update={"dram_read": (DramRate(threads=2, bytes_per_s=9e9),)})
    file = tmp_path / "rates.json"
    file.write_text(stated.model_dump_json())
    found = examine(tmp_path, file)
    assert found.rates is not None
    assert found.rates.dram_read == stated.dram_read
    file.write_text("{}")
    with pytest.raises(SettingsError, match=r"rates\.json"):
        examine(tmp_path, file)


def test_a_damaged_cache_is_a_finding(tmp_path: Path) -> None:
    path = rates_file(examine(tmp_path).identity)
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    (broken,) = [finding for finding in examine(tmp_path).findings if finding.verdict is Verdict.BROKEN]
    assert path.name in broken.text
    assert broken.remedy == "moetier doctor --measure writes them anew"


def kernel_rate(**changes: float) -> KernelRate:
    good = {"threads": 2, "hidden": 4096, "intermediate": 2048, "tokens": 512, "experts": 128.0, "seconds": 0.1}
    speeds = {"bytes_per_s": 9e9, "ops_per_s": 5e9, "peak_ops_per_s": 1e11}
    return KernelRate.model_validate({"isa": "avx2", **good, **speeds, **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"bytes_per_s": 2.6e10}, "bytes a second"), ({"bytes_per_s": 1.06e10}, "bytes a second"),
     ({"ops_per_s": 1.06e11}, "operations a second"), ({"bytes_per_s": 1.05e10}, None), ({"threads": 1}, None),
     ({"bytes_per_s": 2.6e10, "experts": 8.0}, None)],
    ids=["2.6 of reads", "1.06 of reads", "1.06 of the peak", "1.05", "threads without a reading", "in a cache"],
)  # fmt: skip
def test_a_rate_above_its_limit_is_used_by_nobody(
    changes: dict[str, float], said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a file, and from the cache, where an earlier version may have left it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    reads = (DramRate(threads=2, bytes_per_s=1e10),)
    rates = Rates(identity="0" * 16, dram_read=reads, kernel=(kernel_rate(**changes),))
    path = save_rates(rates)
    for file in (None, path):
        if said is None:
            assert load_rates(rates.identity, file) == rates
        else:
            with pytest.raises(SettingsError, match=f"{said}.*measure anew: moetier doctor --measure"):
                load_rates(rates.identity, file)


AMID_A_LOCK = """
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from moetier.doctor.measure import disk
from moetier.machine.probe.disk import probe_disk

class Pool(ThreadPoolExecutor):
    def submit(self, *work):
        future = super().submit(*work)
        lock = self._idle_semaphore._cond
        lock.acquire()  # as submit has it for a moment, and every reader when it has ended
        signal.raise_signal(signal.SIGINT)
        lock.release()
        return future

signal.signal(signal.SIGINT, signal.default_int_handler)
disk.ThreadPoolExecutor, disk.SECONDS, disk.SPAN, disk.PIECE = Pool, 600, 4 << 20, 1 << 20
try:
    disk.measure_disk(probe_disk(Path('.')), 65536)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_ctrl_c_amid_a_lock_ends_the_measurement(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", AMID_A_LOCK], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "interrupted\n", done.stderr
