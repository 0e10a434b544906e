"""Runs tests/gpu/interpreted in a process of its own: Triton decides at import whether it interprets."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"


def test_every_triton_kernel_equals_the_oracle_under_the_interpreter() -> None:
    pytest.importorskip("torch", reason="the device tier wants torch")
    pytest.importorskip("triton", reason="the device tier wants triton")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
