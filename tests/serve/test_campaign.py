"""Forced ends of real servers under load: no stream hangs, no process, file, port or shared memory is left.

MOETIER_CAMPAIGN_COUNT=200 MOETIER_CAMPAIGN_SEED=1 pytest -m campaign tests/serve/test_campaign.py -s
"""

from __future__ import annotations

import collections
import os
import random
import tempfile
from pathlib import Path

import pytest

from moetier.launch.scratch import sweep
from moetier.store.build import build_store
from tests.serve.campaign import Round, left_by_all

pytest.importorskip("vllm", reason="vLLM is not installed")

COUNT = int(os.environ.get("MOETIER_CAMPAIGN_COUNT", "10"))
SEED = int(os.environ.get("MOETIER_CAMPAIGN_SEED", "0"))


@pytest.mark.campaign
def test_forced_ends(nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every round draws what ends the server, and when. A full disk wants root, to mount a small one."""
    with tempfile.TemporaryDirectory() as short:  # for sockets, which pytest's names are too long for
        monkeypatch.setenv("TMPDIR", short)
        build_store(nano, tmp_path / "store")
        _run(nano, tmp_path, Path(short))


def _run(nano: Path, tmp_path: Path, temporary: Path) -> None:
    lot = random.Random(SEED)
    failed, kinds = [], collections.Counter[str]()
    for number in range(COUNT):
        drawn = Round.draw(lot)
        folder = tmp_path / str(number)
        folder.mkdir()
        try:
            wrong = drawn.run(nano, tmp_path / "store", folder)
        except AssertionError as error:
            wrong = [str(error)[:2000]]
        kinds[f"{drawn.moment}, {drawn.event}"] += 1
        print(f"{number} {drawn}: {'; '.join(wrong) or 'well'}", flush=True)
        failed += [f"{number} {drawn}: {what}" for what in wrong]
    sweep([temporary])
    failed += left_by_all(temporary)
    print(f"{COUNT} forced ends, seed {SEED}, {len(failed)} faults; {dict(kinds)}")
    assert not failed, "\n".join(failed)
