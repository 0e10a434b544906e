"""A checkout whose one recipe is served by a scripted server."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import yaml

from moetier_bench.documents import Library, MachineFile
from moetier_bench.provenance import machine_here
from moetier_bench.server import Served
from tests.bench.scripted import Script, scripted
from tests.conftest import ROOT


def scripted_library(root: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    """Write a checkout with a recipe of the bundled model, and with this machine; the server is scripted."""

    @contextmanager
    def scripted_serving(*_: object) -> Iterator[Served]:
        with scripted(Script(first=0.01, gap=0.002)) as url:
            yield Served(url, psutil.Process(), 0.1)

    monkeypatch.setattr("moetier_bench.run.serving", scripted_serving)
    monkeypatch.setattr("moetier_bench.run.IDLE_SECONDS", 0.1)
    monkeypatch.setattr("moetier_bench.run.COUNTED_SECONDS", 0)
    shutil.copytree(ROOT / "models" / "nano-mxfp4", root / "scripted")
    recipe = Library(ROOT).recipe("nano/dram").model_dump(mode="json")
    machine = MachineFile.model_validate(machine_here("here", "where the tests run")).model_dump(mode="json")
    recipe |= {"params": {}, "model": {**recipe["model"], "folder": "scripted"}}
    documents = {"recipes/nano/dram": recipe, "machines/here": machine}
    for name, document in documents.items():
        path = root / f"{name}.yaml"
        path.parent.mkdir(parents=True)
        path.write_text(yaml.safe_dump(document))
    return Library(root)
