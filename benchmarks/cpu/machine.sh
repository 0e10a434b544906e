#!/bin/bash
# Builds the CPU kernels with cmake alone (no pip), compares every kernel set of this machine with the portable one and
# with the golden vectors, and measures them beside each other: benchmarks/cpu/machine.sh [folder for the results]
#
# Needs cmake 3.26, a C++20 compiler, Python 3.11 or newer with numpy and nanobind, and for the vectors pytest and
# hypothesis.
set -euo pipefail
cd "$(dirname "$0")/../.."
results=${1:-build/machine}
build=build/machine/cmake
mkdir -p "$results" "$build"
lscpu | tee "$results/lscpu.txt" | grep -E 'Model name|^CPU\(s\)|amx' || true
cmake -S . -B "$build" -DMOETIER_PYTHON=ON -DMOETIER_NATIVE_TESTS=ON -DPython_EXECUTABLE="$(command -v python3)" >"$results/cmake.log"
cmake --build "$build" -j "$(nproc)" >>"$results/cmake.log" 2>&1 || { tail -40 "$results/cmake.log"; exit 1; }
"$build/moetier_compare" 500 | tee "$results/compare.txt"
tree=build/machine/tree # the package with this build's extension, apart from the working tree
rm -rf "$tree" && mkdir -p "$tree" && cp -r src/moetier "$tree/"
cp "$build"/_native*.so "$tree/moetier/kernels/cpu/"
export PYTHONPATH=$tree:.
if python3 -c 'import pytest, hypothesis' 2>/dev/null; then
  python3 -m pytest -q -p no:cacheprovider tests/golden tests/kernels/test_cpu_bits.py 2>&1 | tail -3 | tee "$results/pytest.txt"
else
  echo "without pytest and hypothesis: golden vectors not compared" | tee "$results/pytest.txt"
fi
python3 benchmarks/cpu/amx.py --json "$results/amx.json"
python3 benchmarks/cpu/latency.py --json "$results/latency.json"
