"""What files, names and servers say reaches a terminal as text: no control character, nothing that reorders."""

from __future__ import annotations

import json
import logging
import os
import pty
import subprocess
import sys
import threading
import unicodedata
from collections.abc import Callable
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from moetier.errors import MoetierError
from moetier.tiers.step import Step
from moetier.trace.record import TracedCall, TraceHeader, write_trace
from moetier.visible import LONGEST_LINE, VisibleRecords, bounded, visible
from tests.store.checkpoints import write_safetensors

TITLE, RED, CSI, BACK, BIDI, LINK = (
    "\x1b]0;PWNED\x07",
    "\x1b[31m",
    "\x9b31m",
    "a\rb\x08c",
    "\u202egnp.exe\u2066",
    "\u2028x",
)
HOSTILE = TITLE + RED + CSI + BACK + BIDI + LINK + "\x00\x7f"
SEEN = "PWNED"


def unseen(text: str) -> set[str]:
    """Characters of it that a terminal would act on, or not show."""
    return {c for c in text if c not in "\n\t" and unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp", "Cs")}


def run(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "moetier", *map(str, arguments)], cwd=cwd, capture_output=True, check=False
    )


def test_every_control_character_becomes_text_and_the_rest_stays() -> None:
    for code in (*range(0x300), 0x61C, *range(0x2000, 0x2070), 0xFEFF, 0xDC80, 0xE0041):
        assert not unseen(visible(chr(code)))
    plain = "héllo, wörld\t\n中文 ✓ 🙂 [/red] \\x1b"
    assert visible(plain) == plain
    assert visible("\x1b\x9b\u202e\udcff\U000e0041") == r"\x1b\u009b\u202e\udcff\udb40\udc41"


def test_json_stays_json() -> None:
    text = json.dumps({"a": HOSTILE.replace("\x00", "")}, ensure_ascii=False)
    assert json.loads(visible(text)) == json.loads(text)


def test_an_error_shows_neither_control_characters_nor_secrets_nor_megabytes() -> None:
    said = str(MoetierError(f"{HOSTILE} https://me:secret@hub.test/x hf_{'a' * 30} {'n' * 10**7}: do this"))
    assert not unseen(said)
    assert "secret" not in said
    assert "hf_aaa" not in said
    assert len(said) < LONGEST_LINE + 100
    assert said.endswith(": do this")
    assert bounded("short") == "short"
    assert len(bounded("line\n" * 10**6)) < 100_000


def test_our_log_records_are_visible_and_those_of_others_as_they_are() -> None:
    for name, changed in (
        ("vllm.moetier.serve.vllm.loader", True),
        ("moetier.store.heal", True),
        ("vllm.engine", False),
    ):
        record = logging.LogRecord(name, logging.INFO, "", 0, "read %s", (HOSTILE,), None)
        assert VisibleRecords().filter(record)
        assert bool(unseen(record.getMessage())) != changed


def tensor_name(folder: Path) -> list[str | Path]:
    (folder / "config.json").write_text('{"model_type": "x", "num_hidden_layers": 1, "num_experts": 4}')
    write_safetensors(
        folder / "model.safetensors", {f"layers.0.experts.0.{HOSTILE}": ("U8", (4,), np.zeros(4, np.uint8))}
    )
    return ["store", "build", folder, folder / "s"]


def model_type(folder: Path) -> list[str | Path]:
    (folder / "config.json").write_text(json.dumps({"model_type": HOSTILE, "num_hidden_layers": 1}))
    write_safetensors(folder / "model.safetensors", {"a": ("U8", (4,), np.zeros(4, np.uint8))})
    return ["plan", folder]


def index_text(folder: Path) -> list[str | Path]:
    model_type(folder)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {HOSTILE: HOSTILE + ".safetensors"}})
    )
    return ["store", "build", folder, folder / "s"]


def file_name(folder: Path) -> list[str | Path]:
    name = HOSTILE.replace("\x00", "")
    (folder / name).mkdir()
    return ["store", "info", folder / name]


def dtype(folder: Path) -> list[str | Path]:
    model_type(folder)
    header = json.dumps({f"a{HOSTILE}": {"dtype": HOSTILE, "shape": [4], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    return ["store", "build", folder, folder / "s"]


def trace_file(folder: Path) -> list[str | Path]:
    call = TracedCall(0, Step(1, False), np.zeros((1, 2), np.int32) + np.arange(2, dtype=np.int32))
    name = f"trace{RED}{BIDI}"
    write_trace(folder / name, TraceHeader(1, 4, 2, "c3" * 32), [call])
    (folder / name).write_bytes((folder / name).read_bytes().replace(b"\xc3" * 8, HOSTILE.encode()[:8]))
    return ["trace", "info", folder / name]


def gpu_name(folder: Path) -> list[str | Path]:
    gpu = {"index": 0, "name": HOSTILE, "total_bytes": HOSTILE}
    (folder / "machine.json").write_text(json.dumps({"schema_version": 1, "identity": HOSTILE, "gpus": [gpu]}))
    return ["plan", "qwen3-235b", "--machine", folder / "machine.json"]


def task_name(folder: Path) -> list[str | Path]:
    item = {"task": HOSTILE + "[link=http://x]", "id": HOSTILE, "thinking": False, "correct": True}
    for name, right in (("a", True), ("b", False)):
        report = {"about": {"model": HOSTILE, "url": HOSTILE, "seconds": 1.0}, "items": [{**item, "correct": right}]}
        (folder / name).write_text(json.dumps(report))
    return ["eval", "compare", folder / "a", folder / "b"]


def result_file(folder: Path) -> list[str | Path]:
    (folder / "r.json").write_text(json.dumps({"format": HOSTILE, HOSTILE: HOSTILE}))
    return ["bench", "check", folder / "r.json"]


@pytest.mark.parametrize(
    "made", [tensor_name, model_type, index_text, file_name, dtype, trace_file, gpu_name, task_name, result_file]
)
def test_no_verb_shows_what_a_file_says_as_it_is(made: Callable[[Path], list[str | Path]], tmp_path: Path) -> None:
    done = run(*made(tmp_path), cwd=tmp_path)
    for stream in (done.stdout, done.stderr):
        assert not unseen(stream.decode()), ascii(stream.decode())
    assert b"Traceback" not in done.stderr
    if made in (tensor_name, file_name):
        assert SEEN in (done.stdout + done.stderr).decode(), "the name is shown, as text"


@contextmanager
def answering(body: bytes) -> object:
    """A server all of whose answers are errors with this text."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
            pass

        def do_GET(self) -> None:
            self.send_response(400, "Bad" + RED)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize("named", [[], ["--model", "m"]], ids=["list-of-models", "completion"])
def test_no_verb_shows_what_a_server_says_as_it_is(named: list[str], tmp_path: Path) -> None:
    sets = Path(__file__).parents[2] / "models/eval"
    with answering(json.dumps({"error": {"message": HOSTILE}}, ensure_ascii=False).encode()) as url:
        done = run("eval", "--url", url, "--sets", sets, "--task", "json", *named, cwd=tmp_path)
    assert done.returncode != 0
    for stream in (done.stdout, done.stderr):
        assert not unseen(stream.decode()), ascii(stream.decode())


PRINTS = """
import sys, logging
from pathlib import Path
import moetier.cli as cli
from moetier.errors import MoetierError
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
text = Path(sys.argv[1]).read_bytes().decode()
def verb():
    print(text)
    print(text, file=sys.stderr)
    logging.getLogger("moetier.x").warning(text)
    table = Table("[bold]name[/]"); table.add_row(text)
    Console().print(table, markup=False)
    Console(stderr=True).print(text, markup=False, style="green")
    with Progress(console=Console(stderr=True)) as bar:
        bar.advance(bar.add_task("step", total=1))
    raise [MoetierError(text), FileNotFoundError(2, text, text), KeyError(text)][int(sys.argv[2])]
cli.app = verb
cli.main()
"""


@pytest.mark.parametrize("error", [0, 1, 2], ids=["ours", "of-a-file", "unexpected"])
@pytest.mark.parametrize("coding", ["utf-8", "ascii"])
def test_a_terminal_gets_our_own_escapes_alone(error: int, coding: str, tmp_path: Path) -> None:
    """On a real terminal, where rich writes colours and moves the cursor."""
    (tmp_path / "text").write_text(HOSTILE, newline="")
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "300", "PYTHONIOENCODING": coding}
    process = subprocess.Popen(
        [sys.executable, "-c", PRINTS, str(tmp_path / "text"), str(error)],
        stdin=theirs, stdout=theirs, stderr=theirs, env=environment, cwd="/",
    )  # fmt: skip
    os.close(theirs)
    data = b""
    while chunk := _read(ours):
        data += chunk
    os.close(ours)
    assert process.wait() != 0
    shown = data.decode()
    assert "\x1b[32m" in shown, "rich's own colour"
    assert "\x1b[?25l" in shown, "rich's own cursor"
    assert shown.count(r"\x1b]0;PWNED") >= 5
    for bad in (TITLE, RED, CSI, "\x08", "\u202e", "\u2028", "\x00", "a\rb"):
        assert bad not in shown, ascii(bad)


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # all who wrote have ended
        return b""
