"""Why vLLM's processes ended, out of their log: the first cause, which others bury under their own tracebacks.

A worker's exception makes its engine raise another, and that the frontend a third; then each says what it leaks.
"""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

LOG_END_BYTES = 4 << 20
"""As far back as reasons are looked for."""
MOST_LINES = 6
"""Lines of one exception's message, at most."""
BURST = timedelta(seconds=60)
"""Seconds: an exception that was raised longer before the last one is another story."""

PREFIX = re.compile(r"^\((?P<source>[\w.:-]+) pid=\d+\) ?")
TAG = re.compile(r"^(?P<level>[A-Z]+) (?P<time>\d\d-\d\d \d\d:\d\d:\d\d) (?P<place>\[[^\]]*\]) ?")
RAISED = re.compile(r"^(?P<kind>[A-Za-z_][\w.]*)(: |:?$)")
TRACEBACK = "Traceback (most recent call last):"
CAUSED = "The above exception was the direct cause of the following exception:"
HANDLING = "During handling of the above exception, another exception occurred:"
USAGE = re.compile(r"^[\w.]+: error: .")
DIED = re.compile(r"(?P<name>[\w-]+) died unexpectedly \(exit code: (?P<code>-\d+)\)")
FAILED_CORE = re.compile(r"Failed core proc\(s\): \{'(?P<name>\w+)': (?P<code>-\d+)\}")
CONSEQUENCES = (
    "EngineDeadError",
    "Engine core initialization failed",
    "Worker failed with error",
    "WorkerProc initialization failed",
    "Executor failed",
    "SystemExit",
    "KeyboardInterrupt",
    "CancelledError",
    "BrokenPipeError",
    "died unexpectedly",
)
"""Words of exceptions that only pass another one on."""
SIGNALS = {
    signal.SIGKILL: "most likely by the kernel, for memory: `dmesg` tells; lower --dram-records or --kv-cache-gib",
    signal.SIGBUS: "for what it maps is gone: /dev/shm is full (`df /dev/shm`), or a file lost its end or its disk",
    signal.SIGSEGV: "by a fault of native code: report it with the log",
    signal.SIGABRT: "by itself: its last words are in the log",
    signal.SIGILL: "for an instruction that this CPU lacks: set MOETIER_ISA lower (`moetier version` lists all)",
    signal.SIGXFSZ: "for a file grew beyond the limit: raise it (`ulimit -f unlimited`)",
    signal.SIGXCPU: "at the limit on CPU time: raise it (`ulimit -t unlimited`)",
}


@dataclass(frozen=True)
class Raised:
    """An exception in the log."""

    source: str
    time: datetime | None
    text: str


@dataclass(frozen=True)
class Line:
    """A line of a process. place: the file and line that logged it, if it was logged."""

    time: datetime | None
    place: str
    text: str
    number: int


def reason(log: Path, ended: Sequence[tuple[str, int]] = (), for_memory: bool = False) -> str | None:
    """The first cause in a log, a consequence where nothing else was logged; None if there is neither.

    ended: processes and their exit codes, as far as known. for_memory: whether the kernel killed some meanwhile.
    """
    lines = _end(log).splitlines()
    codes = (*_killed(lines), *ended)
    killed = next((said for name, code in codes if (said := by_signal(name, code, for_memory))), None)
    if killed:
        return killed
    everything = list(_raised(lines))
    raised = [error for error in everything if not any(word in error.text for word in CONSEQUENCES)] or everything
    times = [error.time for error in raised if error.time]
    recent = [error for error in raised if not (times and error.time) or error.time >= max(times) - BURST]
    for of_kind in (_of_worker, _of_engine, lambda _: True):
        found = [error for error in recent if of_kind(error.source)]
        if found:
            first = found[0] if of_kind in (_of_worker, _of_engine) else found[-1]
            return f"{first.source}: {first.text}" if first.source else first.text
    usage = [line for line in lines if USAGE.match(line)]
    return usage[-1] if usage else None


def by_signal(name: str, code: int, for_memory: bool = False) -> str | None:
    """Return what an exit code says of a signal; None where it was none, or the one that we end processes by."""
    if code >= 0 or -code == signal.SIGTERM:
        return None
    with contextlib.suppress(ValueError):
        number = signal.Signals(-code)
        why = SIGNALS.get(number, "by another process")
        if number is signal.SIGKILL and for_memory:
            why = why.removeprefix("most likely ")
        return f"{name} was killed by {number.name}, {why}"
    return f"{name} was killed by signal {-code}"


def _of_worker(source: str) -> bool:
    return "Worker" in source


def _of_engine(source: str) -> bool:
    return source.startswith("EngineCore")


def _killed(lines: Sequence[str]) -> Iterator[tuple[str, int]]:
    for line in lines:
        if match := DIED.search(line) or FAILED_CORE.search(line):
            yield match["name"], int(match["code"])


def _raised(lines: Sequence[str]) -> Iterator[Raised]:
    """The exceptions of a log, in its order."""
    by_source: dict[str, list[Line]] = {}
    time = None
    for at, line in enumerate(lines):
        prefix = PREFIX.match(line)
        rest = line[prefix.end() :] if prefix else line
        tag = TAG.match(rest)
        if tag:
            with contextlib.suppress(ValueError):
                time = datetime.strptime(f"2000-{tag['time']}", "%Y-%m-%d %H:%M:%S")
            rest = rest[tag.end() :]
        source = prefix["source"] if prefix else ""
        by_source.setdefault(source, []).append(Line(time, tag["place"] if tag else "", rest, at))
    found = [error for source, said in by_source.items() for error in _of_source(source, said)]
    return (error for _, error in sorted(found, key=lambda pair: pair[0]))


def _of_source(source: str, said: Sequence[Line]) -> Iterator[tuple[int, Raised]]:
    """The exceptions of a process, each with the number of its first line. Of a chain, the one that caused the others;
    with one that was raised while it was handled, since that often knows more.
    """
    root, link, begun = "", "", 0
    at = 0
    while at < len(said):
        if said[at].text.rstrip() != TRACEBACK:
            at += 1
            continue
        begun = begun if link else said[at].number
        at += 1
        while at < len(said) and (not said[at].text.strip() or said[at].text[0] in " \t"):
            at += 1
        if at == len(said) or not RAISED.match(said[at].text):
            continue
        first = said[at]
        text = [first.text.rstrip()]
        at += 1
        while at < len(said) and _goes_on(said[at], first.place) and len(text) < MOST_LINES:
            text.append(said[at].text.rstrip())
            at += 1
        raised = "\n".join(text)
        root = root if link == CAUSED else f"{raised} (while handling {root})" if link == HANDLING else raised
        following = [line.text.rstrip() for line in said[at : at + 3] if line.text.strip()][:1]
        link = following[0] if following in ([CAUSED], [HANDLING]) else ""
        if not link:
            yield begun, Raised(source, first.time, root)


def _goes_on(line: Line, place: str) -> bool:
    """Whether a line belongs to the message of the exception before it."""
    text, ends = line.text.rstrip(), (TRACEBACK, CAUSED, HANDLING)
    return line.place == place and bool(text) and text not in ends and not text.startswith("INFO:")


def _end(log: Path) -> str:
    """The end of a log, as far as it is a file that can be read: of a pipe or a device there may be no end."""
    with contextlib.suppress(OSError):
        if log.is_file():
            with log.open("rb") as file:
                file.seek(max(0, log.stat().st_size - LOG_END_BYTES))
                return file.read(LOG_END_BYTES).decode(errors="replace")
    return ""
