"""Options of vLLM that are refused before it starts, with the words that its workers refuse them with."""

from __future__ import annotations

from collections.abc import Sequence

from moetier.errors import UnsupportedModelError
from moetier.vllm_arguments import has, value_of

PIPELINE = ("--pipeline-parallel-size", "-pp")
TRANSFER = "--weight-transfer-config"


def pipeline_refused(stages: int | str) -> str:
    """Why pipeline parallelism is refused."""
    return (
        f"pipeline parallelism is not served: expected 1 stage, found {stages}. Each stage would save heat of "
        "its own layers only; start with --pipeline-parallel-size 1, and use --tensor-parallel-size for more devices"
    )


def check_arguments(extra: Sequence[str]) -> None:
    """UnsupportedModelError for an option of vLLM's that is not served."""
    stages = value_of(extra, *PIPELINE)
    if stages is not None and stages != "1":
        raise UnsupportedModelError(pipeline_refused(stages or "no number"))
    if has(extra, TRANSFER):
        raise UnsupportedModelError(f"{TRANSFER}: weights are not changed while serving; leave it out")
