"""`python -m moetier_stack.selftest stack.json`: whether this environment is the stack that it says it is."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def problems(expected: dict[str, Any]) -> list[str]:
    """All that differs from what `moetier_stack.image.self_test` wrote down."""
    found = []
    python = ".".join(map(str, sys.version_info[:2]))
    if python != expected["python"]:
        found.append(f"Python is {python}, expected {expected['python']}")
    for name, version in expected["versions"].items():
        if (have := _version(name)) != version:
            found.append(f"{name} is {have}, expected {version}")
    distributions = [name for name in expected["absent_distributions"] if _version(name) is not None]
    modules = [name for name in expected["absent_modules"] if importlib.util.find_spec(name) is not None]
    found += [f"{name} is there, and is excluded" for name in distributions + modules]
    for name in expected["imports"]:
        try:
            importlib.import_module(name)
        except Exception as error:
            found.append(f"{name} does not import: {type(error).__name__}: {error}")
    return found


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def main() -> None:
    """Exit code 0 if all is as expected."""
    expected = json.loads(Path(sys.argv[1]).read_text())
    found = problems(expected)
    doctor = subprocess.run([str(Path(sys.executable).with_name("moetier")), "doctor"], check=False)
    if doctor.returncode:
        found.append(f"the doctor ended with {doctor.returncode}, its words stand above")
    for text in found:
        print(f"self-test: error: {text}", file=sys.stderr)
    if not found:
        print(f"profile {expected['profile']} of lock {expected['lock']}: as locked")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
