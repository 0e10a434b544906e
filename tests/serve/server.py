"""A `moetier serve` process as a person starts it: the installed command, a free port, everything on loopback."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil
from openai import OpenAI

COMMAND = str(Path(sys.executable).with_name("moetier"))
PARSERS = ("--enable-auto-tool-choice", "--tool-call-parser", "glm45", "--reasoning-parser", "glm45")
CHEAP = ("--max-model-len", "1024", "--no-enable-prefix-caching")
"""What vLLM is always told here. Without prefix caching an answer does not depend on what was asked before."""
LIMIT_SECONDS = 480
"""Longer than any start or end takes, even on a busy machine."""
DRAIN = "--drain-seconds"
ERROR = "moetier: error: "


def environment() -> dict[str, str]:
    """Ours, and what the bundled model needs; no key, so that none is used by accident."""
    kept = {name: value for name, value in os.environ.items() if name != "VLLM_API_KEY"}
    return {**kept, "VLLM_ENFORCE_STRICT_TOOL_CALLING": "0"}


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def port_is_open(port: int) -> bool:
    """Whether something accepts connections on loopback."""
    with socket.socket() as probe:
        probe.settimeout(2)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def refused(*arguments: str | Path) -> str:
    """Run `moetier serve` that must refuse: exit code 2, one error on stderr, no process left. Returns the error."""
    command = [COMMAND, "serve", *map(str, arguments)]
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(timeout=LIMIT_SECONDS)
        finally:
            left = kill_session(process.pid)
    assert process.returncode == 2, f"exit code {process.returncode}: {err}"
    assert not left, f"left running: {left}"
    assert out == ""
    assert "Traceback" not in err
    assert err.count(ERROR) == 1, err
    assert len(err.strip().splitlines()) == 1, f"one line was expected: {err}"
    return err.strip().removeprefix(ERROR)


def kill_session(leader: int) -> list[str]:
    """Kill what is left of a session; returns what there was."""
    left = []
    for process in psutil.process_iter(["name"]):
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                left.append(f"{process.pid} {process.info['name']}")
                process.kill()
    return left


class Server:
    """A started server; leave its `with` block and no process of it is left, whatever happened inside."""

    def __init__(
        self,
        model: Path,
        store: Path,
        folder: Path,
        *,
        dram_records: str = "25%",
        options: Sequence[str] = (),
        vllm: Sequence[str] = (),
        under: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """folder: a new one for the output. options: more for moetier. vllm: more for vLLM. under: a command that runs
        it. variables: the whole environment, if not ours.
        """
        folder.mkdir(parents=True)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.start_seconds = 0.0
        self._log, self._err = folder / "vllm.log", folder / "stderr"
        command = [
            *under,
            COMMAND,
            "serve",
            str(model),
            "--store",
            str(store),
            "--build-store",
            "--port",
            str(self.port),
        ]
        command += ["--dram-records", dram_records, "--kv-cache-gib", "0.25", "--log-file", str(self._log), *options]
        if DRAIN not in options:
            command += [DRAIN, str(LIMIT_SECONDS)]  # 30 s are too few for long requests on a busy machine
        with self._err.open("wb") as err, (folder / "stdout").open("wb") as out:
            self._process = subprocess.Popen(
                [*command, "--", *PARSERS, *CHEAP, *vllm],
                env=environment() if variables is None else dict(variables),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self._started = time.monotonic()
        self._seen: dict[int, psutil.Process] = {}

    @property
    def stderr(self) -> str:
        """What the launcher told so far."""
        return self._err.read_text(errors="replace")

    @property
    def error(self) -> str:
        """The one error that the launcher ended with."""
        before, found, after = self.stderr.partition(ERROR)
        assert found, f"no error in: {self.stderr}"
        assert "Traceback" not in before + after
        return after.strip()

    def wait_ready(self) -> Server:
        """Wait until it says that it is ready, and answers."""
        while not (self._process.poll() is None and "ready after" in self.stderr and self.healthy()):
            waited = time.monotonic() - self._started
            if self._process.poll() is not None or waited > LIMIT_SECONDS:
                raise AssertionError(f"not ready after {waited:.0f} s: {self.stderr}\n{self.log_tail()}")
            time.sleep(0.2)
        self.start_seconds = time.monotonic() - self._started
        self.processes()
        return self

    def wait_for_processes(self, number: int) -> None:
        """Wait until the launcher and its descendants are so many."""
        while len(self.processes()) + 1 < number:
            assert self._process.poll() is None, self.stderr
            assert time.monotonic() - self._started < LIMIT_SECONDS, self.log_tail()
            time.sleep(0.1)

    def healthy(self) -> bool:
        """Whether /health answers that all is well."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def wait_for_requests(self, number: int) -> None:
        """Wait until the engine has so many sequences, running or waiting."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while self._sequences() < number:
            assert time.monotonic() < deadline, self.log_tail()
            time.sleep(0.1)

    def _sequences(self) -> int:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        names = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
        return sum(int(float(line.rsplit(" ", 1)[1])) for line in lines if line.startswith(names))

    def client(self) -> OpenAI:
        """A client that gives up at the first error, and never waits long."""
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=180)

    def processes(self) -> list[psutil.Process]:
        """The launcher's descendants, those that were seen before included, as far as they run."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self._process.pid).children(recursive=True):
                self._seen[child.pid] = child
        return [process for process in self._seen.values() if runs(process)]

    def engine(self) -> psutil.Process:
        """The process of vLLM that runs the model."""
        found = [process for process in self.processes() if process.name().startswith("VLLM::EngineCor")]
        assert len(found) == 1, [process.name() for process in self.processes()]
        return found[0]

    def send(self, number: signal.Signals) -> None:
        """Send the launcher a signal."""
        self.processes()
        self._process.send_signal(number)

    def wait_exit(self) -> int:
        """Exit code of the launcher; by then, nothing of it may run and the port must be closed."""
        try:
            code = self._process.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {LIMIT_SECONDS} s: {self.stderr}\n{self.log_tail()}") from None
        assert not port_is_open(self.port)
        assert not self.processes(), f"left running: {self.processes()}"
        return code

    def wait_gone(self) -> None:
        """Wait until no process of it runs."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.2)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Signal and wait."""
        self.send(number)
        return self.wait_exit()

    def log_tail(self, lines: int = 20) -> str:
        """The end of vLLM's log, for a failed assertion."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:]) if self._log.exists() else ""

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._process.poll() is None:
            self.send(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(LIMIT_SECONDS)
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()


def runs(process: psutil.Process) -> bool:
    """Whether it runs; one that has ended and waits for its parent's look does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


@contextlib.contextmanager
def serving(model: Path, store: Path, folder: Path, **settings: object) -> Iterator[Server]:
    """A server that is ready."""
    with Server(model, store, folder, **settings) as server:  # type: ignore[arg-type]
        yield server.wait_ready()
