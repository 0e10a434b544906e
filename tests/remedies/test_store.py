"""What the store's messages tell their reader to do, done."""

from __future__ import annotations

from pathlib import Path

import pytest

from moetier.store.build import build_store
from moetier.store.store import Store
from tests.remedies.trouble import Trouble
from tests.store.checkpoints import write_checkpoint

remedy = pytest.mark.remedy


@remedy("store/manifest.py", "is no store")
def test_no_store_is_built(trouble: Trouble, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model")
    (tmp_path / "store").mkdir()
    with trouble:
        Store.open(tmp_path / "store")
    build_store(tmp_path / "model", tmp_path / "store")
    Store.open(tmp_path / "store").close()
    trouble.gone()
