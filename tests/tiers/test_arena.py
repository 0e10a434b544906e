"""Memory for records: which pages it got, as the kernel tells it."""

from __future__ import annotations

import logging
import mmap
from pathlib import Path

import pytest

from moetier.errors import SettingsError
from moetier.tiers.arena import Arena
from moetier.tiers.pages import HUGE_PAGE, PageKind, map_touched, pages_at

HEAD = "{:012x}-{:012x} rw-p 00000000 00:00 0 \n"
BODY = """Size:              {size:8} kB
KernelPageSize:    {page:8} kB
MMUPageSize:       {page:8} kB
Rss:               {size:8} kB
AnonHugePages:     {huge:8} kB
VmFlags: rd wr mr mw me ac sd hg
"""


def smaps(root: Path, *mappings: tuple[int, int, int, int]) -> Path:
    """Write mappings of (address, kB, page size in kB, kB of transparent huge pages)."""
    (root / "proc/self").mkdir(parents=True)
    text = "".join(
        HEAD.format(address, address + size * 1024) + BODY.format(size=size, page=page, huge=huge)
        for address, size, page, huge in mappings
    )
    (root / "proc/self/smaps").write_text(text)
    return root


@pytest.mark.parametrize(
    ("address", "kind", "share"),
    [(0x1000_0000, "explicit", 1.0), (0x5000_1000, "transparent", 0.75), (0x7000_0FFF, "none", 0.0)],
)
def test_kinds_in_smaps(tmp_path, address, kind, share):
    root = smaps(
        tmp_path,
        (0x1000_0000, 4096, 2048, 0),
        (0x5000_0000, 8192, 4, 6144),
        (0x7000_0000, 4, 4, 0),
        (0x7000_1000, 4096, 2048, 0),
    )
    pages = pages_at(address, root)
    assert (pages.kind, pages.huge_share) == (PageKind(kind), share)


def test_an_address_outside_every_mapping(tmp_path):
    assert pages_at(0x2000, smaps(tmp_path, (0x1000_0000, 4096, 4, 4096))).kind == PageKind.NONE


def allowed_transparent() -> bool:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return setting.exists() and "[never]" not in setting.read_text()


def free_in_pool() -> int:
    free = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
    return int(free.read_text()) if free.exists() else 0


def test_a_large_arena_gets_huge_pages():
    if not allowed_transparent() and not free_in_pool() >= 8:
        pytest.skip("this kernel gives no huge pages")
    arena = Arena(4, 4 << 20)
    assert arena.pages.kind in (PageKind.TRANSPARENT, PageKind.EXPLICIT)
    assert arena.pages.huge_share > 0
    assert arena.address(1) - arena.address(0) == 4 << 20
    arena.view(3)[:] = 7
    assert arena.view(3).all()
    assert not arena.view(2).any()


def test_a_small_arena_has_small_pages():
    arena = Arena(1, 4096)
    assert arena.pages.kind in (PageKind.NONE, PageKind.TRANSPARENT)  # the kernel may join it to a neighbour
    assert arena.extent[1] == mmap.PAGESIZE


def test_the_pool_of_huge_pages_is_used_where_it_is_large_enough():
    free = free_in_pool()
    if not 1 <= free <= 512:
        pytest.skip(f"the system's pool has {free} free pages")
    memory = map_touched(HUGE_PAGE - 1 + (free - 1) * HUGE_PAGE)
    assert len(memory) == free * HUGE_PAGE
    larger = Arena(free + 1, HUGE_PAGE)  # the pool is empty now
    assert larger.pages.kind != PageKind.EXPLICIT


def test_pages_are_logged_once(caplog, monkeypatch):
    monkeypatch.setattr(Arena, "_told", False)
    with caplog.at_level(logging.INFO, "moetier.tiers.arena"):
        first, second = Arena(2, HUGE_PAGE), Arena(2, HUGE_PAGE)
    assert len(caplog.records) == 1
    assert str(first.pages) in caplog.text
    assert first.extent[0] != second.extent[0]


def test_more_than_there_is():
    with pytest.raises(SettingsError, match="set dram_records lower"):
        Arena(1 << 20, 1 << 40)
