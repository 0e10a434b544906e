"""A `moetier serve` process for the benchmarks beside this file: of the bundled model, if no other is named."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODEL = "nano-mxfp4"


def start(
    folder: Path,
    name: str,
    options: Sequence[str],
    vllm: Sequence[str],
    environment: Mapping[str, str] | None = None,
    model: Path = ROOT / "models" / MODEL,
    store: Path | None = None,
) -> tuple[subprocess.Popen[bytes], int]:
    """A server that answers, and its port. log-`name` and, if none is given, its store are in `folder`.

    vllm: arguments for vLLM.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [sys.executable, "-m", "moetier", "serve", str(model)]
    command += ["--store", str(store or folder / "store"), "--build-store", "--port", str(port)]
    command += ["--log-file", str(folder / f"log-{name}"), "--kv-cache-gib", "0.25", *options, "--", *vllm]
    process = subprocess.Popen(command, env={**os.environ, **(environment or {})})
    while process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                return process, port
        except OSError:
            time.sleep(0.5)
    raise SystemExit(f"the server did not start: exit code {process.returncode}")
