"""The same layer under transformers: routed experts out of a store, everything else as transformers has it.

For people without vLLM, and a second opinion for the tests. `load_model` gives an ordinary `PreTrainedModel`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moetier.amounts import AUTO
from moetier.budget import records_that_fit
from moetier.engine import TieredModel
from moetier.engine.hybrid import HybridLayer, HybridModel, Launch, SlotPlan
from moetier.engine.naming import layer_number
from moetier.engine.tensors import run_hybrid_layer, run_layer
from moetier.errors import CheckpointError, SettingsError, UnsupportedModelError
from moetier.identity.device import check_paths
from moetier.settings import Settings
from moetier.store.checkpoint import Checkpoint, is_expert_tensor
from moetier.store.match import compare_some, open_store
from moetier.tiers.step import UNKNOWN, Step

NAME = "moetier"
"""Name of the experts implementation, as in `experts_implementation="moetier"`."""
PLAIN = ("BF16", "F16", "F32")


def load_model(
    path: str | Path,
    settings: Settings,
    *,
    dtype: torch.dtype = torch.bfloat16,
    max_tokens: int = 4096,
    device: str | torch.device = "cpu",
) -> PreTrainedModel:
    """A checkpoint as a transformers model whose routed experts live in the tiers of `settings`.

    The tiers are its attribute `moetier`, a TieredModel: close it when the model is no longer used. With `slots` in the
    settings and a CUDA device, so many experts of each layer are in device slots; the CPU computes the others, and a
    forward of many tokens has them streamed.

    Parameters
    ----------
    path
        Checkpoint folder. Its other weights must be BF16, FP16 or FP32.
    settings
        Store and tiers.
    dtype
        bfloat16 or float32, of everything but the experts; those take either and return bf16.
    max_tokens
        Most tokens of one forward, batch included.
    device
        Where everything but the experts lives.

    Raises
    ------
    UnsupportedModelError
        The model's experts are not what the contract defines, or its other layers are quantized.
    CheckpointError, StoreError, SettingsError
        As for serving.

    """
    checkpoint = Checkpoint.open(path)
    _check_plain(checkpoint)
    store = open_store(settings.store, checkpoint)
    compare_some(store, checkpoint)
    layers = [layer for layer in store.manifest.layers if layer.number < checkpoint.hidden_layers]
    place = _device_of(settings, device)
    cpu_tokens = settings.planned_tokens if settings.slots else max_tokens
    tiers = TieredModel(settings, store, records_that_fit(settings, store, len(layers)), cpu_tokens, checkpoint)
    hybrid = _with_slots(tiers, len(layers), max_tokens, place) if settings.slots else None
    config = AutoConfig.from_pretrained(path)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # it describes the experts, which transformers does not load
    ALL_EXPERTS_FUNCTIONS.register(NAME, _experts_forward)
    with no_init_weights(), _no_expert_parameters() as experts:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, experts_implementation=NAME)
    names = {module: name for name, module in model.named_modules()}
    for module in experts:
        _check_experts(names[module], module)
        vars(module)["moetier_layer"] = (hybrid or tiers).attach(layer_number(names[module], checkpoint.hidden_layers))
    _load_weights(model, checkpoint)
    model.to(place)  # type: ignore[arg-type]  # torch's stub wants a module there
    if hybrid is not None:
        check_paths(hybrid.layers, hybrid.path, hybrid.streams, settings.identity_check)
        hybrid.measure()
        _tell_of_steps(model, hybrid, max_tokens)
    vars(model)["moetier"] = tiers
    model.eval()
    return model


def _experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """hidden_states [T, hidden] bf16 or float32, index and weights [T, top_k] -> [T, hidden] of the same dtype."""
    layer = self.moetier_layer
    run = run_hybrid_layer if isinstance(layer, HybridLayer) else run_layer
    return run(layer, hidden_states, top_k_index, top_k_weights)


def _device_of(settings: Settings, device: str | torch.device) -> torch.device:
    place = torch.device(device)
    if settings.slots and place.type != "cuda":
        raise SettingsError(f"slots {settings.slots}: expected a CUDA device, found {place}; say device='cuda'")
    if settings.slots == AUTO:
        raise SettingsError("slots auto: only a server knows its KV cache; give slots as a number or a share")
    if settings.slots:
        if place.index is not None:
            torch.cuda.set_device(place)  # where kernels are launched
        return torch.device("cuda", torch.cuda.current_device())
    return place


def _with_slots(tiers: TieredModel, layers: int, max_tokens: int, device: torch.device) -> HybridModel:
    settings, experts = tiers.settings, tiers.part.geometry.experts
    plan = SlotPlan.of(settings, layers, settings.slots_of(experts) or 0, experts)
    hybrid = HybridModel(tiers, plan, max_tokens, device, settings.patience_seconds)
    tiers.at_close(hybrid.close)
    return hybrid


def _tell_of_steps(model: PreTrainedModel, hybrid: HybridModel, max_tokens: int) -> None:
    """Every forward is a step, and every token of it is real: transformers pads nothing by itself."""

    def after(_: Any, arguments: tuple[Any, ...], named: dict[str, Any], __: Any) -> None:
        ids = arguments[0] if arguments else named.get("input_ids")
        hybrid.after_step(UNKNOWN if ids is None else Step(ids.shape[0], prefill=ids.shape[1] > 1))

    model.register_forward_pre_hook(lambda *_: hybrid.before_step(Launch.plain(max_tokens)))
    model.register_forward_hook(after, with_kwargs=True)


@contextmanager
def _no_expert_parameters() -> Iterator[list[nn.Module]]:
    """Modules built meanwhile get no memory for experts' weights, which are 3-D parameters [experts, rows, k].

    Yields the list of those modules, filled as they are built.
    """
    modules: list[nn.Module] = []

    def replace(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if parameter is None or parameter.ndim != 3 or not hasattr(module, "num_experts"):
            return None
        if module not in modules:
            modules.append(module)
        return nn.Parameter(torch.empty(0, device="meta"), requires_grad=False)

    handle = register_module_parameter_registration_hook(replace)  # type: ignore[arg-type]  # torch's stub forgets the result
    try:
        yield modules
    finally:
        handle.remove()
    for module in modules:
        for name, _ in list(module.named_parameters(recurse=False)):
            delattr(module, name)


def _check_plain(checkpoint: Checkpoint) -> None:
    for name, tensor in checkpoint.tensors.items():
        if not is_expert_tensor(name) and tensor.dtype not in PLAIN:
            raise UnsupportedModelError(
                f"{tensor} is {tensor.dtype}: expected its other layers in one of {', '.join(PLAIN)}; "
                "serve this checkpoint with vLLM (`moetier serve`)"
            )


def _check_experts(name: str, module: Any) -> None:
    activation = type(module.act_fn).__name__
    if module.has_bias or not module.has_gate or activation not in ("SiLU", "SiLUActivation"):
        raise UnsupportedModelError(
            f"{name}: expected SwiGLU experts (silu) without biases, found activation {activation}, "
            f"{'a' if module.has_gate else 'no'} gate, {'biases' if module.has_bias else 'no biases'}"
        )


def _load_weights(model: PreTrainedModel, checkpoint: Checkpoint) -> None:
    """Copy everything that is not a routed expert or a drafter's from the checkpoint into the model."""
    wanted = dict(model.state_dict(keep_vars=True))
    for shard in checkpoint.shards.shards:
        with safe_open(shard.path, framework="pt") as file:
            for name in shard.tensors:
                if name in wanted:
                    with torch.no_grad():
                        wanted.pop(name).copy_(file.get_tensor(name))
    model.tie_weights()
    if missing := [name for name in wanted if name not in (model._tied_weights_keys or ())]:
        raise CheckpointError(
            f"{checkpoint.path}: expected tensor {missing[0]} (and {len(missing) - 1} more that {type(model).__name__} "
            "wants), found none of that name; this transformers version spells it otherwise"
        )
