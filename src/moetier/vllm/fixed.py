"""Weights stay as they were loaded: whatever would change them while serving is refused.

The experts come from a store that was compared with the checkpoint at the start. New dense weights beside old experts
would be a model that nobody made. vLLM has many doors to that (`reload_weights`, weight transfer, sleep level 2, each
also over HTTP and `collective_rpc`); all of them go through a worker's method or the model's `load_weights`.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from moetier.errors import UnsupportedModelError


def refuse(what: str, more: str = "") -> NoReturn:
    """Raise the error of everything that would change weights."""
    raise UnsupportedModelError(
        f"{what}: expected the weights that this engine started with, whose experts are in its store; weights are not "
        f"changed while serving: end it, and start one with the new checkpoint and a store of its own{more}"
    )


class FixedWeights:
    """Mixed into vLLM's workers, before them."""

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """Refused."""
        refuse("reload_weights")

    def init_weight_transfer_engine(self, *args: Any, **kwargs: Any) -> None:
        """Refused."""
        refuse("init_weight_transfer_engine")

    def start_weight_update(self, *args: Any, **kwargs: Any) -> None:
        """Refused."""
        refuse("start_weight_update")

    def start_draft_weight_update(self, *args: Any, **kwargs: Any) -> None:
        """Refused."""
        refuse("start_draft_weight_update")

    def update_weights(self, *args: Any, **kwargs: Any) -> None:
        """Refused."""
        refuse("update_weights")

    def finish_weight_update(self, *args: Any, **kwargs: Any) -> None:
        """Refused."""
        refuse("finish_weight_update")

    def update_config(self, overrides: dict[str, Any]) -> None:
        """Refused: it names other weights for the next load."""
        refuse("update_config")

    def sleep(self, level: int = 1) -> None:
        """Level 1 keeps the weights; level 2 drops them, and they would have to be loaded again."""
        if level > 1:
            refuse(f"sleep level {level}", "; level 1 keeps them. The engine is paused now: wake_up resumes it")
        super().sleep(level)  # type: ignore[misc]

    def discard(self, tags: tuple[str, ...]) -> None:
        """Refused for weights."""
        if "weights" in tags:
            refuse("discard of weights")
        super().discard(tags)  # type: ignore[misc]


def load_weights(*args: Any, **kwargs: Any) -> NoReturn:
    """Refused; a function of the module, so that a model which has it can be copied and pickled."""
    refuse("load_weights")


def fix(model: torch.nn.Module) -> None:
    """Refuse every later `load_weights` of a model that is loaded, whichever worker it runs in."""
    vars(model)["load_weights"] = load_weights
