"""EIO, ENOSPC, short calls and flipped bits, injected below us by a preloaded library."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.store.checkpoints import write_checkpoint

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("injecting faults needs a C compiler")
    out = tmp_path_factory.mktemp("faults") / "faults.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", out, HERE / "faults.c", "-ldl"], check=True
    )
    return out


@pytest.fixture
def campaign(library, tmp_path):
    """`campaign(kind)` runs one and gives its counts; what it asserts is in fault_campaign.py."""

    def run(kind):
        made = write_checkpoint(tmp_path / "checkpoint", experts=4)
        done = subprocess.run(
            [sys.executable, HERE / "fault_campaign.py", made.path, tmp_path, kind],
            env={**os.environ, "LD_PRELOAD": str(library)}, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout)

    return run


def test_a_fault_in_every_call_of_a_build(campaign):
    counts = campaign("build")
    # 2 layers of 4 experts: records, sums, plan and store.json are written; 6 tensors are read for each expert
    assert counts["write EIO"] == counts["write ENOSPC"] >= 8 + 2 + 2
    assert counts["sync EIO"] >= 2 + 2 * (2 + 2)
    assert counts["read EIO"] == 8 * 6
    assert counts["rename EIO"] == 2 + 2 + 1
    assert counts["allocate ENOSPC"] == 2
    assert min(counts["write short"], counts["read short"]) >= 8


def test_a_fault_in_every_read_of_a_record(campaign):
    counts = campaign("read")
    kinds = ("EIO once", "flip once", "short once", "EIO for good", "flip for good", "flips that verify found")
    assert counts == dict.fromkeys(kinds, 8)


def test_faults_while_healing(campaign):
    assert campaign("heal") == {"write EIO": 1, "sync EIO": 1, "write short": 1, "checkpoint EIO": 1}
