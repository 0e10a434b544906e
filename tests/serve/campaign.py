"""One forced end of a real server under load: what ends it and when is drawn by lot; afterwards nothing may be left.

Rounds share a folder for temporary files, so each is the "next start" of the round before it.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from moetier.launch.scratch import PREFIX, SHARED_MEMORY, mapped_by
from tests.serve.server import LIMIT_SECONDS, Server

STREAMS, WHOLE = 3, 2
"""Requests under way: streams, and such that are answered in one piece."""
MOMENTS = ("start", "serving", "drain")
EVENTS = (
    *("SIGINT", "SIGTERM", "SIGHUP", "two signals"),
    *("launcher killed", "guard killed", "launcher and guard killed"),
    *("server killed", "engine killed", "worker killed", "disk full"),
)
KILLED = {"server killed": "vLLM's server", "engine killed": "EngineCore", "worker killed": "Worker"}
START_SECONDS = 25
TINY = "8m"
"""Of the disk that fills up: temporary files, log and heat lie on it."""


@dataclass
class Load:
    """Requests under way. ended: how each did: "whole", "error", "refused" (it came too late) or "broken off"."""

    url: str
    ended: list[str] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)

    def start(self, tokens: int) -> None:
        for number in range(STREAMS + WHOLE):
            thread = threading.Thread(target=self._ask, args=(number < STREAMS, tokens), daemon=True)
            self.threads.append(thread)
            thread.start()

    def _ask(self, stream: bool, tokens: int) -> None:
        body = {"model": "nano-mxfp4", "prompt": "The", "max_tokens": tokens, "ignore_eos": True, "stream": stream}
        how = "broken off"
        with contextlib.suppress(httpx.HTTPError):
            with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=LIMIT_SECONDS) as answer:
                lines = list(answer.iter_lines())
            text = "\n".join(lines)
            how = "error" if '"error"' in text or answer.status_code != 200 else "whole"
            if "takes no new requests" in text:
                how = "refused"
            if how == "whole" and stream and "data: [DONE]" not in lines:
                how = "cut in silence"
        self.ended.append(how)

    def hung(self) -> int:
        """Requests that do not end although their server has."""
        for thread in self.threads:
            thread.join(30)
        return sum(thread.is_alive() for thread in self.threads)


@dataclass(frozen=True)
class Round:
    """What ends a server, and when. seconds: after the moment began; tokens: of each request."""

    moment: str
    event: str
    seconds: float
    drain_seconds: int
    tokens: int

    @classmethod
    def draw(cls, lot: random.Random) -> Round:
        moment = lot.choice(MOMENTS)
        seconds = lot.uniform(0, START_SECONDS if moment == "start" else 2)
        return cls(moment, lot.choice(EVENTS), seconds, lot.choice((1, 3, 8, 60)), lot.choice((50, 400, 900)))

    def run(self, model: Path, store: Path, folder: Path) -> list[str]:
        """Run it; returns what went wrong."""
        with _disk(folder, self.event == "disk full") as place:
            return _Run(self, model, store, folder, place).run()


class _Run:
    def __init__(self, drawn: Round, model: Path, store: Path, folder: Path, place: Path) -> None:
        self.drawn, self.place = drawn, place
        self.temporary = Path(os.environ["TMPDIR"])
        self.before = set(self._files())
        options = ("--identity-check", "1", "--drain-seconds", str(drawn.drain_seconds))
        options += ("--set", f"heat_file={place / 'heat.json'}", "--log-file", str(place / "log"))
        self.server = Server(model, store, folder / "out", options=options)
        self.load = Load(self.server.url)
        self.memory: set[str] = set()
        self.wrong: list[str] = []
        self.told = False

    def run(self) -> list[str]:
        with self.server:
            if self.drawn.moment == "start":
                self._sleep(self.drawn.seconds)
            else:
                self.server.wait_ready()
                self.load.start(self.drawn.tokens)
                self._sleep(1 if self.drawn.moment == "drain" else self.drawn.seconds)
            if self.drawn.moment == "drain":
                self._tell(signal.SIGTERM)
                self._sleep(self.drawn.seconds)
            self._note()
            self._event()
            self._end()
        return self.wrong

    def _event(self) -> None:
        event = self.drawn.event
        if event in signal.Signals.__members__:
            self._tell(signal.Signals[event])
        elif event == "two signals":
            self._tell(signal.SIGINT)
            self._sleep(0.3)
            self._tell(signal.SIGTERM)
        elif event == "disk full":
            with contextlib.suppress(OSError), (self.place / "filler").open("wb") as file:
                while True:
                    file.write(bytes(4096))
                    file.flush()
            self._sleep(1)
            self._tell(signal.SIGTERM)
        elif event == "guard killed":
            self._kill(lambda process: "guard.py" in " ".join(process.cmdline()))
            self._sleep(1)
            self._tell(signal.SIGTERM)
        elif event.startswith("launcher"):
            if event != "launcher killed":
                self._kill(lambda process: "guard.py" in " ".join(process.cmdline()), or_tell=False)
            self.server.send(signal.SIGKILL)
        else:
            names = {"server killed": "api_server", "engine killed": "VLLM::EngineCor", "worker killed": "VLLM::Worker"}
            self._kill(lambda process: names[event] in " ".join((process.name(), *process.cmdline()[:6])))

    def _tell(self, number: signal.Signals) -> None:
        self.told = True
        with contextlib.suppress(ProcessLookupError):
            self.server.send(number)

    def _kill(self, chosen: Callable[[psutil.Process], bool], or_tell: bool = True) -> None:
        """Kill a process; where it is not there yet, or no more, the launcher is told to end instead."""
        for process in self.server.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                if chosen(process):
                    process.kill()
                    return
        if or_tell:
            self._tell(signal.SIGTERM)

    def _note(self) -> None:
        """Note what shared memory there is before the end."""
        self.memory |= set(mapped_by(str(process.pid) for process in self.server.processes()))

    def _sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._note()
            time.sleep(min(0.2, max(0.0, end - time.monotonic())))

    def _end(self) -> None:
        event = self.drawn.event
        killed_launcher = event.startswith("launcher")
        if event == "launcher and guard killed":
            self._sleep(1)
            for process in self.server.processes():  # whoever does that to the first two does not spare the others
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        if killed_launcher:
            self.server.wait_gone()
        code = self.server.wait_exit()  # asserts that no process runs and that the port is free
        if hung := self.load.hung():
            self.wrong.append(f"{hung} requests hang")
        if "cut in silence" in self.load.ended:
            self.wrong.append(f"a stream was cut in silence: {self.load.ended}")
        self.wrong += self._wrong_words(code)
        if event != "launcher and guard killed":
            left = self._left()
            if left:
                self.wrong.append(f"left: {left}")

    def _files(self) -> list[str]:
        """Temporary files; not those that the round itself put there."""
        ours = {"log", "heat.json", "filler"}
        return [path.name for path in self.temporary.iterdir() if path.name not in ours]

    def _left(self) -> list[str]:
        """What is left of this round: files are waited for, since the guard removes them last."""
        deadline = time.monotonic() + 20
        while True:
            swept = "vLLM's log: " in self.server.stderr  # else it ended before it could sweep what others left
            files = [name for name in self._files() if swept or name not in self.before]
            files += [name for name in self.memory if (SHARED_MEMORY / name).exists()]
            if not files or time.monotonic() > deadline:
                return files
            time.sleep(0.2)

    def _wrong_words(self, code: int) -> list[str]:
        said, event, ended = self.server.stderr.strip(), self.drawn.event, self.load.ended
        last = said.splitlines()[-1] if said else ""
        wrong = ["a traceback is shown"] if "Traceback (most" in said and "the reason" not in said else []
        failed = len(ended) - ended.count("whole") - ended.count("refused")
        if event.startswith("launcher"):
            expected = (-signal.SIGKILL, "")
        elif event in KILLED and not self.told:
            expected = (1, f"{KILLED[event]}")
            known = self.drawn.moment != "start" or event != "worker killed"  # whose code vLLM drops while it starts
            if known and "was killed by SIGKILL" not in said:
                wrong.append(f"the reason is not shown: {last}")
        elif "vLLM's log: " not in said:  # before anything was started: as any program ends
            return wrong if code in (-signal.SIGTERM, -signal.SIGHUP, 130) else [*wrong, f"exit code {code}: {last}"]
        elif self.drawn.moment == "start" and "ready after" not in said:
            expected = (0, "ended before it was ready")
        elif event in KILLED:  # while it drained: it may have been done
            if code not in (0, 1) or (code == 0 and failed):
                wrong.append(f"exit code {code}, {failed} requests failed: {last}")
            return wrong
        elif "cut off" in last:
            expected = (1, f"cut off {failed} request")
        else:
            expected = (0, "drained")
            if failed and self.drawn.moment != "start":
                wrong.append(f"{failed} requests failed, and nothing is said of it: {ended}")
        if code != expected[0]:
            wrong.append(f"exit code {code} instead of {expected[0]}: {last}")
        if expected[1] not in said:
            wrong.append(f"expected {expected[1]!r} in the last words, found: {last}")
        return wrong


@contextlib.contextmanager
def _disk(folder: Path, small: bool) -> Iterator[Path]:
    """A folder for log, heat and temporary files; a small disk of its own where it shall fill up and we may mount."""
    if not small or os.geteuid():
        yield folder
        return
    place = Path(tempfile.mkdtemp(dir="/tmp"))
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={TINY}", "tmpfs", str(place)], check=True)
    before = os.environ["TMPDIR"]
    try:
        os.environ["TMPDIR"] = str(place)
        yield place
    finally:
        os.environ["TMPDIR"] = before
        subprocess.run(["umount", "-l", str(place)], check=True)
        place.rmdir()


def left_by_all(folder: Path) -> list[str]:
    """Folders of servers that are left, once the last of them is gone."""
    return [path.name for path in folder.glob(f"{PREFIX}*")]
