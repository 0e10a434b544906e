"""Hybrid steps, the device's threads emulated on the CPU and the mailbox the one that serves, equal the oracle."""

import shutil
from collections.abc import Iterator

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the device tier wants torch")

from moetier.contract import LayerGeometry, RecordLayout  # noqa: E402
from moetier.engine.hybrid.model import mail_arrays  # noqa: E402
from moetier.kernels.cpu import CpuExperts, ThreadPool  # noqa: E402
from moetier.kernels.cpu.mailbox import Mailbox  # noqa: E402
from moetier.kernels.cuda import hybrid  # noqa: E402
from moetier.kernels.cuda.hybrid import ALL_CPU, ALL_STREAM, Costs, HybridPath, LayerTables  # noqa: E402
from moetier.kernels.cuda.path import CudaPath  # noqa: E402
from moetier.kernels.protocol import COUNTS  # noqa: E402
from moetier.tiers.arena import Arena  # noqa: E402
from tests.gpu.emulated.test_decode import CPU, V4, Case, emulated, emulation  # noqa: E402, F401

pytestmark = pytest.mark.skipif(not shutil.which("c++"), reason="compiles the kernels with the C++ compiler")

TOKENS, RESIDENT = 2, (1, 4)


class Bench:
    """A layer with experts 1 and 4 in slots and all records in DRAM, and `staging` slots."""

    def __init__(self, tokens: int, staging: int) -> None:
        self.case = case = Case(LayerGeometry(256, 128, 7, 3), V4, tokens)
        g, stride = case.geometry, RecordLayout.of(case.geometry).stride
        self.arena = Arena(g.experts, stride)
        for expert in range(g.experts):
            self.arena.view(expert)[:] = case.slots[case.table[expert]].numpy()
        slots = torch.zeros((len(RESIDENT) + staging, stride), dtype=torch.uint8)
        table = torch.full((g.experts,), -1, dtype=torch.int32)
        for slot, expert in enumerate(RESIDENT):
            slots[slot], table[expert] = torch.from_numpy(self.arena.view(expert)), slot
        addresses = np.array([self.arena.address(expert) for expert in range(g.experts)], np.int64)
        self.counts = torch.zeros(len(COUNTS), dtype=torch.int64)
        heat = torch.zeros(g.experts, dtype=torch.int32)
        self.tables = LayerTables(0, table, torch.from_numpy(addresses), heat, self.counts)
        self.path = HybridPath(
            case.sizes, TOKENS, slots, range(len(RESIDENT), len(RESIDENT) + staging), stride, ALL_CPU, 60.0
        )
        self.pool = ThreadPool(1)
        kernel = CpuExperts(g, case.family, self.pool, max_tokens=TOKENS)
        self.mailbox = Mailbox(kernel, self.pool, mail_arrays(self.path.mail), [addresses.view(np.uint64)])

    def step(self, ids: list[list[int]], costs: Costs, live: int) -> None:
        """One call, held to the oracle; padding comes out as zeros."""
        case = self.case
        case.ids[:] = torch.tensor(ids, dtype=torch.int32)
        expected = case.expected().view(np.uint16)
        expected[live:] = 0
        self.path.set_costs(costs)
        self.path.live.fill_(live)
        self.mailbox.wake()
        out = self.path.forward(self.tables, case.x, case.ids, case.weights, torch.full_like(case.x, 7.0))
        np.testing.assert_array_equal(out.view(torch.int16).numpy().view(np.uint16), expected)

    def counted(self) -> dict[str, int]:
        return {name: int(n) for name, n in zip(COUNTS, self.counts, strict=True) if name != "waited_ns"}

    def close(self) -> None:
        self.mailbox.close()
        self.pool.close()


@pytest.fixture
def benches(emulated: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Bench]]:  # noqa: F811
    """Without prefill, whose kernels have tests of their own, and pinned memory, which wants a device."""
    monkeypatch.setattr(hybrid, "pinned", torch.zeros)
    monkeypatch.setattr(CudaPath, "_load_prefill", lambda *_: None)
    made: list[Bench] = []
    yield made
    for bench in made:
        bench.close()


@pytest.mark.parametrize("staging", [4, 1, 0], ids=["all streamed", "one streamed", "none streamed"])
@pytest.mark.parametrize("tokens", [1, 2], ids=["one token", "two tokens"])
def test_hybrid_steps(benches: list[Bench], tokens: int, staging: int) -> None:
    bench = Bench(tokens, staging)
    benches.append(bench)
    bench.step([[6, 1, 0], [0, 4, 5]][:tokens], ALL_STREAM, tokens)
    bench.step([[1, 4, -1], [4, 7, 1]][:tokens], ALL_STREAM, tokens)  # no miss, ids outside the layer
    bench.step([[5, 2, 1], [0, 6, 3]][:tokens], ALL_STREAM, 1)  # a second token is padding
    bench.step([[3, 4, 2], [0, 5, 6]][:tokens], ALL_CPU, 1)
    bench.step([[0, 0, 0], [0, 0, 0]][:tokens], ALL_STREAM, 0)
    missed, found = (1 + tokens, 2), bench.counted()  # where they are streamed; and two more by the CPU
    assert (found["calls"], found["calls_missed"], found["misses"]) == (5, 3, sum(missed) + 2)
    assert found["streamed"] == sum(min(misses, staging) for misses in missed)
    assert bench.mailbox.counts()[0] == 1 + sum(misses > staging for misses in missed)


@pytest.mark.parametrize("tokens", [1, 2], ids=["one token", "two tokens"])
def test_cpu_and_link_share_misses_so_that_both_end_early(benches: list[Bench], tokens: int) -> None:
    bench = Bench(tokens, staging=4)
    benches.append(bench)

    def streamed(ids: list[int], costs: Costs) -> int:
        before = bench.counted()["streamed"]
        bench.step([ids, [-1, -1, -1]][:tokens], costs, tokens)
        return bench.counted()["streamed"] - before

    alone = Costs(
        cpu_call=0.0, cpu_expert=10.0, cpu_pair=1.0, stream_expert=15.0, cpu_expert_beside=10.0, device_pair=0.0
    )
    assert streamed([0, 2, 3], alone) == 1  # 20 instead of 30, with two 30
    assert streamed([0, 1, 3], alone) == 1
    assert streamed([0, 1, 4], alone) == 0
    assert streamed([0, 2, 3], Costs(0.0, 10.0, 1.0, 15.0, 40.0, 0.0)) == 0  # it slows the CPU down too much
    assert streamed([0, 2, 3], Costs(100.0, 10.0, 1.0, 15.0, 10.0, 0.0)) == 3  # the CPU need not even be asked
    assert streamed([6, 6, 2], Costs(0.0, 1.0, 10.0, 15.0, 1.0, 0.0)) == 1  # that of two pairs
    assert bench.counted()["pairs_cpu"] == 2 + 1 + 1 + 3 + 0 + 1
    # What has a slot is computed after what is streamed: 25 with one of two experts streamed, 20 with none.
    assert streamed([1, 2, 3], Costs(0.0, 10.0, 1.0, 15.0, 10.0, 5.0)) == 0
    assert streamed([1, 2, 3], Costs(0.0, 10.0, 1.0, 15.0, 10.0, 2.0)) == 1
