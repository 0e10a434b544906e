"""What benchmarks/serve/steps.py reads in a log of steps, as vLLM writes one on a CPU and on a GPU."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PATH = Path(__file__).parents[2] / "benchmarks" / "serve" / "steps.py"
STREAM, LONG = {"short-0": 1}, {"short-0": 1, "long": 3900}


@pytest.fixture(scope="module")
def steps() -> ModuleType:
    spec = importlib.util.spec_from_file_location("steps_of_fairness", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # a dataclass looks its module up
    spec.loader.exec_module(module)
    return module


def read(steps: ModuleType, folder: Path, *lines: tuple[float, float, dict[str, int]]) -> Any:
    log = folder / "log"
    log.write_text("".join(json.dumps({"begin": b, "end": e, "tokens": t}) + "\n" for b, e, t in lines))
    return steps.read(log, 0)


def test_one_step_after_the_other(steps: ModuleType, tmp_path: Path) -> None:
    """The stream waits as long as the step that holds the prompt takes, and the gap before the next token."""
    log = read(steps, tmp_path, (0, 4, STREAM), (5, 9, STREAM), (10, 46, LONG), (47, 51, STREAM), (52, 56, STREAM))
    held = steps.entering(log, "long")
    assert [step.seconds for step in held] == [36]
    assert steps.gaps(log, held, "short") == [46 - 9]
    assert steps.most_between(log, "long", "short") == 1


def test_a_step_that_is_scheduled_ahead(steps: ModuleType, tmp_path: Path) -> None:
    """While the prompt's step is launched, the tokens of the step before lie there: that is a gap of the stream too."""
    log = read(steps, tmp_path, (0, 4, STREAM), (3, 8, STREAM), (7, 43, STREAM), (11, 46, LONG), (44, 50, STREAM))
    held = steps.entering(log, "long")
    assert [step.seconds for step in held] == [35]
    assert steps.gaps(log, held, "short") == [43 - 8, 46 - 43]


def test_without_the_prompt_there_is_no_gap_of_it(steps: ModuleType, tmp_path: Path) -> None:
    log = read(steps, tmp_path, (0, 4, STREAM), (5, 9, STREAM))
    assert steps.gaps(log, steps.entering(log, "long"), "short") == []
    assert steps.gaps(log, log, "short") == [5]
