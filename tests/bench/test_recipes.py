"""A recipe run as a user asks for it, against a server whose timing is known: what was measured is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from moetier_bench import BenchError
from moetier_bench.documents import Library, Suite
from moetier_bench.probes import Coding
from moetier_bench.provenance import code_of
from moetier_bench.recipes import run_recipe
from moetier_bench.result import listed, name_of
from tests.bench.checkouts import scripted_library

NAMES = ("waits", "second", "third")


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    """A checkout with a recipe of the bundled model, and with this machine; the server is scripted."""
    return scripted_library(tmp_path, monkeypatch)


def suites() -> list[Suite]:
    """The result of the first waits for the server's end."""
    probes = (Coding(max_tokens=16, repeats=1),)
    return [Suite(id=name, summary="for tests", check_at_end=name == "waits", probes=probes) for name in NAMES]


@pytest.mark.parametrize("lost", [(), ("second",), ("waits", "third")], ids=str)
def test_a_result_that_cannot_be_written_loses_no_other(
    library: Library, tmp_path: Path, lost: tuple[str, ...]
) -> None:
    out, said, here = tmp_path / "out", [], library.machine("here")
    code, recipe = code_of(library.root), library.recipe("nano/dram")

    def say(text: str) -> None:  # another run writes results of these names while this one measures
        said.append(text)
        for suite in suites():
            path = out / name_of(here, recipe, suite, code)
            path.parent.mkdir(parents=True, exist_ok=True)
            if suite.id in lost:
                path.write_text("another run's")

    written, missing = [], ""
    try:
        for _, result in run_recipe(library, recipe, suites(), out, say, machine="here", allow_dirty=True):
            written.append(result.suite.id)
    except BenchError as error:
        missing = str(error)
    assert sorted(written) == sorted(set(NAMES) - set(lost))
    assert sorted(name.split("__")[2] for name in listed(out)) == sorted(written)
    assert {name for name in NAMES if f"__{name}__" in missing} == set(lost)
    assert sum("a result is never overwritten" in text for text in said) == len(lost)
