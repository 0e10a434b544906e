"""One vLLM engine in a process of its own, on prompts of token ids; this file is also the program of that process.

Standard input, first line: JSON with "engine" (arguments of vllm.LLM) and "runs", each with "prompts" (lists of token
ids), "max_tokens", where it is to be repeated "repeat_seconds", and "keep_lock" (see keep_pythons_lock). It says READY
when the engine has started, and goes on when it gets a second line. The last line of standard output: JSON, per run
tokens, logprobs and seconds, and what moetier counted.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "2",
}
ROOT = Path(__file__).parents[2]
WORKER = "moetier.vllm.gpu_worker.MoetierGpuWorker"
GRAPHS: dict[str, dict[str, Any]] = {
    "none": {"enforce_eager": True},
    "decode": {
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "max_cudagraph_capture_size": 64}
    },
    "pieces": {
        "compilation_config": {
            "mode": 3,
            "backend": "eager",
            "cudagraph_mode": "PIECEWISE",
            "max_cudagraph_capture_size": 64,
        }
    },
    "all": {"compilation_config": {"max_cudagraph_capture_size": 64}},
}
"""How vLLM captures: nothing; decode steps whole; all small steps in pieces, without Inductor; and its default."""

READY, RESULT = "ready", "result: "
REASON = re.compile(r"Traceback|Error\b|ERROR|Fatal|terminate called")
TIMEOUT = 540
KEPT_EVERY = 0.5
"""Seconds between two times that `keep_lock` keeps Python's lock."""


class Engine:
    """A process that starts an engine, waits for `go`, and does its runs. One that must end early is to be killed."""

    def __init__(
        self,
        runs: Sequence[Mapping[str, Any]],
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
        timeout: float = TIMEOUT,
        **arguments: Any,
    ) -> None:
        """log: where all that the process writes is kept if it fails. timeout: seconds to start, and again to run."""
        self._log, self._timeout = log, timeout
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, **ENVIRONMENT, **(environment or {})},
        )
        self.lines: list[str] = []
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._say(json.dumps({"engine": arguments, "runs": runs}))

    def _say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if line.strip() == READY:
                self._ready.set()
        self._ready.set()  # nothing more will come

    def wait(self) -> None:
        """Until the engine has started; RuntimeError where it has not."""
        if not self._ready.wait(self._timeout) or READY not in self.lines:
            self._stop()
            raise RuntimeError(self._failure())

    def go(self) -> None:
        """Let it run, when it has started."""
        self.wait()
        self._say("go")

    def end(self) -> int:
        """Wait for the process, and kill it where it does not end; its exit code."""
        try:
            code = self.process.wait(self._timeout)
        except subprocess.TimeoutExpired:
            code = self._stop()
        self._reader.join(10)
        return code

    def _stop(self) -> int:
        """End a process that hangs: by a signal of which Python tells where every thread is, else for good."""
        self.process.send_signal(signal.SIGABRT)
        try:
            return self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()
        finally:
            self._reader.join(10)

    def result(self) -> dict[str, Any]:
        """What it found; RuntimeError with the end of its log where it failed."""
        code, found = self.end(), [line for line in self.lines if line.startswith(RESULT)]
        if code or not found:
            raise RuntimeError(self._failure())
        result: dict[str, Any] = json.loads(found[-1].removeprefix(RESULT))
        result["log"] = [line for line in self.lines if "moetier:" in line]
        return result

    def _failure(self) -> str:
        """What it said first that sounds like a reason, and last: dumps between them are long."""
        lines = [line for line in self.lines if not line.startswith(RESULT)]
        if self._log is not None:
            self._log.write_text("\n".join(lines))
        first = next((i for i, line in enumerate(lines) if REASON.search(line)), len(lines))
        reason = "\n".join(line[:400] for line in lines[first : first + 60])
        after = "" if len(lines) == len(self.lines) else " after it had given its result"
        return f"engine ended with {self.process.poll()}{after}:\n{reason}\n...\n{chr(10).join(lines)[-3000:]}"


def engine(
    runs: list[dict[str, Any]],
    environment: dict[str, str] | None = None,
    log: Path | None = None,
    timeout: float = TIMEOUT,
    **arguments: Any,
) -> dict[str, Any]:
    """The result of a new process."""
    started = Engine(runs, environment, log, timeout, **arguments)
    started.go()
    return started.result()


def tiered(settings: Mapping[str, Any], graphs: str) -> dict[str, Any]:
    """Arguments of an engine with moetier's `settings` on a GPU. graphs: a name of GRAPHS."""
    ours = {"quantization": "moetier", "load_format": "moetier", "worker_cls": WORKER}
    return {**ours, "additional_config": {"moetier": dict(settings)}, **GRAPHS[graphs]}


def prompts_of(model: Path, count: int) -> list[list[int]]:
    """Evaluation prompts as token ids of the model's tokenizer."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    texts = [
        " ".join(str(message.get("content")) for message in json.loads(line)["messages"])
        for path in sorted((ROOT / "models" / "eval").glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    random.Random(0).shuffle(texts)
    return [tokenizer.encode(text).ids[:512] for text in texts[:count]]


def main() -> None:
    faulthandler.enable()
    job = json.loads(sys.stdin.readline())
    begun = time.monotonic()
    from vllm import LLM

    defaults = {"skip_tokenizer_init": True, "disable_log_stats": True, "enable_prefix_caching": False}
    llm = LLM(**{**defaults, **job["engine"]})
    result: dict[str, Any] = {"start_s": time.monotonic() - begun, "runs": []}
    print(f"\n{READY}", flush=True)
    if sys.stdin.readline():
        result["runs"] = [run(llm, one) for one in job["runs"]]
        check()
        # faults.py may have had nothing written any more; torch aborts where it cannot write its own files at the end.
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        print(f"\n{RESULT}{json.dumps(result)}", flush=True)


def run(llm: Any, one: Mapping[str, Any]) -> dict[str, Any]:
    """All prompts queued at once, greedy; again and again for `repeat_seconds`, every answer against the first."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, max_tokens=one["max_tokens"], ignore_eos=True, logprobs=one.get("logprobs"), detokenize=False
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in one["prompts"]]
    if one.get("keep_lock"):
        threading.Thread(target=keep_pythons_lock, daemon=True).start()
    end, times, different, memory = time.monotonic() + one.get("repeat_seconds", 0), [], 0, []
    first: dict[str, Any] | None = None
    while first is None or time.monotonic() < end:
        start = time.perf_counter()
        found = answers(llm.generate(prompts, sampling, use_tqdm=False))
        times.append(time.perf_counter() - start)
        memory.append(memory_mib())
        first = first or found
        different += sum(a != b for key in first for a, b in zip(found[key], first[key], strict=True))
    return {
        **first,
        "seconds": times[0],
        "rounds": len(times),
        "different": different,
        "memory": memory,
        "counts": counts(),
        "acceptance": acceptance(llm),
    }


def keep_pythons_lock() -> None:
    """Wait for the device again and again, with Python's lock: as a call of CUDA does that does not release it."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    library = next(line.split()[-1] for line in maps if "libcudart.so" in line)
    runtime = ctypes.PyDLL(library)
    while runtime.cudaDeviceSynchronize() == 0:
        time.sleep(KEPT_EVERY)


def answers(outputs: list[Any]) -> dict[str, Any]:
    """Tokens and logprobs of each."""
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "logprobs": [
            [{str(t): e.logprob for t, e in step.items()} for step in output.outputs[0].logprobs or ()]
            for output in outputs
        ],
    }


def acceptance(llm: Any) -> list[float]:
    """Share of the guesses at each position that was accepted so far; [] where nothing guesses, or nobody counts."""
    if not getattr(llm.llm_engine, "log_stats", False):
        return []
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    drafts = getattr(metrics.get("vllm:spec_decode_num_drafts"), "value", 0)
    accepted = getattr(metrics.get("vllm:spec_decode_num_accepted_tokens_per_pos"), "values", [])
    return [each / drafts for each in accepted] if drafts else []


def memory_mib() -> dict[str, int]:
    """Resident memory of this process, and what torch holds on its device."""
    import psutil
    import torch

    device = torch.cuda.memory_reserved() if torch.cuda.is_available() else 0
    return {"rss": psutil.Process().memory_info().rss >> 20, "device": device >> 20}


def check() -> None:
    """Compare the tables of the device and the bytes of every slot and record with the store: seconds a gigabyte."""
    if "moetier.vllm.runtime" in sys.modules:
        from moetier.vllm import runtime

        for hybrid in runtime._hybrids.values():
            hybrid.check_integrity()


def counts() -> dict[str, Any]:
    """What the tiers did so far; {} where moetier does not serve."""
    if "moetier.vllm.runtime" not in sys.modules:
        return {}
    from moetier.vllm import runtime

    found: dict[str, Any] = {}
    for model in runtime._models.values():
        found |= vars(model.counters) | {"disk": model.reader.counters.reads, "records": model.records}
        found["healed"] = model.healer.healed if model.healer else 0
    for hybrid in runtime._hybrids.values():
        found |= {f"device_{name}": value for name, value in hybrid.counts().items()}
        found["costs"] = vars(hybrid.costs)
    return found


if __name__ == "__main__":
    main()
