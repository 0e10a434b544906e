"""Runs vLLM inside one process on prompts given as token ids; started by tests as a program, once per engine.

Standard input: JSON with "engine" (arguments of vllm.LLM), "prompts" (lists of token ids), "max_tokens" and
"prompt_logprobs". A line of standard output that starts with RESULT: JSON with tokens, logprobs, our
counters and vLLM's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # compiling the sampler takes longer than these runs
    "OMP_NUM_THREADS": "1",
}

RESULT = "result: "
"""Other processes of the engine may write lines after it."""

SCHEDULER = (
    "vllm:prefix_cache_hits",
    "vllm:num_preemptions",
    "vllm:prompt_tokens",
    "vllm:generation_tokens",
    "vllm:iteration_tokens_total",
    "vllm:spec_decode_num_accepted_tokens",
)
"""vLLM's metrics that say what its scheduler did."""


def run_engine(
    prompts: list[list[int]], max_tokens: int, *, prompt_logprobs: bool = True, **engine: Any
) -> dict[str, Any]:
    """Start an engine in a new process, generate greedily for all prompts queued at once, return its result."""
    job = {"engine": engine, "prompts": prompts, "max_tokens": max_tokens, "prompt_logprobs": prompt_logprobs}
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        env={**os.environ, **ENVIRONMENT},
        timeout=600,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"engine failed with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
    line = next(line for line in reversed(done.stdout.splitlines()) if line.startswith(RESULT))
    result: dict[str, Any] = json.loads(line.removeprefix(RESULT))
    return result


def moetier(store: Path, **settings: Any) -> dict[str, Any]:
    """Engine arguments that put the experts of `store` into moetier's tiers."""
    return {
        "quantization": "moetier",
        "load_format": "moetier",
        "additional_config": {"moetier": {"store": str(store), **settings}},
    }


def main() -> None:
    job = json.load(sys.stdin)
    from vllm import LLM, SamplingParams

    defaults = {
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "kv_cache_memory_bytes": 256 << 20,
        "disable_log_stats": False,
    }
    llm = LLM(**{**defaults, **job["engine"]})
    sampling = SamplingParams(
        temperature=0,
        max_tokens=job["max_tokens"],
        ignore_eos=True,
        logprobs=2,
        prompt_logprobs=1 if job["prompt_logprobs"] else None,
        detokenize=False,
    )
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in job["prompts"]], sampling, use_tqdm=False)
    result: dict[str, Any] = {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "logprobs": [
            [{str(token): entry.logprob for token, entry in step.items()} for step in output.outputs[0].logprobs]
            for output in outputs
        ],
        "prompt_logprobs": [
            [
                None if step is None else {str(t): e.logprob for t, e in step.items()}
                for step in output.prompt_logprobs or ()
            ]
            for output in outputs
        ],
        "scheduler": {
            metric.name: metric.value if hasattr(metric, "value") else metric.buckets
            for metric in llm.get_metrics()
            if metric.name in SCHEDULER
        },
    }
    from moetier.serve.vllm import runtime

    for model in runtime._models.values():
        result["counters"] = vars(model.counters)
        result["reads"] = model.reader.counters.reads
        result["records"] = model.records
    sys.stdout.write(f"\n{RESULT}{json.dumps(result)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
