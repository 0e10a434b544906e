"""Where tests find models and evaluation sets."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parent.parent
LONGEST = ROOT / "tests" / "serve"


def pytest_configure() -> None:
    """A shell's background job has Ctrl-C ignored; tests that raise it, and the commands that they start, are none.

    An example that takes long is no failure.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    slow = hypothesis.HealthCheck.too_slow
    hypothesis.settings.register_profile("any machine", deadline=None, suppress_health_check=[slow])
    hypothesis.settings.load_profile("any machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take minutes go first, so that workers that share the tests end at about the same time."""
    items.sort(key=lambda item: not item.path.is_relative_to(LONGEST))


@pytest.fixture(scope="session")
def nano() -> Path:
    """The bundled checkpoint, models/nano-mxfp4. Never written to: a test that damages files copies them first."""
    return ROOT / "models" / "nano-mxfp4"


@pytest.fixture(scope="session")
def shared_models() -> Path:
    """The folder of what is not distributed (base-mxfp4, nano-bf16, eval/needle, eval/heldout_text); else a skip."""
    path = Path(os.environ.get("MOETIER_SHARED_MODELS") or ROOT.parent / "shared" / "models")
    if not path.is_dir():
        pytest.skip(f"wants models that are not distributed: no folder {path} (set MOETIER_SHARED_MODELS)")
    return path


@pytest.fixture(scope="session")
def eval_set(request: pytest.FixtureRequest) -> Callable[[str], list[dict[str, Any]]]:
    """`eval_set(name)` gives the items of a set; one that is not bundled comes from `shared_models`, else skips."""

    def items(name: str) -> list[dict[str, Any]]:
        path = ROOT / "models" / "eval" / f"{name}.jsonl"
        if not path.is_file():
            shared: Path = request.getfixturevalue("shared_models")
            path = shared / "eval" / f"{name}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    return items
