"""`moetier doctor` as users run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moetier.doctor.examine import examine
from moetier.machine.facts import DramRate, KernelRate, Machine, Rates, hardware_identity
from moetier.machine.file import read_machine

COMMAND = str(Path(sys.executable).with_name("moetier"))


def run(*arguments: str | Path, cache: Path, code: int = 0) -> tuple[str, str]:
    """Standard output and error of `moetier doctor`."""
    done = subprocess.run(
        [COMMAND, "doctor", *map(str, arguments)],
        env={**os.environ, "XDG_CACHE_HOME": str(cache)}, cwd="/",
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    return done.stdout, done.stderr


def test_json_is_what_plan_reads(tmp_path: Path) -> None:
    out, _ = run("--json", "--disk", tmp_path, cache=tmp_path)
    (tmp_path / "machine.json").write_text(out)
    found, here = read_machine(tmp_path / "machine.json"), examine(tmp_path)
    assert (found.cpu, found.gpus) == (here.cpu, here.gpus)
    assert [(node.node, node.cpus) for node in found.numa] == [(node.node, node.cpus) for node in here.numa]
    assert found.identity == hardware_identity(found.cpu, found.memory, found.gpus)  # a virtual machine's memory grows
    assert found.disk is not None
    assert found.disk.path == str(tmp_path)
    assert {"moetier", "python", "kernel"} <= set(found.software)
    assert [finding.about for finding in found.findings] == [finding.about for finding in here.findings]


def test_for_people(tmp_path: Path) -> None:
    out, _ = run("--disk", tmp_path, cache=tmp_path)
    for about in ("cpu", "numa", "memory", "huge pages", "memlock", "gpu", "disk", "io_uring", "rates"):
        assert f"\n{about}" in f"\n{out}"


def identities(machine: Machine) -> set[str]:
    """Of this machine, also if its memory grows or shrinks by up to two GiB before it is looked at again."""
    sizes = (machine.memory.total_bytes + gib * 2**30 for gib in range(-2, 3))
    memories = (machine.memory.model_copy(update={"total_bytes": size}) for size in sizes)
    return {hardware_identity(machine.cpu, memory, machine.gpus) for memory in memories}


def test_rates_that_cannot_be_are_broken_and_measured_anew(tmp_path: Path) -> None:
    """What an earlier version measured without AVX-512, and the advice that is given."""
    here = examine(tmp_path)
    kernel = KernelRate(
        isa="avx2", threads=1, hidden=4096, intermediate=2048, tokens=512, experts=128.0, seconds=0.1,
        bytes_per_s=8.1e9, ops_per_s=1e9, peak_ops_per_s=1e12,
    )  # fmt: skip
    (tmp_path / "moetier").mkdir()
    for identity in identities(here):
        rates = Rates(identity=identity, dram_read=(DramRate(threads=1, bytes_per_s=4e9),), kernel=(kernel,))
        (tmp_path / f"moetier/rates-{identity}.json").write_text(rates.model_dump_json())
    out, _ = run(cache=tmp_path, code=1)
    assert "one of them was measured wrongly" in out
    assert "remedy: moetier doctor --measure" in out


def test_a_broken_thing_is_exit_code_1(tmp_path: Path) -> None:
    (tmp_path / "moetier").mkdir()
    for identity in identities(examine(tmp_path)):
        (tmp_path / f"moetier/rates-{identity}.json").write_text("[]")
    out, _ = run(cache=tmp_path, code=1)
    assert "broken because" in out
    assert "remedy: moetier doctor --measure writes them anew" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--disk", "/no/such/folder"), "expected a folder, found none"),
        (("--rates", "/no/such/file"), "/no/such/file"),
        (("--rates", "/dev/zero"), "regular file"),
        (("--measure", "--rates", "x"), "leave one out"),
        (("--measure", "--shape", "v5"), "v4-flash"),
    ],
)
def test_bad_input(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    _, err = run(*arguments, cache=tmp_path, code=2)
    assert said in err


UNPRIVILEGED = """
import os, sys
from pathlib import Path
from moetier.doctor.examine import examine
examine(Path("/usr"))  # loads what the other user may not be able to reach
if os.geteuid() == 0:
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
print(examine(Path("/usr")).to_json())
"""


@pytest.mark.parametrize("cache", ["none", "forbidden"])
def test_as_a_user_without_rights(cache: str, tmp_path: Path) -> None:
    """Nothing of the machine may be asked for that needs root; a cache out of reach is said."""
    folder = tmp_path if cache == "forbidden" else Path("/no/such/folder")
    if cache == "forbidden":
        (folder / "moetier").mkdir(mode=0)
    done = subprocess.run(
        [sys.executable, "-c", UNPRIVILEGED],
        env={**os.environ, "XDG_CACHE_HOME": str(folder)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["rates"] is None
    assert found["disk"]["o_direct"] is None, "nothing lies in /usr itself, and nothing can be written there"
    broken = [finding["text"] for finding in found["findings"] if finding["verdict"] == "broken"]
    assert sum("cannot be read" in text for text in broken) == (cache == "forbidden")
