"""Devices through NVML's own bindings, over a driver's library made for the test."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moetier.machine.probe import gpu as gpu_probe
from tests.doctor.machines import bare, write

PROBE = """
import json, sys
from pathlib import Path
from moetier.machine.probe.gpu import probe_gpus
from moetier.errors import SettingsError
try:
    print(json.dumps([gpu.model_dump() for gpu in probe_gpus(Path(sys.argv[1]))]))
except SettingsError as error:
    print(json.dumps(str(error)))
assert "vllm" not in sys.modules and "torch" not in sys.modules, "looking must not load them"
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the library."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or gpu_probe._bindings() is None:
        pytest.skip("wants a C compiler, and NVML's bindings (nvidia-ml-py or vLLM's copy)")
    folder = tmp_path_factory.mktemp("driver")
    source = Path(__file__).with_name("driver.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", source], check=True)
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A host of 64 GiB whose second device is next to NUMA node 1."""
    return write(bare(tmp_path), {"sys/bus/pci/devices/0000:6b:00.0/numa_node": "1\n"})


def probe(driver: Path, root: Path, **environment: str) -> Any:
    env = {**os.environ, "LD_LIBRARY_PATH": str(driver), **environment}
    done = subprocess.run([sys.executable, "-c", PROBE, root], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_two_devices(driver: Path, root: Path) -> None:
    first, second = probe(driver, root)
    assert first == {
        "index": 0, "name": "Card 0", "uuid": "GPU-0", "memory_bytes": 32 << 30, "compute_capability": "12.0",
        "free_bytes": 31 << 30, "pcie_generation": 5, "pcie_width": 16, "pcie_generation_now": None,
        "pcie_width_now": 16, "numa_node": None, "driver": "595.84", "peers": [1],
    }  # fmt: skip
    assert (second["pcie_width_now"], second["numa_node"], second["peers"]) == (4, 1, [])


@pytest.mark.parametrize(("visible", "names"), [("1,0", ["Card 1", "Card 0"]), ("GPU-1", ["Card 1"]), ("", [])])
def test_those_that_are_visible_in_their_order(visible: str, names: list[str], driver: Path, root: Path) -> None:
    found = probe(driver, root, CUDA_VISIBLE_DEVICES=visible)
    assert [gpu["name"] for gpu in found] == names
    assert [gpu["index"] for gpu in found] == list(range(len(names)))


def test_a_device_that_has_the_hosts_memory(driver: Path, root: Path) -> None:
    assert {(gpu["memory_bytes"], gpu["free_bytes"]) for gpu in probe(driver, root, DRIVER="unified")} == {
        (64 << 30, None)
    }


def test_a_lost_device_is_one_error(driver: Path, root: Path) -> None:
    said = probe(driver, root, DRIVER="lost")
    assert "found: GPU is lost" in said
    assert "reset the device" in said
