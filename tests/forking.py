"""What forked children may do with what their parent made.

The parent is a fresh process. A fork of pytest's would bring along the locks and objects of every test before it.
"""

from __future__ import annotations

import faulthandler
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHILDREN = 20
LIMIT_SECONDS = 120
"""Of a child that hangs, not of one that is slow: they take milliseconds."""


def in_children(job: Callable[[], object], children: int = CHILDREN) -> None:
    """In the fresh process: run `job` in so many children, one after the other.

    Each prints "done", or what the RuntimeError said. One that waits for ever ends with its stacks, and so does all.
    """
    for _ in range(children):
        pid = os.fork()
        if pid == 0:
            _child(job)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status:
            sys.exit(f"a child ended with {status}")


def _child(job: Callable[[], object]) -> None:
    faulthandler.dump_traceback_later(LIMIT_SECONDS, exit=True)
    try:
        job()
        print("done", flush=True)
    except RuntimeError as error:
        print(error, flush=True)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def said_by_children(*arguments: str) -> set[str]:
    """Run Python with these arguments, a program that calls `in_children`; the different lines of its children."""
    python = [sys.executable, *(["-S"] if sys.flags.no_site else [])]  # where pytest finds moetier, there it does, too
    done = subprocess.run([*python, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == CHILDREN
    return set(lines)
