"""Every package that a profile's image installs, with its wheel's sha256: pip resolves, for the image's platform."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from moetier_stack.definition import Profile
from moetier_stack.errors import StackError
from moetier_stack.lock import Pinned
from moetier_stack.workspace import profile_tags

OLDEST_GLIBC_MINOR = 5


def requirements_of(metadata: bytes, profile: Profile) -> list[str]:
    """Return the wheel's requirements on the profile's platform, without those it leaves out, and the profile's own.

    metadata: the wheel's METADATA file.
    """
    asked = Metadata.from_email(metadata, validate=False).requires_dist or []
    environment = {
        "python_version": profile.python,
        "python_full_version": f"{profile.python}.0",
        "platform_machine": profile_tags(profile)[1],
        "platform_system": "Linux",
        "sys_platform": "linux",
        "os_name": "posix",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "extra": "",
    }
    own = _with_version(profile)
    kept = []
    for requirement in asked:
        name = canonicalize_name(requirement.name)
        wanted = requirement.marker is None or requirement.marker.evaluate(environment)
        if wanted and name not in own and name not in profile.leave_out:
            kept.append(_without_marker(requirement))
    return kept + list(profile.requirements)


def _with_version(profile: Profile) -> set[str]:
    """Projects for which the profile itself says a version: that holds instead of the wheel's and of what is locked."""
    return {canonicalize_name(r.name) for r in map(Requirement, profile.requirements) if r.specifier}


def _without_marker(requirement: Requirement) -> str:
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    return f"{requirement.name}{extras}{requirement.specifier}"


def pins(pinned: Sequence[Pinned]) -> dict[str, str]:
    """Versions by project."""
    return {pin.project: pin.version for pin in pinned}


def resolve(requirements: Sequence[str], profile: Profile, index: str, keep: Mapping[str, str]) -> list[Pinned]:
    """Pins of `requirements` and all that they need, by name; versions of `keep` stay where none is asked for."""
    if not requirements:
        return []
    asked = _with_version(profile)
    kept = tuple(f"{name}=={version}" for name, version in sorted(keep.items()) if name not in asked)
    return list(_resolve(tuple(requirements), kept, profile.python, profile.platform, index))


@cache  # profiles that differ in their carries only ask the same
def _resolve(
    requirements: tuple[str, ...], keep: tuple[str, ...], python: str, platform: str, index: str
) -> tuple[Pinned, ...]:
    _, _, minor, machine = platform.split("_", 3)
    platforms = [f"manylinux_2_{m}_{machine}" for m in range(int(minor), OLDEST_GLIBC_MINOR - 1, -1)]
    platforms += [f"{old}_{machine}" for old in ("manylinux2014", "manylinux2010", "manylinux1", "linux")]
    options = ["--dry-run", "--ignore-installed", "--only-binary=:all:", "--target", "/nonexistent", "--quiet"]
    options += ["--python-version", python, "--implementation", "cp"]
    options += [arg for platform in platforms for arg in ("--platform", platform)]
    options += ["--index-url", index] if index else []
    with tempfile.TemporaryDirectory(prefix="moetier-stack-") as folder:
        report, constraints = Path(folder) / "report.json", Path(folder) / "keep.txt"
        constraints.write_text("\n".join(keep))
        command = [sys.executable, "-m", "pip", "install", *options, "-c", str(constraints)]
        done = subprocess.run(
            [*command, "--report", str(report), *requirements], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise StackError(f"pip cannot resolve {', '.join(requirements[:6])} ...:\n{done.stderr[-2000:].strip()}")
        items: list[dict[str, Any]] = json.loads(report.read_text())["install"]
    return tuple(sorted((_pin(item) for item in items), key=lambda pin: pin.project))


def _pin(item: dict[str, Any]) -> Pinned:
    url = item["download_info"]["url"]
    return Pinned(
        project=canonicalize_name(item["metadata"]["name"]),
        version=item["metadata"]["version"],
        filename=unquote(urlparse(url).path).rsplit("/", 1)[-1],
        sha256=item["download_info"]["archive_info"]["hashes"]["sha256"],
    )
