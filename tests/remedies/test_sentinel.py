"""Do what the sentinel advises: a core that computes wrongly is left out."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from moetier.settings import Settings
from moetier.store.build import build_store
from tests.remedies.trouble import Trouble
from tests.sentinel.test_watch import EXPERTS, Faulty, Served
from tests.store.checkpoints import write_checkpoint


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU")
@pytest.mark.remedy("sentinel/watch.py", "serve without it")
def test_a_core_that_computes_wrongly_is_left_out(
    trouble: Trouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = write_checkpoint(tmp_path / "model", experts=EXPERTS, hidden=96, intermediate=64, top_k=3)
    build_store(made.path, tmp_path / "store")
    bad = max(os.sched_getaffinity(0))

    def on_it() -> bool:
        return os.sched_getaffinity(threading.get_native_id()) == {bad}

    def serve(**settings: Any) -> bool:
        """Serve on CPUs of which one computes wrongly, until 20 calls were checked; whether one was wrong."""
        served = Served(tmp_path / "store", EXPERTS, **settings)
        make, isa = served.model.make_kernel, served.model.kernel.isa
        monkeypatch.setattr(
            served.model, "make_kernel", lambda i, p, t: Faulty(make(i, p, t), on_it) if i == isa else make(i, p, t)
        )
        if bad in served.model.pool.cpus:
            for layer in served.layers:
                layer._kernel = Faulty(layer._kernel)  # type: ignore[assignment]
        checks = served.model.checks
        thread = threading.Thread(target=served.until, args=(lambda: checks.wrong_calls or checks.calls >= 20,))
        thread.start()  # it keeps to the CPUs that it looks at
        thread.join()
        served.close()
        return checks.wrong_calls > 0

    assert serve()
    trouble.said(caplog.text)
    advised = re.search(r"--set cpus=([\d,]+)`", trouble.text)
    assert advised is not None
    assert not serve(cpus=Settings.parse({"store": tmp_path, "cpus": advised[1]}).cpus)
    trouble.gone()
