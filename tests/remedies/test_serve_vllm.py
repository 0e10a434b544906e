"""What moetier says inside vLLM's processes while a model loads; done as it says, and the same part loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch

from moetier.budget import GIB
from moetier.contract import LayerGeometry
from moetier.launch.command import ServeRequest, arguments
from moetier.launch.keys import HASHES, VARIABLE
from moetier.settings import Settings
from moetier.store.build import build_store
from moetier.store.checkpoint import Checkpoint, is_expert_tensor
from moetier.store.match import open_store
from moetier.store.store import Store
from moetier.tiers.part import Part
from moetier.vllm import hybrid, runtime
from moetier.vllm.access import Access
from moetier.vllm.fixed import FixedWeights
from moetier.vllm.loader import MoetierLoader, _check_all_ours
from moetier.vllm.method import MoetierMoEMethod
from moetier.vllm.support import check_engine, check_supported
from tests.remedies.trouble import Trouble
from tests.serve.test_support import described
from tests.serve.test_support import store as store
from tests.store.mutants import made

remedy = pytest.mark.remedy
CUDA = {"config__device_config__device_type": "cuda"}
GRAPHS = {**CUDA, "config__compilation_config": SimpleNamespace(max_cudagraph_capture_size=512)}
FEWER = {**CUDA, "config__compilation_config": SimpleNamespace(max_cudagraph_capture_size=64)}
EAGER = {"config__model_config__enforce_eager": True}

ENGINES = [
    pytest.param({"moe__is_lora_enabled": True}, {}, {}, {}, marks=remedy("vllm/support.py", "LoRA on routed experts")),
    pytest.param(
        *({"moe__in_dtype": torch.float16}, {}, {}, {}),
        marks=remedy("vllm/support.py", "the contract takes bf16"),
    ),
    pytest.param(
        {"parallel__dp_size": 2}, {}, {}, {}, marks=remedy("vllm/support.py", "data parallelism is not served")
    ),
    pytest.param(
        *({"config__load_config__load_format": "auto"}, {}, {}, {}),
        marks=remedy("vllm/support.py", "would be read needlessly"),
    ),
    pytest.param(CUDA, {}, FEWER, {"slots": 2}, marks=remedy("vllm/support.py", "CUDA graphs cannot hold")),
    pytest.param(EAGER, {"slots": 2}, {}, {}, marks=remedy("vllm/support.py", "there is no CUDA device")),
    pytest.param(
        *({**CUDA, **EAGER, "config__model_config__enable_sleep_mode": True}, {"slots": 2}, FEWER, {"slots": 2}),
        marks=remedy("vllm/support.py", "sleep mode would discard"),
    ),
    *(
        pytest.param(*(GRAPHS, {"slots": 2}, *right), marks=remedy("vllm/support.py", "CUDA graphs are captured up to"))
        for right in ((FEWER, {"slots": 2}), (GRAPHS, {"slots": 2, "planned_tokens": 512}))
    ),
]


@pytest.mark.parametrize(("wrong", "settings", "right", "then"), ENGINES)
def test_an_engine_is_started_otherwise(
    trouble: Trouble, store: Store, wrong: Any, settings: Any, right: Any, then: Any
) -> None:
    with trouble:
        check_supported(*_asked(wrong, store), Settings(store=store.path, **settings))
    if "--max-cudagraph-capture-size" in trouble.text:
        assert "--max-cudagraph-capture-size 64" in trouble.text
    check_supported(*_asked(right, store), Settings(store=store.path, **then))
    trouble.gone()


def _asked(changes: dict[str, Any], store: Store) -> tuple[Any, Store, Any]:
    layer, config = described(**changes)
    return layer, store, config


@remedy("vllm/support.py", "weight transfer is not served")
def test_without_weight_transfer(trouble: Trouble) -> None:
    with trouble:
        check_engine(SimpleNamespace(weight_transfer_config=object()))
    check_engine(SimpleNamespace(weight_transfer_config=None))
    trouble.gone()


@pytest.mark.parametrize("way", ["set", "left-out"])
@remedy("vllm/access.py", "set it, or leave --middleware out")
def test_a_key_for_the_layer_that_asks_for_it(trouble: Trouble, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HASHES, raising=False)
    monkeypatch.delenv(VARIABLE, raising=False)
    app: Any = object()
    with pytest.raises(ValueError, match="expected a key") as raised:
        Access(app)
    trouble.said(str(raised.value))
    if way == "set":
        monkeypatch.setenv(VARIABLE, "k")
        assert len(Access(app).digests) == 1
    else:
        monkeypatch.setenv(HASHES, "")  # as `moetier serve` tells it where no key is asked for
        assert Access(app).digests == ()
    trouble.gone()


def _slots(free_gib: float, slots: int | str, cache_gib: float | None, max_tokens: int = 256) -> int:
    """Slots of each of 2 layers on a device with so much free memory."""
    tiers: Any = SimpleNamespace(
        settings=Settings.parse({"store": "/s", "slots": slots, "staging_slots": 8}),
        part=Part(LayerGeometry(7168, 2048, 256, 8)),
    )
    cache = None if cache_gib is None else int(cache_gib * GIB)
    config = SimpleNamespace(cache_config=SimpleNamespace(kv_cache_memory_bytes=cache))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "mem_get_info", lambda: (int(free_gib * GIB), 80 * GIB))
        return hybrid._slots(tiers, 2, config, max_tokens)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        pytest.param(
            wrong,
            right,
            marks=remedy("vllm/hybrid.py", "the KV cache's size is not known yet"),
            id=f"cache-{name}",
        )
        for name, wrong, right in (
            ("given", (8.0, "auto", None), (8.0, "auto", 1.0)),
            ("not-needed", (8.0, "auto", None), (8.0, 4, None)),
        )
    ]
    + [
        pytest.param(wrong, right, marks=remedy("budget.py", "no slot fits"), id=f"room-{name}")
        for name, wrong, right in (
            ("cache", (8.0, "auto", 6.0), (8.0, "auto", 2.0)),
            ("number", (8.0, 200, 6.0), (8.0, 100, 2.0)),
            ("tokens", (8.0, "auto", 1.0, 65536), (8.0, "auto", 1.0, 256)),
        )
    ],
)
def test_slots_that_a_server_finds(trouble: Trouble, wrong: Any, right: Any) -> None:
    with trouble:
        _slots(*wrong)
    assert 0 < _slots(*right) <= 256
    trouble.gone()


@pytest.mark.parametrize("auto", [False, True])
@remedy("budget.py", "what fits is --slots")
def test_slots_that_fit(trouble: Trouble, auto: bool) -> None:
    with trouble:
        _slots(8.0, 256, 1.0)
    told = trouble.text.partition("--slots ")[2].split()[0]
    assert _slots(8.0, "auto" if auto else int(told), 1.0) == int(told) > 0
    trouble.gone()


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        pytest.param(
            ({"slots": 2, "record_trace": "/t"}, 1),
            ({"slots": 0, "record_trace": "/t"}, 1),
            marks=remedy("vllm/runtime.py", "record with --slots 0"),
            id="trace",
        ),
        pytest.param(
            ({"record_calls": "/t"}, 2),
            ({"record_calls": "/t"}, 1),
            marks=remedy("vllm/runtime.py", "record with one rank"),
            id="calls",
        ),
    ],
)
def test_what_is_recorded(trouble: Trouble, wrong: Any, right: Any) -> None:
    def of_rank(settings: dict[str, Any], ranks: int) -> Settings:
        return runtime._of_rank(Settings.parse({"store": "/s", **settings}), 0, ranks)

    with trouble:
        of_rank(*wrong)
    of_rank(*right)
    trouble.gone()


class _Model(torch.nn.Module):  # type: ignore[misc, name-defined]
    """A model that vLLM's loader gives weights to."""

    def load_weights(self, weights: Any) -> set[str]:
        self.loaded = {name for name, _ in weights}
        return self.loaded


def _checkpoint(folder: Path, seed: int = 0) -> Path:
    mutant = made(np.random.default_rng(seed), "mxfp4")
    mutant.spread(2, True)
    mutant.write(folder)
    return folder


def _config(path: Path) -> Any:
    draft = SimpleNamespace(model_config=None)
    return SimpleNamespace(model=str(path), revision=None, runner_type="generate", quantization="moetier", draft=draft)


def _load(path: Path, model: Any, load_format: str = "moetier") -> None:
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    ours = load_format == "moetier"
    loader = MoetierLoader(LoadConfig(load_format="moetier")) if ours else DefaultModelLoader(LoadConfig())
    loader._init_ep_weight_filter = loader._init_mm_encoder_only_weight_filter = lambda *_: None
    loader.load_weights(model, _config(path))


@remedy("vllm/loader.py", "leave out --load-format and --quantization")
def test_experts_that_vllm_runs_otherwise(trouble: Trouble, tmp_path: Path) -> None:
    path, model = _checkpoint(tmp_path / "c"), _Model()
    with trouble:
        _load(path, model)
    assert not any(map(is_expert_tensor, model.loaded))
    _load(path, model := _Model(), "auto")
    assert any(map(is_expert_tensor, model.loaded))
    trouble.gone()


def _with_experts(method: Any) -> Any:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    layer: Any = RoutedExperts.__new__(RoutedExperts)
    torch.nn.Module.__init__(layer)
    layer.layer_name = "model.layers.1.mlp.experts"
    layer.quant_method = method
    model = _Model()
    model.add_module("experts", layer)
    return model


@pytest.mark.parametrize("way", ["both-options", "neither", "no-experts"])
@remedy("vllm/loader.py", "expected its experts from a store")
def test_experts_without_a_store(trouble: Trouble, way: str, tmp_path: Path) -> None:
    from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

    class Stock(torch.nn.Module):  # type: ignore[misc, name-defined]
        """Stands for what vLLM computes experts with where nobody said --quantization."""

    path = _checkpoint(tmp_path / "c")
    with trouble:
        _load(path, _with_experts(Stock()))
    if way == "both-options":
        ours = MoetierMoEMethod.__new__(MoetierMoEMethod)
        FusedMoEMethodBase.__bases__[0].__init__(ours)
        _load(path, _with_experts(ours))
    elif way == "neither":
        _load(path, _with_experts(Stock()), "auto")
    else:
        _check_all_ours(_Model())
    trouble.gone()


@remedy("vllm/fixed.py", "expected the weights that this engine started with")
def test_other_weights_are_another_engine(trouble: Trouble, tmp_path: Path) -> None:
    one, other = _checkpoint(tmp_path / "one"), _checkpoint(tmp_path / "other", seed=1)
    with trouble:
        FixedWeights().reload_weights(weights_path=str(other))
    build_store(one, tmp_path / "store")
    build_store(other, tmp_path / "other-store")
    open_store(tmp_path / "other-store", Checkpoint.open(other)).close()
    trouble.gone()


def _engine(model: Path, additional: Any, drafter: Path | None = None) -> Any:
    target = SimpleNamespace(model=str(model))
    draft = SimpleNamespace(
        target_model_config=target, draft_model_config=None if drafter is None else SimpleNamespace(model=str(drafter))
    )
    return SimpleNamespace(
        additional_config=additional,
        model_config=target,
        speculative_config=None if drafter is None else draft,
        scheduler_config=SimpleNamespace(max_num_batched_tokens=16),
    )


@remedy("vllm/runtime.py", "no settings for moetier")
def test_settings_for_an_engine(trouble: Trouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _checkpoint(tmp_path / "model")
    build_store(path, tmp_path / "store")
    monkeypatch.setattr(runtime, "place", lambda: (0, 1))
    monkeypatch.setattr(runtime, "gather", lambda mine: [mine])
    with trouble:
        runtime.tiered_model(_engine(path, {}))
    line = arguments(ServeRequest(path, Settings(store=tmp_path / "store", threads=1)), on_cpu=True)
    assert runtime.tiered_model(_engine(path, json.loads(line[line.index("--additional-config") + 1]))).records > 0
    runtime.close_all()
    trouble.gone()


@pytest.mark.parametrize("own", [True, False], ids=["own", "a-copy"])
@remedy("vllm/runtime.py", "choose such a one in --speculative-config")
def test_a_drafter_of_the_models_own_checkpoint(trouble: Trouble, own: bool, tmp_path: Path) -> None:
    path, other = _checkpoint(tmp_path / "model"), _checkpoint(tmp_path / "other", seed=1)
    shutil.copytree(path, tmp_path / "copy")
    tiers: Any = SimpleNamespace(drafts=lambda _: True)
    with trouble:
        runtime.check_drafter(2, tiers, _engine(path, {}, other))
    runtime.check_drafter(2, tiers, _engine(path, {}, path if own else tmp_path / "copy"))
    trouble.gone()
