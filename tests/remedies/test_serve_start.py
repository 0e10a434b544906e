"""What the launcher says before vLLM starts, and of a server that ended; done as it says."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moetier.budget import records_that_fit
from moetier.kernels.cpu import ISA_VARIABLE, available_isas
from moetier.launch import drain
from moetier.launch import process as launcher
from moetier.launch.arguments import context_of, launch_of
from moetier.launch.command import ServeRequest, arguments, tensor_parallel_size
from moetier.launch.derive import graph_sizes
from moetier.launch.refused import check_arguments
from moetier.settings import Settings
from moetier.store.build import build_store
from moetier.store.store import Store
from moetier.vllm.agreement import Facts
from moetier.vllm_arguments import drafting_of
from tests.conftest import ROOT
from tests.remedies.commands import moetier
from tests.remedies.trouble import Trouble
from tests.serve.test_agreement import together
from tests.store.checkpoints import write_checkpoint

remedy = pytest.mark.remedy
BATCHED, SEQUENCES, DRAFTER = "--max-num-batched-tokens", "--max-num-seqs", '{"method": "dspark"%s}'


def request(*extra: str, **fields: Any) -> ServeRequest:
    settings = fields.pop("settings", {})
    return ServeRequest(Path("/m"), Settings.parse({"store": "/s", **settings}), extra=extra, **fields)


@remedy("launch/command.py", "expected a number of ranks")
def test_a_number_of_ranks(trouble: Trouble) -> None:
    with trouble:
        tensor_parallel_size(("--tensor-parallel-size", "all"))
    assert tensor_parallel_size(("--tensor-parallel-size", "2")) == 2
    trouble.gone()


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        pytest.param(
            ("--pipeline-parallel-size", "2"),
            ("--pipeline-parallel-size", "1", "--tensor-parallel-size", "2"),
            marks=remedy("launch/refused.py", "pipeline parallelism is not served"),
            id="pipeline",
        ),
        pytest.param(
            ("--weight-transfer-config", "{}"),
            (),
            marks=remedy("launch/refused.py", "weights are not changed while serving"),
            id="transfer",
        ),
    ],
)
def test_an_option_that_is_not_served(
    trouble: Trouble, wrong: tuple[str, ...], right: tuple[str, ...], nano: Path, tmp_path: Path
) -> None:
    with trouble:
        moetier("serve", nano, "--store", tmp_path, "--dram-records", "1", "--", *wrong)
    check_arguments(right)
    trouble.gone()


@pytest.mark.parametrize("other", [{"seed": 1}, {"threads": 2}], ids=["store", "settings"])
@remedy("vllm/agreement.py", "Give every rank the same")
def test_ranks_serve_the_same(trouble: Trouble, other: dict[str, int], tmp_path: Path) -> None:
    def rank(name: str, threads: int = 1, seed: int = 0) -> Callable[[], tuple[Facts, int]]:
        build_store(write_checkpoint(tmp_path / f"model-{name}", seed=seed).path, tmp_path / name)
        with Store.open(tmp_path / name) as store:
            facts = Facts.of(Settings(store=tmp_path / name, threads=threads), store, 2)
        return lambda: (facts, 4)

    for result in together(rank("first"), rank("other", **other)):
        trouble.said(str(result))
    assert together(rank("first"), rank("second")) == [4, 4]
    trouble.gone()


@remedy("launch/derive.py", "set the drafter's tokens")
def test_a_block_drafter_has_tokens(trouble: Trouble) -> None:
    with trouble:
        graph_sizes(4, 0, block_draft=True)
    drafting = drafting_of(("--speculative-config", DRAFTER % ', "num_speculative_tokens": 2'))
    assert drafting.block
    assert graph_sizes(4, drafting.tokens, drafting.block)[-1] == 12
    trouble.gone()


@pytest.mark.parametrize("raised", [True, False], ids=["more-tokens", "fewer-sequences"])
@remedy("launch/derive.py", "raise --max-num-batched-tokens")
def test_room_for_the_drafter(trouble: Trouble, raised: bool) -> None:
    drafter = ("--speculative-config", DRAFTER % ', "num_speculative_tokens": 3')
    given = (*drafter, SEQUENCES, "32", BATCHED, "64")
    with trouble:
        launch_of(request(*given), None, "0.32.0", True)
    least = trouble.text.partition("to at least ")[2].split()[0].replace(",", "")
    right = (*drafter, SEQUENCES, "32", BATCHED, least) if raised else (*drafter, SEQUENCES, "16", BATCHED, "64")
    assert launch_of(request(*right), None, "0.32.0", True).drafter > 0
    trouble.gone()


@remedy("launch/arguments.py", "both say how long the context is")
def test_one_says_how_long_the_context_is(trouble: Trouble) -> None:
    with trouble:
        context_of(("--max-model-len", "1024"), 4096, 512)
    assert context_of(("--max-model-len", "1024"), 4096, None) == 1024
    assert context_of((), 4096, 512) == 4096 - 512
    trouble.gone()


@remedy("launch/process.py", "vLLM is not installed in this environment")
def test_vllm_is_installed(trouble: Trouble, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A package that pip puts there is all that is asked for; `make setup` is what brings it here."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with trouble:
        launcher.vllm_distribution()
    about = tmp_path / "vllm-0.32.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
    assert launcher.vllm_distribution() == ("vllm", "0.32.0")
    assert "\nsetup:" in (ROOT / "Makefile").read_text()
    trouble.gone()


@remedy("launch/process.py", "(--log-file FILE keeps it)")
def test_a_log_that_is_gone(trouble: Trouble, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("its last words")
    trouble.said(str(launcher._ended_by_itself(request(log_file=log, log_kept=False), False, 1, False)))
    assert f"its log is {log}" in str(launcher._ended_by_itself(request(log_file=log), False, 1, False))
    trouble.gone()


def _drained(folder: Path, drain_seconds: int, seconds: float) -> Exception | None:
    """A server's frontend with one request that takes so long; what the launcher says of its drain."""
    from moetier.vllm.draining import Draining

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(60 if scope["type"] == "lifespan" else seconds)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})

    async def nothing(*_: Any) -> Any:
        await asyncio.sleep(60)

    async def sent(message: Any) -> None:
        assert message["type"].startswith("http.response")

    async def both() -> Exception | None:
        layer = Draining(application)
        watch = asyncio.ensure_future(layer({"type": "lifespan"}, nothing, nothing))
        open_request = asyncio.ensure_future(layer({"type": "http", "path": "/v1/x"}, nothing, sent))
        while not drain.reports(folder) or not layer.requests:
            await asyncio.sleep(0.01)
        serve: Any = (SimpleNamespace(poll=lambda: None), SimpleNamespace(replace_if_dead=lambda: None))
        asked = request(scratch=folder, drain_seconds=drain_seconds)
        said = await asyncio.to_thread(launcher._drain, asked, *serve, [time.time()])
        await open_request
        watch.cancel()
        return said

    return asyncio.run(both())


@remedy("launch/process.py", "give more --drain-seconds")
def test_more_seconds_to_drain(trouble: Trouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    monkeypatch.setenv(drain.FOLDER_VARIABLE, str(tmp_path))
    drain.prepare(tmp_path)
    trouble.said(str(_drained(tmp_path, 1, 30)))
    drain.prepare(tmp_path)
    assert _drained(tmp_path, 600, 0.3) is None
    trouble.gone()


def _ended(script: str, *asked: str, log: Path | None = None, **fields: Any) -> str:
    """What is said of a server that ended as this shell script does; "" where that was with 0."""
    code = subprocess.run(["sh", "-c", script, "sh", *asked], check=False, timeout=120).returncode
    return str(launcher._ended_by_itself(request(log_file=log, **fields), False, code, False)) if code else ""


GROWS = 'ulimit -f {}; exec dd if=/dev/zero of="$1" bs=1024 count=1024 status=none'
COUNTS = "ulimit -S -t {}; i=0; while [ $i -lt 400000 ]; do i=$((i+1)); done; [ {} != 1 ] || while :; do :; done"


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(GROWS, marks=remedy("launch/reason.py", "ulimit -f unlimited"), id="file"),
        pytest.param(COUNTS, marks=remedy("launch/reason.py", "ulimit -t unlimited"), id="cpu"),
    ],
)
def test_a_limit_is_raised(trouble: Trouble, script: str, tmp_path: Path) -> None:
    trouble.said(_ended(script.format(*(1, 1)), str(tmp_path / "file")))
    assert _ended(script.format(*("unlimited", 0)), str(tmp_path / "file")) == ""
    trouble.gone()


@remedy("launch/reason.py", "set MOETIER_ISA lower")
def test_a_lower_instruction_set(trouble: Trouble, monkeypatch: pytest.MonkeyPatch) -> None:
    trouble.said(_ended("kill -ILL $$"))
    listed = next(line for line in moetier("version").splitlines() if line.startswith("isas"))
    best, *_, lowest = listed.removeprefix("isas").replace(" ", "").split(",")
    monkeypatch.setenv(ISA_VARIABLE, lowest)
    assert available_isas() == (lowest,)
    assert lowest == "portable" or best == lowest
    trouble.gone()


@remedy("launch/reason.py", "report it with the log")
def test_the_log_for_a_report(trouble: Trouble, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("its last words")
    trouble.said(_ended("kill -SEGV $$", log=log))
    path = trouble.text.partition("its log is ")[2].partition(",")[0]
    assert Path(path).read_text() == "its last words"
    trouble.gone()


@pytest.mark.parametrize("lower", ["records", "kv-cache"])
@remedy("launch/reason.py", "lower --dram-records or --kv-cache-gib")
def test_a_server_that_takes_less_memory(trouble: Trouble, lower: str, tmp_path: Path) -> None:
    trouble.said(_ended("kill -KILL $$"))
    taken: Callable[[float], int]
    if lower == "records":
        build_store(write_checkpoint(tmp_path / "model").path, tmp_path / "store")

        def taken(share: float) -> int:
            settings = Settings(store=tmp_path / "store", dram_records=f"{100 * share:.0f}%")
            with Store.open(tmp_path / "store") as store:
                return records_that_fit(settings, store, 2)
    else:

        def taken(share: float) -> int:
            line = arguments(request(kv_cache_gib=4 * share), on_cpu=True)
            return int(line[line.index("--kv-cache-memory-bytes") + 1])

    assert taken(0.5) == taken(1.0) / 2
    trouble.gone()
