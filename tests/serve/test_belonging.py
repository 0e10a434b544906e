"""An engine serves the weights that it started with, and the store that belongs to them; all else is refused."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moetier.store.build import build_store
from moetier.store.checkpoint import Checkpoint, is_expert_tensor
from tests.serve.engine import in_engine_process, moetier, run_engine
from tests.serve.models import write_models
from tests.store.older import older_store, overwrite

pytest.importorskip("vllm", reason="vLLM is not installed")

PROMPT = list(range(5, 25))
WORKER = "moetier.vllm.cpu_worker.MoetierCpuWorker"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A and b: MXFP4 checkpoints with the same headers and other weights; their stores; plain: a's weights in bf16."""
    folder = tmp_path_factory.mktemp("models")
    packed, plain = write_models(folder / "made", "qwen3_moe")
    shutil.move(packed, folder / "a")
    shutil.move(plain, folder / "plain")
    shutil.copytree(folder / "a", folder / "b")
    rng = np.random.default_rng(5)
    for name, tensor in Checkpoint.open(folder / "b").tensors.items():
        with tensor.file.open("r+b") as file:
            file.seek(tensor.offset)
            raw = np.frombuffer(file.read(tensor.nbytes), np.uint8 if is_expert_tensor(name) else np.uint16)
            file.seek(tensor.offset)
            file.write(rng.permutation(raw).tobytes())
    for name in "ab":
        build_store(folder / name, folder / f"store-{name}")
    return folder


def engine_of(model: Path, store: Path | None, **more: Any) -> dict[str, Any]:
    ours = moetier(store, threads=1, dram_records="100%", identity_check=1) if store is not None else {}
    small = {"kv_cache_memory_bytes": 64 << 20, "max_model_len": 128, "max_num_seqs": 2, "dtype": "bfloat16"}
    return {"model": str(model), "enforce_eager": True, "skip_tokenizer_init": True, **small, **ours, **more}


def tokens_of(llm: Any) -> list[int]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=8, detokenize=False)
    llm.reset_prefix_cache()
    return list(llm.generate([{"prompt_token_ids": PROMPT}], sampling, use_tqdm=False)[0].outputs[0].token_ids)


def change_weights(engine: dict[str, Any], calls: list[tuple[str, list[Any], dict[str, Any]]]) -> dict[str, Any]:
    """Start an engine and try each call on its worker; what each said, and the tokens before and after."""
    from vllm import LLM

    llm, said = LLM(**engine), []
    before = tokens_of(llm)
    for name, arguments, named in calls:
        try:
            llm.collective_rpc(name, args=tuple(arguments), kwargs=named)
            said.append(f"{name}: done")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return {"said": said, "before": before, "after": tokens_of(llm)}


def test_weights_are_not_changed_through_a_worker(models: Path) -> None:
    calls: list[tuple[str, list[Any], dict[str, Any]]] = [
        ("reload_weights", [], {}),
        ("reload_weights", [], {"weights_path": str(models / "b")}),
        ("reload_weights", [], {"weights_iterator": [], "is_checkpoint_format": False}),
        ("init_weight_transfer_engine", [{}], {}),
        ("start_weight_update", [], {}),
        ("start_draft_weight_update", [], {}),
        ("update_weights", [{}], {}),
        ("finish_weight_update", [], {}),
        ("update_config", [{"model_config": {"model": str(models / "b")}}], {}),
        ("sleep", [], {"level": 2}),
        ("discard", [["weights"]], {}),
    ]
    found = in_engine_process(change_weights, engine_of(models / "a", models / "store-a", worker_cls=WORKER), calls)
    for said in found["said"]:
        assert said.startswith("UnsupportedModelError: "), said
        assert "weights are not changed while serving: end it, and start one with the new checkpoint" in said
    assert len(found["said"]) == len(calls)
    assert found["after"] == found["before"]


def test_nor_through_a_worker_of_vllms(models: Path) -> None:
    calls: list[tuple[str, list[Any], dict[str, Any]]] = [
        ("reload_weights", [], {}),
        ("reload_weights", [], {"weights_path": str(models / "b")}),
    ]
    found = in_engine_process(change_weights, engine_of(models / "a", models / "store-a"), calls)
    assert all(said.startswith("UnsupportedModelError: reload_weights: ") for said in found["said"])
    assert found["after"] == found["before"]


def load_into_model(engine: dict[str, Any]) -> str:
    """What weight transfer and extensions of a worker end with: the model's own load_weights."""
    from vllm import LLM

    llm = LLM(**engine)
    try:
        llm.llm_engine.model_executor.driver_worker.worker.get_model().load_weights([])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def test_nor_through_the_model(models: Path) -> None:
    said = in_engine_process(load_into_model, engine_of(models / "a", models / "store-a"))
    assert said.startswith("UnsupportedModelError: load_weights: ")


def after_sleep(engine: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM

    llm = LLM(**engine)
    before, said = tokens_of(llm), ""
    try:
        llm.sleep(level=2)
    except Exception as error:
        said = str(error)
    llm.wake_up()
    return {"before": before, "after": tokens_of(llm), "said": said}


def test_an_engine_that_was_not_put_to_sleep_wakes_up_as_it_is_told(models: Path) -> None:
    found = in_engine_process(after_sleep, engine_of(models / "a", models / "store-a", worker_cls=WORKER))
    assert "level 1 keeps them. The engine is paused now: wake_up resumes it" in found["said"]
    assert found["after"] == found["before"]


def two_engines(first: dict[str, Any], second: dict[str, Any]) -> list[Any]:
    """Tokens of two engines of one process, or the error of the second."""
    from vllm import LLM

    found: list[Any] = [tokens_of(LLM(**first))]
    try:
        found.append(tokens_of(LLM(**second)))
    except Exception as error:
        found.append(f"{type(error).__name__}: {error}")
    return found


def test_a_second_engine_is_checked_like_the_first(models: Path) -> None:
    """The same settings, and another checkpoint: its experts would come from the first one's store."""
    one, other = (engine_of(models / name, models / "store-a") for name in "ab")
    tokens, said = in_engine_process(two_engines, one, other)
    assert len(tokens) == 8
    assert "was built from another checkpoint: expected identity" in said


@pytest.mark.long
def test_two_engines_of_two_checkpoints_serve_their_own(models: Path) -> None:
    one, other = (engine_of(models / name, models / f"store-{name}") for name in "ab")
    together = in_engine_process(two_engines, one, other)
    assert together == [in_engine_process(two_engines, each, each)[1] for each in (one, other)]
    assert together[0] != together[1]


def replaced_between(first: dict[str, Any], newer: str) -> str:
    """A second engine under the same path, whose weights were replaced meanwhile."""
    from vllm import LLM

    tokens_of(LLM(**first))
    for file in Path(newer).iterdir():
        shutil.copyfile(file, Path(first["model"]) / file.name)
    try:
        return str(tokens_of(LLM(**first)))
    except Exception as error:
        return str(error)


def test_a_checkpoint_that_was_replaced_between_two_engines_is_noticed(models: Path, tmp_path: Path) -> None:
    shutil.copytree(models / "a", tmp_path / "model")
    said = in_engine_process(replaced_between, engine_of(tmp_path / "model", models / "store-a"), str(models / "b"))
    assert "was built from another checkpoint: expected identity" in said


def test_the_load_format_alone_is_refused(models: Path) -> None:
    """Nobody would load the experts."""
    with pytest.raises(RuntimeError, match="expected its experts from a store") as raised:
        run_engine([PROMPT], 1, **engine_of(models / "plain", None, load_format="moetier"))
    assert "give both options, as `moetier serve` does, or neither" in str(raised.value)
    run_engine([PROMPT], 1, **engine_of(models / "plain", None))  # neither: it is not ours to refuse


@pytest.mark.parametrize("quantization", [None, "moetier"])
def test_a_draft_model_with_experts_is_refused(models: Path, quantization: str | None) -> None:
    drafter = models / ("b" if quantization else "plain")
    speculative = {"model": str(drafter), "method": "draft_model", "num_speculative_tokens": 2}
    if quantization:
        speculative["quantization"] = quantization
    said = r"A draft model with experts of its own is not served|has routed experts and is another checkpoint than"
    with pytest.raises(RuntimeError, match=said):
        run_engine([PROMPT], 1, **engine_of(models / "a", models / "store-a", speculative_config=speculative))


def test_experts_that_no_identity_tells_apart_are_compared_at_the_start(models: Path, tmp_path: Path) -> None:
    shutil.copytree(models / "a", tmp_path / "model")
    shutil.copytree(models / "store-a", tmp_path / "store")
    for name, tensor in Checkpoint.open(tmp_path / "model").tensors.items():
        if is_expert_tensor(name) and name.endswith("weight"):
            overwrite(tmp_path / "model", name, tensor.nbytes // 4, b"\x31\x75\x13")
    with pytest.raises(
        RuntimeError, match=r"layer \d, expert \d+: the store .* holds other weights than the checkpoint"
    ):
        run_engine([PROMPT], 1, **engine_of(tmp_path / "model", tmp_path / "store"))


def test_an_older_store_is_served_and_compared(models: Path, tmp_path: Path) -> None:
    shutil.copytree(models / "store-a", tmp_path / "store")
    older_store(tmp_path / "store")
    new, old = (
        run_engine([PROMPT], 4, **engine_of(models / "a", store)) for store in (models / "store-a", tmp_path / "store")
    )
    assert new["tokens"] == old["tokens"]
    with pytest.raises(RuntimeError, match=r"layer \d, expert \d+: the store .* holds other weights"):
        run_engine([PROMPT], 1, **engine_of(models / "b", tmp_path / "store"))


def serve(*arguments: object) -> subprocess.CompletedProcess[str]:
    """`moetier serve`, which is expected to refuse before vLLM starts."""
    code = "import sys; from moetier.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", code, "serve", *map(str, arguments)], capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize("stages", [("-pp", "2"), ("--pipeline-parallel-size=2",)], ids=["short", "long"])
def test_the_launcher_refuses_pipeline_parallelism(nano: Path, tmp_path: Path, stages: tuple[str, ...]) -> None:
    refused = serve(nano, "--store", tmp_path / "none", "--dram-records", "1", "--", *stages)
    assert refused.returncode == 2
    assert "pipeline parallelism is not served: expected 1 stage, found 2" in refused.stderr


def test_the_launcher_compares_experts_before_vllm_starts(nano: Path, tmp_path: Path) -> None:
    """A store that knows headers only, and a fine-tune."""
    shutil.copytree(nano, tmp_path / "tune")
    build_store(nano, tmp_path / "store")
    older_store(tmp_path / "store")
    for name, tensor in Checkpoint.open(tmp_path / "tune").tensors.items():
        if is_expert_tensor(name) and name.endswith(".weight"):
            overwrite(tmp_path / "tune", name, tensor.nbytes // 4, b"\x31\x75\x13")
    refused = serve(tmp_path / "tune", "--store", tmp_path / "store", "--dram-records", "1", "--port", "8392")
    assert refused.returncode == 2
    text = " ".join(refused.stderr.split())
    assert "knew a checkpoint by its headers only" in text
    assert "holds other weights than the checkpoint" in text
    assert "vLLM's log" not in text
