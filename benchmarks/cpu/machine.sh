#!/bin/bash
# Builds the CPU kernels with cmake alone (no pip), compares every kernel set of this machine with the portable one and
# with the golden vectors, and measures them: benchmarks/cpu/machine.sh [folder for the results]
#
# Needs cmake 3.26, a C++20 compiler, Python 3.11 or newer with numpy, pydantic, pytest and nanobind.
set -euo pipefail
cd "$(dirname "$0")/../.."
results=${1:-build/machine}
build=build/machine/cmake
mkdir -p "$results" "$build"
lscpu | tee "$results/lscpu.txt" | grep -E 'Model name|^CPU\(s\)|amx' || true
cmake -S . -B "$build" -DMOETIER_PYTHON=ON -DMOETIER_NATIVE_TESTS=ON -DPython_EXECUTABLE="$(command -v python3)" >"$results/cmake.log"
cmake --build "$build" -j "$(nproc)" >>"$results/cmake.log" 2>&1 || { tail -40 "$results/cmake.log"; exit 1; }
"$build/moetier_compare" 1000 | tee "$results/compare.txt"
tree=build/machine/tree # the package with this build's extension, apart from the working tree
rm -rf "$tree" && mkdir -p "$tree" && cp -r src/moetier "$tree/"
cp "$build"/_native*.so "$tree/moetier/kernels/cpu/"
export PYTHONPATH=$tree:.
python3 -m pytest -q -p no:cacheprovider tests/golden tests/kernels/test_cpu_bits.py 2>&1 | tail -3 | tee "$results/pytest.txt"
python3 - "$results/kernel.json" <<'PYTHON'
import json, sys
from moetier.bench.kernel import bench_kernel
from moetier.kernels.cpu import available_isas

def show(row):
    print(f"{row.isa:10} threads={row.threads:3} M={row.M:4} {row.us:10.0f} us {row.gbps:6.1f} of {row.read_gbps:6.1f} GB/s "
          f"{row.gops:7.0f} of {row.peak_gops:7.0f} GOP/s, {row.ratio_to_limit:.2f} of the limit", flush=True)

isas = [isa for isa in available_isas() if isa != "portable"]
result = bench_kernel("v4-flash", isas=isas[:2], experts=64, report=show)
json.dump(result, open(sys.argv[1], "w"), indent=1)
PYTHON
