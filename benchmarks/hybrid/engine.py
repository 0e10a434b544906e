"""One vLLM engine in this process, on prompts of token ids; started as a program by under_vllm.py, once per engine.

Standard input: JSON with "engine" (arguments of vllm.LLM), "runs": each with "prompts" (lists of token ids) and
"max_tokens". The last line of standard output: JSON, per run tokens, logprobs and seconds, and what moetier counted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
RESULT = "result: "


def engine(runs: list[dict[str, Any]], environment: dict[str, str] | None = None, **arguments: Any) -> dict[str, Any]:
    """The result of a new process; RuntimeError with the end of its log where it fails."""
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps({"engine": arguments, "runs": runs}),
        capture_output=True,
        text=True,
        env={**os.environ, **ENVIRONMENT, **(environment or {})},
        timeout=400,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(RESULT)]
    if done.returncode or not lines:
        raise RuntimeError(f"engine failed with {done.returncode}:\n{done.stdout[-1500:]}\n{done.stderr[-5000:]}")
    result: dict[str, Any] = json.loads(lines[-1].removeprefix(RESULT))
    result["log"] = [line for line in (done.stdout + done.stderr).splitlines() if "moetier:" in line]
    return result


def main() -> None:
    job = json.load(sys.stdin)
    begun = time.monotonic()
    from vllm import LLM, SamplingParams

    defaults = {"skip_tokenizer_init": True, "disable_log_stats": True, "enable_prefix_caching": False}
    llm = LLM(**{**defaults, **job["engine"]})
    result: dict[str, Any] = {"start_s": time.monotonic() - begun, "runs": []}
    for run in job["runs"]:
        sampling = SamplingParams(
            temperature=0, max_tokens=run["max_tokens"], ignore_eos=True, logprobs=run.get("logprobs"), detokenize=False
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in run["prompts"]]
        start = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        result["runs"].append(
            {
                "seconds": seconds,
                "tokens": [list(output.outputs[0].token_ids) for output in outputs],
                "logprobs": [
                    [{str(t): e.logprob for t, e in step.items()} for step in output.outputs[0].logprobs or ()]
                    for output in outputs
                ],
                "counts": counts(),
            }
        )
    sys.stdout.write(f"\n{RESULT}{json.dumps(result)}\n")
    sys.stdout.flush()


def counts() -> dict[str, Any]:
    """What the tiers did so far; {} where moetier does not serve."""
    if "moetier.serve.vllm.runtime" not in sys.modules:
        return {}
    from moetier.serve.vllm import runtime

    found: dict[str, Any] = {}
    for model in runtime._models.values():
        found |= vars(model.counters) | {"disk": model.reader.counters.reads, "records": model.records}
    for hybrid in runtime._hybrids.values():
        hybrid.check_integrity()
        found |= {f"device_{name}": value for name, value in hybrid.counts().items()}
        found["costs"] = vars(hybrid.costs)
    return found


if __name__ == "__main__":
    main()
