"""stack/stack.lock: what the machine found. Canonical JSON with one writer; a hand-made edit does not go unseen."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from moetier_stack.definition import Definition, Strict, validated
from moetier_stack.errors import StackError

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
LARGEST = 16 << 20
KEY_LENGTH = 16
RELOCK = "run `moetier stack lock`"
RESTORE = "restore it from the history, or delete it and run `moetier stack lock`, which chooses versions anew"
"""A lock that is not as it was written is no ground for the next one: what it pins may be anybody's."""


class Pinned(Strict):
    """A file of an index, by its content."""

    project: str
    version: str
    filename: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+!-]*$")
    sha256: Sha256


class PinnedSource(Strict):
    """Sources of one version: an sdist, or a commit."""

    version: str
    sdist: Pinned | None = None
    commit: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")] | None = None
    tree: Sha256
    """Hash of the unpatched source tree."""

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if (self.sdist is None) == (self.commit is None):
            raise ValueError("expected an sdist or a commit, and not both")
        return self


class PinnedProfile(Strict):
    """A profile's files, and what its carries make of them."""

    wheel: Pinned
    base: str
    requirements: tuple[Pinned, ...]
    source_tree: Sha256
    """Hash of the source tree with the profile's carries."""
    wheel_tree: Sha256
    """Hash of the wheel's files with the profile's runtime carries."""
    image: Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")] | None = None
    """Digest of the image that was published of exactly this."""


class Lock(Strict):
    """The whole file."""

    format: Literal[1] = 1
    definition: Sha256
    sources: dict[str, PinnedSource]
    carries: dict[str, Sha256]
    profiles: dict[str, PinnedProfile]

    def hash(self) -> str:
        """Identity of what is locked: all of it but the digests of images, which carry this hash as a label."""
        values = self.model_dump(mode="json")
        for profile in values["profiles"].values():
            del profile["image"]
        return hashlib.sha256(_canonical(values)).hexdigest()

    def profile(self, name: str) -> PinnedProfile:
        """Return what is pinned of a profile of stack.toml."""
        if name not in self.profiles:
            raise StackError(f"profile {name} is not locked; {RELOCK}")
        return self.profiles[name]

    def cache_key(self, profile: str) -> str:
        """Name of the folder of a profile's caches (kernels, autotuning, graphs): no other lock or profile has it."""
        self.profile(profile)
        return f"{profile}-{self.hash()[:KEY_LENGTH]}"


def definition_hash(definition: Definition) -> str:
    return hashlib.sha256(_canonical(definition.model_dump(mode="json"))).hexdigest()


def load_lock(path: Path) -> Lock:
    """The lock; StackError if it is not as `save_lock` writes it."""
    try:
        if path.stat().st_size > LARGEST:
            raise StackError(f"{path}: expected at most {LARGEST} bytes, found {path.stat().st_size}")
        data = path.read_bytes()
        values = json.loads(data)
    except FileNotFoundError:
        raise StackError(f"there is no {path}; {RELOCK}") from None
    except (ValueError, RecursionError) as error:
        raise StackError(f"{path}: expected JSON, found a fault ({error}); {RESTORE}") from None
    checksum = values.pop("checksum", None) if isinstance(values, dict) else None
    lock = validated(Lock, values, path)
    if data != _rendered(lock):
        what = "edited by hand" if checksum == _checksum(lock) else "edited by hand: its checksum is another"
        raise StackError(f"{path}: {what}; {RESTORE}")
    return lock


def save_lock(path: Path, lock: Lock) -> None:
    """Write the lock whole or not at all."""
    aside = path.with_name(path.name + ".tmp")
    try:
        with aside.open("wb") as file:
            file.write(_rendered(lock))
            file.flush()
            os.fsync(file.fileno())
        aside.rename(path)
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold the folder of the lock; StackError where another process holds it."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise StackError(f"{folder} is being locked by another process; wait until it is done") from None
    finally:
        os.close(fd)


def _rendered(lock: Lock) -> bytes:
    """As it is written, with a checksum of all of it."""
    values = {**lock.model_dump(mode="json"), "checksum": _checksum(lock)}
    return json.dumps(values, indent=1, sort_keys=True, ensure_ascii=True).encode() + b"\n"


def _checksum(lock: Lock) -> str:
    return hashlib.sha256(_canonical(lock.model_dump(mode="json"))).hexdigest()


def _canonical(values: Any) -> bytes:
    return json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
