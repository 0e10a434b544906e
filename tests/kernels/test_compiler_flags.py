"""A compiler that may change values is told not to, and is refused where it still may."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not shutil.which("c++"), reason="wants the C++ compiler")

FLAGS = [
    "-ffast-math",
    "-Ofast",
    "-funsafe-math-optimizations",
    "-ffinite-math-only",
    "-freciprocal-math",
    "-fno-signed-zeros",
    "-fassociative-math -fno-signed-zeros -fno-trapping-math",
]


def compiles(*flags: str) -> subprocess.CompletedProcess[str]:
    """The portable kernels with these flags, as far as the compiler's checks go."""
    source = ROOT / "native" / "cpu" / "portable.cpp"
    folders = (f"-I{ROOT / 'native'}", f"-I{ROOT / 'src/moetier/kernels/cuda/source'}")
    command = ["c++", "-std=c++20", *flags, *folders, "-fsyntax-only", str(source)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def exact() -> list[str]:
    """The flags that the build puts behind the user's, on every machine and compiler."""
    (flags,) = re.findall(r"set\(MOETIER_EXACT ([^)]*)\)", (ROOT / "CMakeLists.txt").read_text())
    return flags.split()


def test_plain_flags_compile() -> None:
    assert compiles("-O3").returncode == 0


@pytest.mark.parametrize("flags", FLAGS)
def test_a_flag_that_changes_values_is_refused(flags: str) -> None:
    refused = compiles(*flags.split())
    assert refused.returncode
    assert "expected exact arithmetic, found -ffast-math or a part of it; take it out of CXXFLAGS" in refused.stderr


@pytest.mark.parametrize("flags", FLAGS)
def test_the_build_takes_such_flags_back(flags: str) -> None:
    made = compiles(*flags.split(), "-O3", *exact())
    assert made.returncode == 0, made.stderr
