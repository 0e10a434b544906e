"""Run under the preloaded tests/store/faults.c: every call of a build or a read gets its fault once. Prints counts.

usage: fault_campaign.py CHECKPOINT FOLDER build|read|heal
"""

import ctypes
import errno
import itertools
import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np

from moetier.errors import CheckpointError, RecordReadError, StoreError
from moetier.store.build import build_store
from moetier.store.checkpoint import Checkpoint
from moetier.store.heal import Healer
from moetier.store.store import Store
from moetier.store.verify import verify_store

READ, WRITE, SYNC, RENAME, ALLOCATE = range(1, 6)
SHORT, FLIP = -1, -2
LIBRARY = ctypes.CDLL(None)


def arm(call, kind, skip=0, times=1, part=""):
    LIBRARY.fault_arm(call, kind, skip, times, str(part).encode())


def disarm():
    LIBRARY.fault_arm(0, 0, 0, 0, b"")


def same(out, whole):
    """The store has the bytes of an undisturbed build."""
    names = {path.name for path in whole.iterdir()}
    assert {path.name for path in out.iterdir()} == names, out
    return all((out / name).read_bytes() == (whole / name).read_bytes() for name in names)


def build(checkpoint, folder, whole):
    """Every call of a build fails once: one clear error, nothing that opens wrongly, and the next build ends it."""
    counts = Counter()
    faults = {
        "write EIO": (WRITE, errno.EIO),
        "write ENOSPC": (WRITE, errno.ENOSPC),
        "write short": (WRITE, SHORT),
        "sync EIO": (SYNC, errno.EIO),
        "rename EIO": (RENAME, errno.EIO),
        "allocate ENOSPC": (ALLOCATE, errno.ENOSPC),
        "read EIO": (READ, errno.EIO),
        "read short": (READ, SHORT),
    }
    for name, (call, kind) in faults.items():
        for skip in itertools.count():
            out = folder / f"{name} {skip}".replace(" ", "-")
            arm(call, kind, skip, 1, folder if call != READ else checkpoint)
            try:
                build_store(checkpoint, out, threads=2)
                message = ""
            except (StoreError, CheckpointError) as error:
                message = str(error)
            hit = LIBRARY.fault_hits()
            disarm()
            if not hit:
                assert not message
                break
            counts[name] += 1
            assert bool(message) is (kind != SHORT), (name, skip)
            assert not message or (";" in message and "Errno" not in message), f"no remedy: {message}"
            if out.exists():  # the fault came after the rename: the store is whole
                assert not verify_store(out).bad
            build_store(checkpoint, out, threads=2)
            assert same(out, whole), (name, skip)
            assert not out.with_name(out.name + ".partial").exists()
    return counts


def read(checkpoint, folder, whole):
    """Reads of records: a fault once is read over, a fault that stays is an error that names the record."""
    counts = Counter()
    with Store.open(whole) as store:
        record, wanted = (np.empty(store.manifest.record_stride, np.uint8) for _ in range(2))
        for layer, expert in itertools.product(
            range(len(store.manifest.layers)), range(store.manifest.geometry.experts)
        ):
            disarm()
            store.read_record(layer, expert, wanted)
            for name, kind in (("EIO", errno.EIO), ("flip", FLIP), ("short", SHORT)):
                arm(READ, kind, 0, 1, ".records")
                record[:] = 0
                store.read_record(layer, expert, record)
                assert np.array_equal(record, wanted)
                counts[f"{name} once"] += LIBRARY.fault_hits()
                if kind == SHORT:
                    continue
                arm(READ, kind, 0, 1000, ".records")
                try:
                    store.read_record(layer, expert, record)
                except RecordReadError as error:
                    counts[f"{name} for good"] += f"expert {expert} in" in str(error)
                else:
                    raise AssertionError("a record that read wrongly was returned")
        disarm()
    for skip in range(8):
        arm(READ, FLIP, skip, 2, ".records")
        report = verify_store(whole, threads=1)
        assert len(report.bad) == 1, report.bad
        counts["flips that verify found"] += 1
        disarm()
    return counts


def heal(checkpoint, folder, whole):
    """Healing: right bytes in memory whatever the disk does, and never a store that verifies wrongly."""
    counts = Counter()
    opened = Checkpoint.open(checkpoint)
    with Store.open(whole) as store:
        healer = Healer(store, opened)
        record, wanted = (np.empty(store.manifest.record_stride, np.uint8) for _ in range(2))
        for expert, (name, call, kind) in enumerate(
            (("write EIO", WRITE, errno.EIO), ("sync EIO", SYNC, errno.EIO), ("write short", WRITE, SHORT))
        ):
            disarm()
            store.read_record(0, expert, wanted)
            with store.record_file(0).open("r+b") as file:
                file.seek(store.offset(expert) + 77)
                file.write(bytes([wanted[77] ^ 0xFF]))
            arm(call, kind, 0, 1, ".records")
            healer.heal(0, expert, "bad", record)
            assert np.array_equal(record, wanted)
            counts[name] += LIBRARY.fault_hits()
            disarm()
            if kind != SHORT:
                healer.heal(0, expert, "still bad", record)
            assert not verify_store(whole).bad
        arm(READ, errno.EIO, 0, 1000, checkpoint)
        try:
            healer.heal(0, 0, "bad", record)
        except RecordReadError:
            counts["checkpoint EIO"] += 1
        disarm()
    return counts


if __name__ == "__main__":
    source, base = Path(sys.argv[1]), Path(sys.argv[2])
    build_store(source, base / "whole")
    work = {"build": build, "read": read, "heal": heal}[sys.argv[3]]
    (base / "out").mkdir()
    print(json.dumps(work(source, base / "out", base / "whole")))
