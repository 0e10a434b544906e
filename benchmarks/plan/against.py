"""The planner beside our own measurements: what it gives for the very machine, shape and slots, and what was measured.

    python benchmarks/plan/against.py --machine DOCTOR.json [--vllm vllm-speed.json] [--stack hybrid.json]

DOCTOR.json: `moetier doctor --measure --json` of the machine; vllm-speed.json: `benchmarks/hybrid/under_vllm.py speed`;
hybrid.json: `benchmarks/hybrid/run.py`, whose layers are predicted without an engine. Of under_vllm's rows, those with
all experts in slots give the host's time of a step, the median of the three; nothing else is fitted.
Where $OUT names a folder, plan.json there has the rows, the worst cells, and what the run gives for constants of
src/moetier/plan/costs.py.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engines import under_vllm
from layers import RECORD, constants, without_engine
from rows import Compared, Incomplete, Rows, read_rows, trusted

from moetier.errors import MoetierError
from moetier.machine.file import read_machine
from moetier.plan.hardware import hardware_of

WITHIN, WORST = 0.10, 5
RATES = ("doctor's rates", "server's rates")


def compared(arguments: argparse.Namespace) -> tuple[list[Compared], Rows]:
    """Of the files named on the command line, and the stack's rows; MoetierError where one is not what it must be."""
    machine = read_machine(arguments.machine)
    hardware = hardware_of(machine, RECORD.record)
    if not hardware.gpus:
        raise Incomplete(f"{arguments.machine} has no GPU; it must be the machine that the runs were on")
    table: list[Compared] = []
    if arguments.vllm:
        table += under_vllm(read_rows(arguments.vllm, "--vllm"), hardware, arguments.layers)
    stack: Rows = []
    if arguments.stack:
        stack = trusted(read_rows(arguments.stack, "--stack"), machine.cpu.threads)
        table += without_engine(stack, hardware)
    return table, stack


def summary(table: Sequence[Compared], whose: str) -> dict[str, Any]:
    """Errors by these rates; {} without a row. Uniform routing is a limit and no prediction."""
    rows = [row for row in table if row.note.endswith(whose) and "uniform" not in row.note]
    if not rows:
        return {}
    errors = [abs(row.error) for row in rows]
    worst = sorted(rows, key=lambda row: -abs(row.error))[:WORST]
    return {
        "median": statistics.median(errors),
        "within 10 %": sum(error <= WITHIN for error in errors),
        "of": len(errors),
        "worst": [{"what": row.what, "error": round(row.error, 3)} for row in worst],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", type=Path, required=True)
    parser.add_argument("--vllm", type=Path)
    parser.add_argument("--stack", type=Path)
    parser.add_argument("--layers", type=int, default=6, help="of under_vllm's model, where its JSON does not say")
    arguments = parser.parse_args()
    if not (arguments.vllm or arguments.stack):
        parser.error("nothing to compare: give --vllm, --stack or both")
    try:
        table, stack = compared(arguments)
        given = constants(stack) if stack else {}
    except (MoetierError, OSError) as error:
        parser.error(str(error))
    for row in table:
        figures = f"measured {row.measured:8.1f}  predicted {row.predicted:8.1f} {row.unit:5} {row.error:+5.0%}"
        print(f"{row.what:36} {figures}  {row.note}")
    found = {whose: summary(table, whose) for whose in RATES}
    for whose, of in found.items():
        if of:
            worst = ", ".join(f"{cell['what']} {cell['error']:+.0%}" for cell in of["worst"])
            print(f"{whose}: error {of['median']:.0%} (median), {of['within 10 %']} of {of['of']} within 10 %; {worst}")
    for name, values in given.items():
        print(f"costs.py {name}: {values['costs.py']:.3g}, this run {values['this run']:.3g}")
    if os.environ.get("OUT"):
        plain = [{**vars(row), "error": row.error} for row in table]
        state = {"summary": found, "constants": given, "rows": plain}
        Path(os.environ["OUT"], "plan.json").write_text(json.dumps(state, indent=1))


if __name__ == "__main__":
    main()
