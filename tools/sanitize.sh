#!/usr/bin/env bash
# tools/sanitize.sh SANITIZERS [PYTEST ARGUMENTS]: build the extension with GCC's -fsanitize=SANITIZERS, in
# build/sanitize-SANITIZERS beside the normal build; run the native test and the kernels' tests on it.
set -euo pipefail
shopt -s inherit_errexit
cd "$(dirname "$0")/.."
sanitizers=$1
shift
build=$PWD/build/sanitize-$sanitizers
# Without tiles but with AVX-512, the AMX kernels run on tiles in software.
emulate=OFF
if [[ $(uname -m) == x86_64 ]] && grep -qw avx512_bf16 /proc/cpuinfo && ! grep -qw amx_tile /proc/cpuinfo; then emulate=ON; fi

echo "sanitize: building with $sanitizers" >&2
rm -rf "$build/site"
.venv/bin/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation --target "$build/site" \
  --config-settings=build-dir="$build/cmake" --config-settings=cmake.define.MOETIER_SANITIZE="$sanitizers" \
  --config-settings=cmake.define.MOETIER_EMULATE_AMX=$emulate \
  --config-settings=cmake.define.MOETIER_NATIVE_TESTS=ON --config-settings=cmake.define.CMAKE_CXX_COMPILER=g++ .

# Python itself is not instrumented, so the runtimes must be loaded before it, and libstdc++ before they look for it.
preload=()
tests=tests/kernels
for name in ${sanitizers//,/ }; do
  case $name in
    address) preload+=("$(g++ -print-file-name=libasan.so)") ;;
    thread)
      preload+=("$(g++ -print-file-name=libtsan.so)")
      # The Python face; all else is in the native test, which takes far less time. Forks it cannot follow.
      tests=tests/kernels/test_cpu_calls.py
      ;;
    undefined) preload+=("$(g++ -print-file-name=libubsan.so)") ;;
    *) echo "sanitize: expected address, undefined or thread, found '$name'" >&2 && exit 2 ;;
  esac
done
preload+=("$(g++ -print-file-name=libstdc++.so)")

# -S leaves out .venv's hook that finds the normal, editable build. Python's own allocations are no leaks of ours.
packages=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "sanitize: testing with $sanitizers" >&2
.venv/bin/ctest --test-dir "$build/cmake" --output-on-failure
LD_PRELOAD="${preload[*]}" PYTHONPATH="$build/site:$packages" \
  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
  TSAN_OPTIONS=halt_on_error=1 \
  .venv/bin/python -S -m pytest "$tests" "$@"
