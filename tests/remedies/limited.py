"""A process of its own with little room, for what cannot be taken back in the one that runs the tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT

START = """
import resource, sys
from moetier.errors import MoetierError
{imports}

def work(number):
    {work}

used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
try:
    work({many})
except MoetierError as error:
    print(error, end="", flush=True)
{more}
work({few})
"""


def with_little_memory(imports: str, work: str, many: int, few: int, *arguments: Path, raised: bool = False) -> str:
    """Run `work` with `number` as `many` and 64 MiB of addresses; returns what was said. Then it must work.

    It works with `number` as `few`; or as `many` once the limit is raised.
    """
    more = "resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)" if raised else ""
    program = START.format(imports=imports, work=work, many=many, few=many if raised else few, more=more)
    python = [sys.executable, *(["-S"] if sys.flags.no_site else []), "-c", program, *map(str, arguments)]
    done = subprocess.run(python, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
