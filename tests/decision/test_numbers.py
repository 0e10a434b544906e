"""Numbers that no model has are refused at once, by every verb, in little memory."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from moetier.decision.decide import decide
from moetier.errors import MoetierError
from moetier.plan.headers import folder_headers
from moetier.store.build import build_store
from moetier.store.checkpoint import Checkpoint
from tests.decision import made

LARGE = {"three billion": 3 * 10**9, "thirty million": 30_000_000, "10^12": 10**12, "2^70": 2**70, "10^4000": 10**4000}
SIZES = ("num_hidden_layers", "num_experts", "num_experts_per_tok", "hidden_size", "moe_intermediate_size")
MOST_SECONDS, MOST_BYTES = 20, 3 << 30
"""CPU time and address space of a whole command, its start included: each is far less than a loop over 10^9 takes."""


def checkpoint(folder: Path, **overrides) -> Path:
    return made.write(folder, made.floats(), **overrides)


@pytest.mark.parametrize("key", SIZES)
@pytest.mark.parametrize(
    "value", [*LARGE.values(), 0, -1, 1e9, "4", True, [4]], ids=[*LARGE, "0", "-1", "float", "text", "true", "list"]
)
def test_a_size_that_no_model_has_is_one_error_through_every_door(key, value, tmp_path):
    model = checkpoint(tmp_path / "model", **{key: value})
    for door in (
        Checkpoint.open,
        lambda path: build_store(path, tmp_path / "store"),
        lambda path: decide(folder_headers(path).facts).require(),
        lambda path: folder_headers(path).geometry(),
    ):
        with pytest.raises(MoetierError) as error:
            door(model)
        assert key in str(error.value)
        assert len(str(error.value)) < 1000


OTHERS = (
    "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings", "vocab_size", "sliding_window",
    "num_nextn_predict_layers", "full_attention_interval", "first_k_dense_replace", "kv_lora_rank", "index_topk",
    "intermediate_size", "n_group", "zero_expert_num", "swiglu_limit", "num_local_experts", "moe_latent_size",
)  # fmt: skip


@pytest.mark.parametrize("key", OTHERS)
@pytest.mark.parametrize("value", LARGE.values(), ids=LARGE)
def test_no_other_number_takes_time_or_memory(key, value, tmp_path):
    """Accepted or one error: what it must not be is slow, or anything else than one of ours."""
    said = ""
    before = resource.getrusage(resource.RUSAGE_SELF)
    try:
        decide(folder_headers(checkpoint(tmp_path / "model", **{key: value})).facts).require()
        folder_headers(tmp_path / "model").geometry()
    except MoetierError as error:
        said = str(error)
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert len(said) < 1000
    assert after.ru_utime - before.ru_utime < MOST_SECONDS
    assert after.ru_maxrss - before.ru_maxrss < MOST_BYTES >> 10


VERBS = {
    "plan": ("plan", "MODEL", "--gpus", "1x24GB", "--ram", "64GB"),
    "store build": ("store", "build", "MODEL", "STORE"),
    "doctor": ("doctor", "MODEL"),
    "serve": ("serve", "MODEL", "--store", "STORE"),
}


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_ends_at_once(verb, tmp_path):
    model = checkpoint(tmp_path / "model", num_hidden_layers=3 * 10**9)
    arguments = [{"MODEL": str(model), "STORE": str(tmp_path / "store")}.get(one, one) for one in VERBS[verb]]

    def bounded() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (MOST_SECONDS, MOST_SECONDS))

    done = subprocess.run(
        [sys.executable, "-m", "moetier", *arguments], capture_output=True, text=True, preexec_fn=bounded, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "expected at most 9,999 for num_hidden_layers, found 3,000,000,000" in done.stderr
    assert not (tmp_path / "store").exists()


def test_the_largest_sizes_are_accepted(tmp_path):
    """Bounds are far beyond every model: those of config.json of the largest that we know pass."""
    model = checkpoint(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    facts = folder_headers(model).facts
    for key, value in {
        "num_hidden_layers": 9_999,
        "max_position_embeddings": 10_485_760,
        "vocab_size": 1 << 20,
    }.items():
        (model / "config.json").write_text(json.dumps(config | {key: value}))
        assert not decide(folder_headers(model).facts).refusals(), key
    assert facts.hidden_layers == made.LAYERS
