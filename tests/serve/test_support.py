"""What cannot be served exactly is refused at load in one sentence that says what it is."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moetier.checkpoint.names import LAYERS, LayerSpelling, find_layers
from moetier.errors import UnsupportedModelError
from moetier.settings import Settings
from moetier.store.build import build_store
from moetier.store.store import Store
from tests.store.checkpoints import write_checkpoint

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("vllm", reason="vLLM is not installed")

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 4, 2, 64, 32


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("support")
    write_checkpoint(folder / "model", experts=EXPERTS, hidden=HIDDEN, intermediate=INTERMEDIATE, top_k=TOP_K)
    build_store(folder / "model", folder / "store")
    return Store.open(folder / "store")


def described(**changes: Any) -> tuple[SimpleNamespace, SimpleNamespace]:
    """A layer and a vLLM config as vLLM describes them, with some fields changed (dotted names)."""
    parallel = SimpleNamespace(use_ep=False, enable_eplb=False, tp_size=1, dp_size=1)
    moe = SimpleNamespace(
        has_bias=False,
        activation=SimpleNamespace(value="silu"),
        is_lora_enabled=False,
        in_dtype=torch.bfloat16,
        hidden_dim=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_experts=EXPERTS,
        experts_per_token=TOP_K,
        moe_parallel_config=parallel,
    )
    layer = SimpleNamespace(
        layer_name="model.layers.1.mlp.experts",
        moe_config=moe,
        swiglu_limit=None,
        swiglu_alpha=None,
        swiglu_beta=None,
        apply_router_weight_on_input=False,
    )
    config = SimpleNamespace(
        load_config=SimpleNamespace(load_format="moetier"),
        device_config=SimpleNamespace(device_type="cpu"),
        model_config=SimpleNamespace(enforce_eager=False),
    )
    roots = {"layer": layer, "moe": moe, "parallel": parallel, "config": config}
    for name, value in changes.items():
        root, *path, last = name.split("__")
        target: Any = roots[root]
        for part in path:
            target = getattr(target, part)
        setattr(target, last, value)
    return layer, config


def test_what_is_served_passes(store: Store) -> None:
    from moetier.vllm.support import check_supported

    layer, config = described()
    check_supported(layer, store, config, Settings(store=store.path))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"moe__has_bias": True}, "biases"),
        ({"moe__activation": SimpleNamespace(value="gelu")}, "activation is 'gelu'"),
        ({"layer__swiglu_alpha": 1.702}, "alpha or beta"),
        ({"layer__swiglu_beta": 1.0}, "alpha or beta"),
        ({"layer__apply_router_weight_on_input": True}, "router's weight multiplies the experts' input"),
        ({"moe__is_lora_enabled": True}, "LoRA"),
        ({"moe__in_dtype": torch.float16}, "start with --dtype bfloat16"),
        ({"layer__swiglu_limit": 10.0}, "clamps SwiGLU at 10.0, the store at None"),
        ({"moe__num_experts": 8}, "built from another checkpoint"),
        ({"parallel__use_ep": True}, "expert parallelism"),
        ({"parallel__enable_eplb": True}, "EPLB"),
        ({"parallel__dp_size": 2}, "data parallelism"),
        ({"config__load_config__load_format": "auto"}, "start with --load-format moetier"),
        ({"config__device_config__device_type": "cuda"}, "give --slots"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_what_is_not_is_refused_in_one_sentence(store: Store, changes: dict[str, Any], reason: str) -> None:
    from moetier.vllm.support import check_supported

    layer, config = described(**changes)
    with pytest.raises(UnsupportedModelError, match=reason) as error:
        check_supported(layer, store, config, Settings(store=store.path))
    message = str(error.value)
    assert message.startswith("model.layers.1.mlp.experts: ")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("device", "graphs", "reason"),
    [("cpu", 64, "no CUDA device"), ("cuda", 512, "--max-cudagraph-capture-size 64"), ("cuda", 64, None)],
    ids=["no device", "graphs too large", "served"],
)
def test_device_slots(store: Store, device: str, graphs: int, reason: str | None) -> None:
    from moetier.vllm.support import check_supported

    layer, config = described(config__device_config__device_type=device)
    config.compilation_config = SimpleNamespace(max_cudagraph_capture_size=graphs)
    settings = Settings(store=store.path, slots=2)
    if reason is None:
        check_supported(layer, store, config, settings)
        return
    with pytest.raises(UnsupportedModelError, match=reason):
        check_supported(layer, store, config, settings)


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("model.layers.3.mlp.experts", 3),
        ("layers.41.ffn.experts", 41),
        ("model.layers.5.mtp_block.mlp.experts", 5),
        ("mtp.layers.0.mlp.experts", 48),
        ("mtp.layers.48.mlp.experts", 48),
    ],
)
def test_layer_number(name: str, number: int) -> None:
    from moetier.engine.naming import layer_number

    assert layer_number(name, 48) == number


@pytest.mark.parametrize("spelling", LAYERS, ids=lambda spelling: spelling.template)
@pytest.mark.parametrize("written", [0, 2])
def test_a_module_and_its_tensors_are_of_the_same_layer(spelling: LayerSpelling, written: int) -> None:
    from moetier.engine.naming import layer_number

    module = spelling.template.format(layer=written)
    ((number, name),) = ((layer.number, layer.name) for layer in find_layers([f"{module}.0.w1.weight"], 48))
    assert (number, name) == (layer_number(module, 48), module)
    assert number == written + 48 * spelling.drafts


@pytest.mark.parametrize(
    "name",
    ["model.experts", "model.layers.1.layers.2.experts", "mtp.layers.0.mlp.experts.x", "draft.layers.0.mlp.experts"],
)
def test_layer_number_that_cannot_be_told(name: str) -> None:
    from moetier.engine.naming import layer_number

    with pytest.raises(UnsupportedModelError, match=name):
        layer_number(name, 48)


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ({"load_format": "auto"}, "start with --load-format moetier"),
        ({"enable_lora": True}, "LoRA on routed experts is not served"),
        ({"additional_config": {}}, "no settings for moetier"),
        ({"dtype": "float16"}, "torch.float16"),
    ],
    ids=["load-format", "lora", "no-settings", "float16"],
)
def test_the_real_engine_refuses(nano: Path, tmp_path: Path, engine: dict[str, Any], reason: str) -> None:
    from tests.serve.engine import moetier, run_engine

    build_store(nano, tmp_path / "store")
    arguments = {"model": str(nano), **moetier(tmp_path / "store", dram_records=0), **engine}
    with pytest.raises(RuntimeError, match=reason):
        run_engine([[1, 2, 3]], 1, **arguments)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline parallelism is not served: expected 1 stage, found 2"),
        ({"weight_transfer_config": object()}, "weight transfer is not served"),
    ],
    ids=["pipeline", "weight-transfer"],
)
def test_engines_that_are_refused_before_anything_is_opened(changes: dict[str, Any], reason: str) -> None:
    from moetier.vllm.runtime import tiered_model

    def engine(pipeline_parallel_size: int = 1, weight_transfer_config: object = None) -> SimpleNamespace:
        return SimpleNamespace(
            additional_config={"moetier": {"store": "/there/is/none"}},
            model_config=SimpleNamespace(model="/there/is/none"),
            parallel_config=SimpleNamespace(pipeline_parallel_size=pipeline_parallel_size),
            weight_transfer_config=weight_transfer_config,
        )

    with pytest.raises(UnsupportedModelError, match=reason):
        tiered_model(engine(**changes))


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        (("-pp", "2"), "expected 1 stage, found 2"),
        (("--pipeline-parallel-size=2",), "expected 1 stage, found 2"),
        (("--pipeline_parallel_size", "4"), "expected 1 stage, found 4"),
        (("--pipeline-parallel-size", "1", "-pp", "2"), "expected 1 stage, found 2"),
        (("--weight-transfer-config", "{}"), "weights are not changed while serving"),
        (("--weight-transfer-config.backend", "nccl"), "weights are not changed while serving"),
        (("-pp", "1"), None),
        (("--tensor-parallel-size", "2"), None),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_options_of_vllm_that_are_refused_before_it_starts(extra: tuple[str, ...], reason: str | None) -> None:
    from moetier.launch.refused import check_arguments

    if reason is None:
        check_arguments(extra)
        return
    with pytest.raises(UnsupportedModelError, match=reason):
        check_arguments(extra)
