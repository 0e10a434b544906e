"""What `moetier eval` says of servers, sets and result files; done as it says, and the sets are asked."""

from __future__ import annotations

import http.server
import importlib.metadata
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from moetier_bench.eval.compare import compare
from moetier_bench.eval.items import Item
from moetier_bench.eval.quality_log import ResultLog
from moetier_bench.eval.report import Report, Result
from tests.remedies.commands import moetier
from tests.remedies.trouble import Trouble

pytest.importorskip("openai", reason="moetier eval asks with the openai package")

remedy = pytest.mark.remedy
QUESTION = {"id": 0, "messages": [{"role": "user", "content": "Say a"}], "enable_thinking": False}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
NO_PARSER = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
"""vLLM's own words."""


@dataclass(frozen=True)
class Served:
    """How the API answers: names of its models, and the options that the server was started with."""

    models: tuple[str, ...] = ("m",)
    options: tuple[str, ...] = ()

    def answer(self, asked: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """A chat completion; tools want a parser, as with vLLM."""
        if asked.get("tools") and not {"--enable-auto-tool-choice", "--tool-call-parser"} <= set(self.options):
            return 400, {"error": {"message": NO_PARSER, "type": "BadRequestError", "code": 400}}
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        message = {"role": "assistant", "content": "a", "tool_calls": [call] if asked.get("tools") else None}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        return 200, {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}


@contextmanager
def serving(served: Served, port: int = 0) -> Iterator[str]:
    """The address of an API that answers so."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            models = [{"id": name, "object": "model", "created": 0, "owned_by": "x"} for name in served.models]
            self._send(200, {"object": "list", "data": models})

        def do_POST(self) -> None:
            self._send(*served.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"])))))

        def _send(self, status: int, values: dict[str, Any]) -> None:
            body = json.dumps(values).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def sets(tmp_path: Path) -> Path:
    """A set of texts and one of tools."""
    folder = tmp_path / "sets"
    folder.mkdir()
    (folder / "copy.jsonl").write_text(json.dumps({**QUESTION, "expected": "a"}) + "\n")
    call = {"expected_call": {"name": "f", "arguments": {}}, "tools": [TOOL]}
    (folder / "tools.jsonl").write_text(json.dumps({**QUESTION, **call}) + "\n")
    return folder


@pytest.mark.parametrize("parsers", [True, False], ids=["parsers", "no-tools"])
@remedy("moetier_bench/eval/ask.py", "start the server with the model's parsers")
def test_tools_want_a_parser(trouble: Trouble, sets: Path, parsers: bool) -> None:
    with serving(Served()) as url, trouble:
        moetier("eval", "--url", url, "--sets", sets)
    told = trouble.text.partition("-- --")[2].partition(",")[0]
    with serving(Served(options=tuple(f"--{told}".split()) if parsers else ())) as url:
        done = moetier("eval", "--url", url, "--sets", sets, *(() if parsers else ("--task", "copy")), "--json")
    assert all(task["score"] == 1 for task in json.loads(done[done.index("{") :])["tasks"])
    trouble.gone()


def test_the_parsers_options_are_vllms() -> None:
    from moetier_bench.eval.ask import PARSERS
    from tests.serve.server import PARSERS as GIVEN

    assert " ".join(GIVEN) in PARSERS, "tests/serve asks a server with these"


@remedy("moetier_bench/eval/ask.py", "name one with --model")
def test_one_of_two_models(trouble: Trouble, sets: Path) -> None:
    with serving(Served(models=("m", "n"))) as url:
        with trouble:
            moetier("eval", "--url", url, "--sets", sets, "--task", "copy")
        moetier("eval", "--url", url, "--sets", sets, "--task", "copy", "--model", "n")
    trouble.gone()


@remedy("moetier_bench/eval/ask.py", "pip install 'moetier[eval]'")
def test_the_package_of_the_extra(trouble: Trouble, sets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(Served()) as url:
        with monkeypatch.context() as without, trouble:
            without.setitem(sys.modules, "openai", None)
            moetier("eval", "--url", url, "--sets", sets, "--task", "copy")
        wanted = map(Requirement, importlib.metadata.requires("moetier") or ())
        extra = {one.name for one in wanted if one.marker is not None and one.marker.evaluate({"extra": "eval"})}
        assert "openai" in extra
        moetier("eval", "--url", url, "--sets", sets, "--task", "copy")
    trouble.gone()


@pytest.mark.parametrize("started", [True, False], ids=["started", "its-address"])
@remedy("moetier_bench/eval/ask.py", "start the server, or give its address with --url")
def test_a_server_that_runs(trouble: Trouble, sets: Path, started: bool) -> None:
    with serving(Served()) as url:
        free = url  # once it has ended, nobody listens there
    with trouble:
        moetier("eval", "--url", free, "--sets", sets, "--task", "copy")
    with serving(Served(), int(free.split(":")[2].split("/")[0]) if started else 0) as url:
        moetier("eval", "--url", free if started else url, "--sets", sets, "--task", "copy")
    trouble.gone()


@remedy("moetier_bench/eval/items.py", "name their folder with --sets")
def test_a_folder_of_sets(trouble: Trouble, sets: Path, tmp_path: Path) -> None:
    with serving(Served()) as url:
        with trouble:
            moetier("eval", "--url", url, "--sets", tmp_path)
        moetier("eval", "--url", url, "--sets", sets, "--task", "copy")
    trouble.gone()


@remedy("moetier_bench/eval/report.py", "name another file with --out")
def test_results_in_another_file(trouble: Trouble, sets: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with serving(Served()) as url:
        ask = ("eval", "--url", url, "--sets", sets, "--task", "copy", "--out")
        with trouble:
            moetier(*ask, tmp_path / "file" / "out.json")
        moetier(*ask, tmp_path / "out.json")
    assert Report.load(tmp_path / "out.json").results[0].correct
    trouble.gone()


@remedy("moetier_bench/eval/report.py", "make one with `moetier eval --out FILE`")
def test_what_is_no_result_file(trouble: Trouble, sets: Path, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    with trouble:
        moetier("eval", "compare", tmp_path / "x.json", tmp_path / "x.json")
    with serving(Served()) as url:
        moetier("eval", "--url", url, "--sets", sets, "--task", "copy", "--out", tmp_path / "x.json")
    moetier("eval", "compare", tmp_path / "x.json", tmp_path / "x.json")
    trouble.gone()


RESULT = Result("copy", 0, "digest", False, correct=True)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(
            replace(RESULT, task="json"), marks=remedy("moetier_bench/eval/compare.py", "have no item in common")
        ),
        pytest.param(
            replace(RESULT, digest="another"), marks=remedy("moetier_bench/eval/compare.py", "is another question")
        ),
    ],
)
def test_two_evaluations_of_the_same_sets(trouble: Trouble, other: Result) -> None:
    with trouble:
        compare(Report({}, (RESULT,)), Report({}, (other,)))
    assert compare(Report({}, (RESULT,)), Report({}, (RESULT,))).unpaired == 0
    trouble.gone()


ITEM = Item("copy", 0, ({"role": "user", "content": "Say a"},), False, "a")
RIGHT = replace(RESULT, digest=ITEM.digest)


def _evaluate(path: Path) -> None:
    """Go on with an evaluation of model m, to its end."""
    log = ResultLog(path, {"model": "m"})
    if not log.has(ITEM):
        log.add(RIGHT)
    assert ResultLog(path, {"model": "m"}).results == [RIGHT]


def _add(path: Path, *results: Result, model: str = "m") -> None:
    logs = [ResultLog(path, {"model": model}) for _ in results]
    for log, result in zip(logs, results, strict=True):
        log.add(result)


def _without_a_line(path: Path) -> Path:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    return path


def _removed(path: Path) -> Path:
    path.unlink()
    return path


@pytest.mark.parametrize(
    ("damage", "cure"),
    [
        pytest.param(
            lambda path: _add(path, RIGHT, model="another"),
            lambda path: path.with_name("another"),
            marks=remedy("moetier_bench/eval/quality_log.py", "name another file"),
        ),
        pytest.param(
            lambda path: _add(path, RIGHT, RIGHT),
            _without_a_line,
            marks=remedy("moetier_bench/eval/quality_log.py", "remove one of its lines"),
        ),
        pytest.param(
            lambda path: path.write_text("hello\n"),
            _removed,
            marks=remedy("moetier_bench/eval/quality_log.py", "expected results of a quality evaluation"),
        ),
        pytest.param(
            lambda path: _add(path, RESULT),
            _removed,
            marks=remedy("moetier_bench/eval/quality_log.py", "was another question"),
        ),
    ],
)
def test_a_log_goes_on(
    trouble: Trouble, tmp_path: Path, damage: Callable[[Path], object], cure: Callable[[Path], Path]
) -> None:
    path = tmp_path / "log"
    damage(path)
    with trouble:
        _evaluate(path)
    _evaluate(cure(path))
    trouble.gone()
