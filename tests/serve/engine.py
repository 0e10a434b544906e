"""Runs vLLM inside one process on prompts given as token ids; every engine gets a process of its own.

Most of the time that an engine takes to start, a process imports vLLM. So one process does it once, before any thread
runs in it, and every engine is a fork of that one (multiprocessing's fork server).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # compiling the sampler takes longer than these runs
    "OMP_NUM_THREADS": "1",
}

IMPORTED = ["vllm.entrypoints.llm", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "moetier.vllm.runtime"]
"""What an engine imports before it knows its model."""

LIMIT_SECONDS = 600

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
    """Start an engine in a new process, generate greedily for all prompts queued at once, return its result.

    engine: arguments of vllm.LLM. The result: tokens, logprobs, our counters and vLLM's.
    """
    job = {"engine": engine, "prompts": prompts, "max_tokens": max_tokens, "prompt_logprobs": prompt_logprobs}
    found: dict[str, Any] = in_engine_process(_result, job)
    return found


def in_engine_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function of a module returns in a process that imported vLLM; RuntimeError with its output if it fails."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with mock.patch.dict(os.environ, ENVIRONMENT), tempfile.TemporaryDirectory() as folder:
        forkserver.ensure_running()  # in this environment, of which libraries read a part when they are imported
        said, result = Path(folder) / "said", Path(folder) / "result"
        said.touch()
        process = context.Process(target=_run, args=(function, arguments, dict(os.environ), said, result))
        process.start()
        process.join(LIMIT_SECONDS)
        if process.exitcode != 0:
            process.kill()
            raise RuntimeError(f"engine failed with {process.exitcode}:\n{said.read_text(errors='replace')[-8000:]}")
        return json.loads(result.read_text())


def _run(
    function: Callable[..., Any], arguments: tuple[Any, ...], environment: dict[str, str], said: Path, result: Path
) -> None:
    """In the new process: what it and its children say goes to a file."""
    with said.open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.environ.clear()  # of whoever started the process that this is a fork of
    os.environ.update(environment)
    result.write_text(json.dumps(function(*arguments)))


def moetier(store: Path, **settings: Any) -> dict[str, Any]:
    """Engine arguments that put the experts of `store` into moetier's tiers."""
    return {
        "quantization": "moetier",
        "load_format": "moetier",
        "additional_config": {"moetier": {"store": str(store), **settings}},
    }


def _result(job: dict[str, Any]) -> dict[str, Any]:
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
    from moetier.vllm import runtime

    for model in runtime._models.values():
        result["counters"] = vars(model.counters)
        result["reads"] = model.reader.counters.reads
        result["records"] = model.records
    return result
