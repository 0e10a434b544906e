"""Print the lines of every room of the house, and fail where a room has outgrown its budget.

Every file of src/, native/, benchmarks/ and tools/ belongs to exactly one room; a file that belongs to none is an
error. Who needs more lines raises the room's number in ROOMS, in the commit that uses them, with the reason beside it.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (".py", ".pyi", ".cpp", ".h", ".inc", ".cu", ".cuh", ".sh", ".c")

ROOMS: dict[str, int] = {
    "src/moetier/contract/": 680,
    "src/moetier/machine/": 1220,
    "src/moetier/kernels/cpu/": 740,
    "src/moetier/kernels/cuda/": 3690,
    "src/moetier/checkpoint/": 2130,  # hf_quant_config.json, keys that contradict each other
    "src/moetier/decision/": 1360,  # keys judged by their words
    "src/moetier/store/": 3120,  # work on threads that hears Ctrl-C
    "src/moetier/tiers/": 1230,  # slots in quarantine
    "src/moetier/trace/": 440,
    "src/moetier/engine/": 2130,  # the sentinel's door
    "src/moetier/sentinel/": 410,
    "src/moetier/identity/": 590,  # calls.py, which every check draws from
    "src/moetier/plan/": 2980,
    "src/moetier/doctor/": 1340,
    "src/moetier/launch/": 2920,
    "src/moetier/vllm/": 1990,  # the sentinel's metrics, start and end
    "src/moetier/transformers/": 220,
    "src/moetier/cli/": 1430,
    "src/moetier/budget.py": 180,  # items of plan and plugin, sizing of slots
    "src/moetier/settings.py": 200,
    "src/moetier/amounts.py": 80,
    "src/moetier/vllm_arguments.py": 120,
    "src/moetier/": 510,  # interrupts
    "src/moetier_bench/": 6940,
    "src/moetier_stack/": 3560,
    "src/moetier_reference/": 570,
    "native/core/": 1880,
    "native/cpu/": 1760,
    "native/python/": 460,
    "native/tests/": 500,
    "benchmarks/": 5880,  # the sentinel: faults found, false alarms, cost
    "tools/": 480,
}
"""Most lines of a file or a folder (which ends with a slash), by its path below the root. The longest path wins."""


def lines(path: Path) -> int:
    """Return the lines of a file."""
    return len(path.read_bytes().splitlines())


def room_of(path: str) -> str | None:
    """Return the room that a file belongs to; None where there is none."""
    rooms = (room for room in ROOMS if path == room or (room.endswith("/") and path.startswith(room)))
    return max(rooms, key=len, default=None)


def counted() -> tuple[dict[str, int], list[str]]:
    """Return the lines of each room, and the files that belong to none."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "src", "native", "benchmarks", "tools"],
        cwd=ROOT, capture_output=True, check=True,
    ).stdout.decode()  # fmt: skip
    sums, homeless = dict.fromkeys(ROOMS, 0), []
    for name in filter(None, listed.split("\0")):
        path = ROOT / name
        if path.suffix not in SOURCES or not path.is_file():
            continue
        room = room_of(name)
        if room is None:
            homeless.append(name)
        else:
            sums[room] += lines(path)
    return sums, homeless


def main() -> int:
    """Print the table; return 1 where a budget is exceeded or a file has no room."""
    sums, homeless = counted()
    width = max(map(len, ROOMS))
    print(f"{'room':<{width}} {'lines':>7} {'budget':>7}")
    for room, total in sums.items():
        print(f"{room:<{width}} {total:>7} {ROOMS[room]:>7}{'  TOO LARGE' if total > ROOMS[room] else ''}")
    print(f"{'together':<{width}} {sum(sums.values()):>7} {sum(ROOMS.values()):>7}")
    for name in homeless:
        print(f"{name}: no room of tools/size.py counts it; put it into one, or add a room", file=sys.stderr)
    over = [room for room, total in sums.items() if total > ROOMS[room]]
    for room in over:
        print(f"{room} has {sums[room]} lines, its budget is {ROOMS[room]}: delete some, or raise the number in "
              "tools/size.py and say there why", file=sys.stderr)  # fmt: skip
    return 1 if over or homeless else 0


if __name__ == "__main__":
    sys.exit(main())
