"""A bit is flipped in the memory of a server's engine, from outside: it is found, said, and the server ends."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
from numpy.typing import NDArray

from moetier.store.store import Store
from tests.serve.server import LIMIT_SECONDS, Server, serving

SHARE = ("--set", "sentinel=0.3", "--halt-on-corruption")


def places(process: psutil.Process, wanted: bytes) -> Iterator[int]:
    """Yield addresses in the anonymous memory of a process at which `wanted` lies, page-aligned."""
    with Path(f"/proc/{process.pid}/maps").open() as maps, Path(f"/proc/{process.pid}/mem").open("rb") as memory:
        for line in maps:
            match = re.match(r"([0-9a-f]+)-([0-9a-f]+) rw\S+ \S+ \S+ \S+ *(?:/dev/zero.*)?$", line)
            if match is None:
                continue
            begin, end = (int(part, 16) for part in match.groups())
            memory.seek(begin)
            at, held = -1, memory.read(end - begin)
            while (at := held.find(wanted, at + 1)) >= 0:
                if (begin + at) % 4096 == 0:
                    yield begin + at


def flip(server: Server, record: NDArray[np.uint8], byte: int) -> int:
    """Flip a bit of a record wherever it lies in the server's processes; returns in how many places."""
    count = 0
    for process in server.processes():
        for address in list(places(process, record[:2048].tobytes())):
            with Path(f"/proc/{process.pid}/mem").open("r+b", buffering=0) as memory:
                memory.seek(address + byte)
                memory.write(bytes([record[byte] ^ 8]))
            count += 1
    return count


def metric(server: Server, name: str) -> float:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{"))


def ask(server: Server) -> httpx.Response:
    body = {"model": "nano-mxfp4", "prompt": "The", "max_tokens": 8, "temperature": 0}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=LIMIT_SECONDS)


@pytest.mark.long
def test_a_flip_in_the_engines_memory_ends_it_where_that_is_asked_for(nano: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with serving(nano, store, tmp_path / "out", dram_records="100%", options=SHARE) as server:
        deadline = time.monotonic() + LIMIT_SECONDS
        while metric(server, "moetier_sentinel_rounds_total") < 1 or metric(server, "moetier_sentinel_calls_total") < 1:
            assert ask(server).status_code == 200
            assert time.monotonic() < deadline, "nothing is checked"
        assert metric(server, "moetier_sentinel_microseconds_total") > 0
        assert metric(server, "moetier_corrupt_records_total") == 0
        assert metric(server, "moetier_corrupt_calls_total") == 0
        with Store.open(store) as opened:
            record = np.zeros(opened.layout.stride, np.uint8)
            opened.read_record(1, 3, record)
            number = opened.manifest.layers[1].number
        assert flip(server, record, 100), "the record is not in memory"
        codes = set()
        while not codes - {200}:
            assert time.monotonic() < deadline, "nothing is found"
            try:
                codes.add(ask(server).status_code)
            except httpx.TransportError:
                break
        assert server.wait_exit() == 1
        in_its_turn = r", expert 3: the record in DRAM has checksum \w+, expected"
        by_a_call = ": .*: bytes were wrong, expert 3 has checksum"
        assert re.match(rf"corruption found: layer {number}({in_its_turn}|{by_a_call})", server.error), server.error
        assert "as halt_on_corruption asks" in server.error
