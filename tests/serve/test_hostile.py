"""One start under many restrictions at once: served all the same, with a line for each that cost something."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moetier.store.build import build_store
from tests.serve import denied
from tests.serve.server import Server

pytest.importorskip("vllm", reason="vLLM is not installed")

FORBIDDEN = ",".join(denied.NUMBERS)
LIMITS = 'ulimit -n 256; ulimit -l 64; exec "$@" <&-'
SMALL = "mount --make-rprivate / && mount -t tmpfs -o size=64m,mode=1777 tmpfs /dev/shm && "


@pytest.mark.long
def test_a_sandbox_with_little_of_everything(nano: Path, tmp_path: Path) -> None:
    """No calls that place threads or memory, no io_uring, few files, little locked memory, no home, no standard input,
    a long TMPDIR; and docker's /dev/shm of 64 MB where we may mount one.
    """
    build_store(nano, tmp_path / "store")
    long = tmp_path / ("x" * 80)
    long.mkdir()
    variables = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "LANG": "C", "TMPDIR": str(long), "COLUMNS": "40"}
    variables |= {"VLLM_ENFORCE_STRICT_TOOL_CALLING": "0"}
    may_mount = subprocess.run(["unshare", "-m", "sh", "-c", SMALL + "true"], capture_output=True).returncode == 0
    under = ["unshare", "-m", "sh", "-c", SMALL + LIMITS, "sh"] if may_mount else ["sh", "-c", LIMITS, "sh"]
    under += [sys.executable, str(Path(denied.__file__)), FORBIDDEN]
    options = ("--identity-check", "1")
    with Server(
        nano, tmp_path / "store", tmp_path / "out", options=options, under=under, variables=variables
    ) as server:
        server.wait_ready()
        with server.client() as client:
            answer = client.completions.create(model="nano-mxfp4", prompt="The", max_tokens=4, temperature=0)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 4
        assert server.stop() == 0
        said = server.stderr
    assert "TMPDIR=" in said
    assert "is too long for sockets" in said
    assert "expected a home folder for caches" in said
    assert "threads are not pinned" in said
    assert ("they are made smaller" in said) == may_mount
    assert "Traceback" not in said
