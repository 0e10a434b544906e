"""Looks at the surroundings of a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable


def child(code: str, *more: str, before: Callable[[], object] | None = None, **environment: str) -> str:
    """What a Python of its own prints, in this environment and no other."""
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
    done = subprocess.run(
        [*more, sys.executable, "-c", textwrap.dedent(code)],
        env=kept | environment,
        preexec_fn=before,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


LOOK = """
import sys, tempfile
from pathlib import Path
from moetier.errors import SettingsError
from moetier.launch.command import ServeRequest
from moetier.launch.surroundings import look, socket_root
from moetier.settings import Settings
request = ServeRequest(Path("/m"), Settings.parse({"store": "/s"} | %s))
try:
    with tempfile.TemporaryDirectory(dir=socket_root()) as folder:
        found = look(request, Path(folder), True)
        print({name: value.replace(folder, "SCRATCH") for name, value in found.environment.items()})
        for line in found.lines:
            print(line.replace(folder, "SCRATCH"))
except SettingsError as error:
    print("error:", error)
"""


def looked(settings: str = "{}", *more: str, before: Callable[[], object] | None = None, **environment: str) -> str:
    return child(LOOK % settings, *more, before=before, **environment)
