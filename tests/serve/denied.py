"""A machine that forbids system calls: seccomp, as containers and sandboxes use it, for a process and its children."""

from __future__ import annotations

import ctypes
import errno
import struct
import sys
from collections.abc import Callable

NUMBERS = {
    "mbind": 237,
    "set_mempolicy": 238,
    "get_mempolicy": 239,
    "sched_setaffinity": 203,
    "migrate_pages": 256,
    "move_pages": 279,
    "io_uring_setup": 425,
}
"""On x86-64."""
LOAD, JUMP_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, FAIL = 0x7FFF0000, 0x00050000
NO_NEW_PRIVILEGES, SECCOMP, FILTER = 38, 22, 2


def deny(*names: str) -> Callable[[], None]:
    """Returns what makes these calls answer EPERM in the process that runs it, and in all that it starts."""
    program = [(LOAD, 0, 0, 0)]
    for name in names:
        program += [(JUMP_EQUAL, 0, 1, NUMBERS[name]), (RETURN, 0, 0, FAIL | errno.EPERM)]
    program.append((RETURN, 0, 0, ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in program))
    libc = ctypes.CDLL(None, use_errno=True)

    def forbid() -> None:
        header = ctypes.create_string_buffer(struct.pack("HP", len(program), ctypes.addressof(code)))
        at = ctypes.c_void_p(ctypes.addressof(header))
        if libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) or libc.prctl(SECCOMP, FILTER, at):
            raise OSError(ctypes.get_errno(), "seccomp")

    return forbid


if __name__ == "__main__":  # NAME,NAME COMMAND...
    import os

    deny(*sys.argv[1].split(","))()
    os.execvp(sys.argv[2], sys.argv[2:])
