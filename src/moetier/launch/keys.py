"""API keys: where they come from, and what the server's processes are told of them."""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

from moetier.errors import SettingsError

VARIABLE = "VLLM_API_KEY"
"""The user's environment variable for one key."""
HASHES = "MOETIER_API_KEY_SHA256"
"""Tells the server's processes the SHA-256 of the right keys, so that none of them holds a key; "": none is asked."""
MOST_BYTES = 1 << 20
"""Bytes of a file of keys, at most."""
VISIBLE = (
    "the API key of --api-key is in the process list, where every user of this machine can read it; "
    f"give it with --api-key-file or {VARIABLE}"
)


def keys_of(option: str | None, file: Path | None, passed: Sequence[str] = ()) -> tuple[tuple[str, ...], list[str]]:
    """The keys of whoever starts a server or asks one, and lines to say of them.

    From the option, a file, or what was passed to vLLM: one of the three; else from the environment.
    """
    named = {"--api-key": option is not None, "--api-key-file": file is not None, "-- --api-key": bool(passed)}
    given = [name for name, there in named.items() if there]
    if len(given) > 1:
        raise SettingsError(f"{' and '.join(given)} both give API keys; give one of them")
    if file is not None:
        return _from_file(file)
    on_the_line = (*passed, *([] if option is None else [option]))
    keys = on_the_line or (os.environ.get(VARIABLE) or None,)
    checked = tuple(_checked(key, given[0] if given else VARIABLE) for key in keys if key is not None)
    return checked, [VISIBLE] if on_the_line else []


def _from_file(path: Path) -> tuple[tuple[str, ...], list[str]]:
    """Keys of a file, one a line; empty lines are passed over. A pipe will do."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise SettingsError(f"--api-key-file {path}: cannot read it ({error.strerror}); name another") from error
    if len(content) > MOST_BYTES:
        raise SettingsError(f"--api-key-file {path}: expected keys, one a line, found more than {MOST_BYTES} bytes")
    text = content.decode("utf-8-sig", errors="replace")
    keys = tuple(_checked(line.strip(), f"--api-key-file {path}") for line in text.splitlines() if line.strip())
    if not keys:
        raise SettingsError(f"--api-key-file {path}: expected keys, one a line, found none; write one into it")
    open_to_others = stat.S_ISREG(mode) and mode & (stat.S_IRGRP | stat.S_IROTH)
    warning = f"{path}: other users can read the API keys in it (mode {stat.S_IMODE(mode):03o}); chmod 600 {path}"
    return keys, [warning] if open_to_others else []


def _checked(key: str, source: str) -> str:
    """The key, if a header can carry it; an error never shows it."""
    if not key or key != key.strip() or not (key.isascii() and key.isprintable()):
        found = "other characters" if key.strip() else "nothing"
        raise SettingsError(
            f"the API key of {source}: expected printable ASCII with no space at its ends, found {found}; give another"
        )
    return key


def hashes_of(keys: Iterable[str]) -> str:
    """Value of the environment variable `HASHES`."""
    return " ".join(digest(key.encode()).hex() for key in keys)


def digest(key: bytes) -> bytes:
    """SHA-256: equally long for every key, so that comparing tells nothing of a length."""
    return hashlib.sha256(key).digest()


def matches(given: bytes, right: Iterable[bytes]) -> bool:
    """Whether a key is one of those with these digests, in a time that does not depend on it."""
    found, hashed = False, digest(given)
    for expected in right:
        found |= hmac.compare_digest(hashed, expected)
    return found
