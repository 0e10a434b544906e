"""The machine-code gate: every device kernel compiled for every target, without a GPU, and its code looked at.

`python benchmarks/gpu/gate.py [--write]` checks all and prints the table; --write puts it into docs/device-kernels.md.
Of each kernel: the matrix instruction that is meant is there, and not serialized; float multiply-adds are fused only
where we wrote so (in PTX every other multiplication and addition carries its own rounding, so the assembler may not
fuse it; what FFMA the machine code has beyond those comes from the exact division); no float atomics; no local memory.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moetier.contract import BLOCK, Family
from moetier.contract.oracle import segments
from moetier.kernels.cuda import decode as cuda_decode
from moetier.kernels.cuda import nvrtc
from moetier.kernels.cuda import path as cuda_path
from moetier.kernels.cuda.base import Sizes
from moetier.plan.catalog import layer_of
from moetier_reference import triton_kernels as kernels

SIZES = Sizes(layer_of("deepseek-v4-flash"), Family(swiglu_limit=10.0, route_weight_before_down=True))
TARGETS = ("sm_80", "sm_89", "sm_90a", "sm_100", "sm_120")
SHARED_A_BLOCK = {"sm_80": 163, "sm_89": 99, "sm_90a": 227, "sm_100": 227, "sm_120": 99}  # KiB
SHARED_A_MULTIPROCESSOR = {"sm_80": 164, "sm_89": 100, "sm_90a": 228, "sm_100": 228, "sm_120": 100}
MULTIPROCESSORS = {"sm_80": 108, "sm_89": 142, "sm_90a": 132, "sm_100": 148, "sm_120": 170}
WARPS_A_MULTIPROCESSOR = {"sm_80": 64, "sm_89": 48, "sm_90a": 64, "sm_100": 64, "sm_120": 48}
DOCS = Path(__file__).parents[2] / "docs" / "device-kernels.md"
MARKS = ("<!-- gate table -->", "<!-- end of gate table -->")

SOURCES = ("one", "one hybrid", "decode", "decode hybrid", "prefill")
HYBRID_TOKENS = 64
INTEGER = r"IMMA\.16832\.S8\.S8|IGMMA|UTCIMMA|IDP\.4A"
BF16, WARPGROUP = r"HMMA\.16816\.F32\.BF16", r"HGMMA\.64x64x16\.F32\.BF16"


@dataclass(frozen=True)
class Compiled:
    """A kernel for a target. fused: the float multiply-adds that its source writes, all with exact products."""

    name: str
    target: str
    cubin: bytes
    ptx: str
    warps: int
    shared_bytes: int
    matrix: str | None = None
    fused: int = 0


def _entries(ptx: str) -> dict[str, str]:
    """PTX of each kernel by name."""
    parts = re.split(r"\.visible \.entry (\w+)", ptx)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def cuda_kernels(target: str, sources: tuple[str, ...] = SOURCES) -> Iterator[Compiled]:
    """The kernels of one.cu and decode.cu, plain and for a hybrid step, and of prefill.cu."""
    g = SIZES.geometry
    for source in sources:
        fused: dict[str, int] = {}
        shared: dict[str, int] = {}
        tokens = HYBRID_TOKENS if source.endswith("hybrid") else 0
        if source.startswith("one"):
            device = cuda_decode.OneDevice(MULTIPROCESSORS[target], SHARED_A_BLOCK[target] * 1024)
            one = cuda_decode.one_sizes(SIZES, device)
            assert one
            cubin, ptx = nvrtc.compile_source("one.cu", one.macros(SIZES, tokens), target)
            fused = {"decode_one": 2 * one.stage_blocks * 4}  # of gate and up, and of down, 4 values a lane of a block
            shared = {"decode_one": one.shared_bytes}
            warps, matrix = one.warps, INTEGER
        elif source.startswith("decode"):
            # Of a tile a lane keeps 2 results for a single pair, and 4 for several; 16 tiles and 8 are unrolled.
            fused = {"gate_up_decode": 16 * 6, "down_decode": 8 * 6}
            cubin, ptx = nvrtc.compile_source("decode.cu", cuda_decode.few_macros(SIZES, tokens), target)
            up, down = cuda_decode.few_rings(SIZES)
            shared = {"gate_up_decode": up, "down_decode": down + g.top_k * 8 * 64}
            warps, matrix = 8, INTEGER
        else:
            panel = cuda_path.panel_sizes(target, SHARED_A_BLOCK[target] * 1024)
            warps = panel.threads // 32
            cubin, ptx = nvrtc.compile_source("prefill.cu", cuda_path.prefill_macros(SIZES, panel), target)
            if panel is cuda_path.WGMMA:  # (16 + 32 + ... + 128 pairs) / 2 values a lane, two stages of four blocks
                each, matrix = 288 * 2 * panel.stage_blocks, WARPGROUP
            else:  # (1 + ... + 6) * 8 values a lane, two blocks
                each, matrix = 168 * panel.stage_blocks, BF16
            fused = {"gate_up_prefill": each, "down_prefill": each}
            shared = {"gate_up_prefill": panel.shared_bytes(g.hidden // BLOCK)}
            shared["down_prefill"] = panel.shared_bytes(g.slice_intermediate // BLOCK)
        for name, text in _entries(ptx).items():
            label = f"{name} (hybrid)" if tokens and name in fused else name
            yield Compiled(
                label,
                target,
                cubin,
                text,
                32 if name == "plan_tiles" else warps if name in fused else 8,
                shared.get(name, 0),
                matrix if name in fused else None,
                fused.get(name, 0),
            )


POINTERS = {
    **dict.fromkeys(("q", "e", "hq", "he"), "*i8"),
    **dict.fromkeys(("order", "offsets", "ends", "tile_ends", "slot_table", "ids", "counts", "cursor"), "*i32"),
    **dict.fromkeys(("weights", "rows"), "*fp32"),
    **dict.fromkeys(("x", "out"), "*i16"),
    "slots": "*u8",
}
SCALARS = {"stride": "i64", "pairs": "i32"}


def triton_kernels(target: str, tiles: tuple[int, ...] = (16, 64), small: bool = True) -> Iterator[Compiled]:
    """The Triton kernels; gate_up and down for tiles of few and of many pairs; small: the others too."""
    g = SIZES.geometry
    sizes = {
        "E": g.experts, "E_PAD": 256, "TOP_K": g.top_k, "TOP_K_PAD": 8, "HIDDEN": g.hidden, "INNER": g.intermediate,
        "SLICES": 1, "SLICE_BYTES": SIZES.layout.slice_bytes, "LIMIT": 10.0, "WEIGHTED": True, "CHECKED": True,
        "K": g.hidden, "B": 32, "BLOCK": 1024,
    }  # fmt: skip
    wanted: list[tuple[str, dict[str, Any], str | None]] = [
        (name, {"BM": 16, "BN": 1024}, None)
        for name in (("quantize", "plan_count", "plan_scan", "plan_scatter", "combine") if small else ())
    ]
    for bm in tiles:
        wanted += [("gate_up", {"BM": bm, "BN": 32, "S": segments(g.hidden // BLOCK)}, INTEGER)]
        wanted += [("down", {"BM": bm, "BN": 32, "S": segments(g.slice_intermediate // BLOCK)}, INTEGER)]
    for name, settings, matrix in wanted:
        function = getattr(kernels, name)
        known = sizes | settings
        signature = {a: POINTERS.get(a) or SCALARS.get(a) or "constexpr" for a in function.arg_names}
        constants = {(i,): known[a] for i, a in enumerate(function.arg_names) if signature[a] == "constexpr"}
        aligned = {(i,): [["tt.divisibility", 16]] for i, a in enumerate(function.arg_names) if a in POINTERS}
        source = ASTSource(function, signature, constants, aligned)
        options = {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": False}
        compiled = triton.compile(source, target=GPUTarget("cuda", int(re.sub(r"\D", "", target)), 32), options=options)
        label = f"triton {name}" + (f" ({settings['BM']})" if matrix else "")
        yield Compiled(label, target, compiled.asm["cubin"], compiled.asm["ptx"], 4, compiled.metadata.shared, matrix)


def disassemble(cubin: bytes, kernel: str | None) -> tuple[list[str], dict[str, int]]:
    """Opcodes of one kernel (None: the only one) and what it uses: REG, STACK, SHARED, LOCAL."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        path = f"{tool.parent}:/usr/bin:/bin"
        run = [str(tool), "-sass", "-res-usage", file.name]
        text = subprocess.run(run, capture_output=True, text=True, check=True, env={"PATH": path}).stdout
    sass = re.split(r"Function : (\S+)", text)
    bodies = dict(zip(sass[1::2], sass[2::2], strict=True))
    usages = {
        name: {key: int(value) for key, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", line)}
        for name, line in re.findall(r"Function (\S+?):\s*\n\s*(.*)", text)
    }
    name = kernel or next(iter(bodies))
    opcodes = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.a-z]*)", bodies[name], re.MULTILINE)
    return opcodes, usages[name]


def findings(kernel: Compiled) -> tuple[list[str], dict[str, Any]]:
    """What is wrong with a kernel, and its row of the table."""
    name = None if kernel.name.startswith("triton") else kernel.name.split()[0]
    opcodes, usage = disassemble(kernel.cubin, name)
    count = Counter(opcodes)

    def matching(pattern: str) -> int:
        return sum(n for opcode, n in count.items() if re.match(pattern, opcode))

    wrong = []
    if kernel.matrix and not matching(kernel.matrix):
        wrong.append(f"no instruction like {kernel.matrix}")
    if matching(r"HGMMA") and matching(r"WARPGROUP\.DEPBAR") >= matching(r"HGMMA"):
        wrong.append("every warpgroup multiplication is waited for alone: the assembler has serialized them")
    if matching(r"STL|LDL") or usage["LOCAL"]:
        wrong.append(f"local memory: {matching('STL|LDL')} accesses")
    if matching(r"(RED|ATOM\w*)\..*F(16|32|64)"):
        wrong.append("float atomics")
    fused = len(re.findall(r"\b(?:fma|mad)(?:\.\w+)*\.f32", kernel.ptx))
    if fused != kernel.fused:
        wrong.append(f"{fused} fused multiply-adds in PTX, {kernel.fused} written")
    loose = re.findall(r"\b(?:mul|add|sub)(?:\.ftz)?\.f32", kernel.ptx)
    if loose:
        wrong.append(f"{len(loose)} float operations that the assembler may fuse")
    if matching(r"FFMA") > 0 and not kernel.fused and not matching(r"MUFU\.RCP"):
        wrong.append("fused multiply-adds in machine code without a division to explain them")
    shared = kernel.shared_bytes if name is None else kernel.shared_bytes + usage["SHARED"]
    registers = -(-usage["REG"] // 8) * 8 * 32 * kernel.warps
    blocks = min(
        65536 // registers,
        SHARED_A_MULTIPROCESSOR[kernel.target] * 1024 // (shared + 1024),
        WARPS_A_MULTIPROCESSOR[kernel.target] // kernel.warps,
    )
    tensor = next((op for op in count if kernel.matrix and re.match(kernel.matrix, op)), "-")
    return wrong, {
        "kernel": kernel.name,
        "target": kernel.target,
        "registers": usage["REG"],
        "shared KiB": round(shared / 1024, 1),
        "warps a multiprocessor": blocks * kernel.warps,
        "matrix instruction": tensor,
        "FFMA written / in all": f"{kernel.fused} / {matching('FFMA')}",
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as a Markdown table."""
    head = list(rows[0])
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(str(row[key]) for key in head) + " |" for row in rows])


def main() -> int:
    """Check all; exit 1 where something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the table into docs/device-kernels.md")
    write = parser.parse_args().write
    rows, failed = [], False
    for target in TARGETS:
        for kernel in [*cuda_kernels(target), *triton_kernels(target)]:
            wrong, row = findings(kernel)
            rows.append(row)
            for text in wrong:
                print(f"{kernel.name} for {target}: {text}")
            failed |= bool(wrong)
    print(table(rows))
    if write:
        text = DOCS.read_text()
        before, rest = text.split(MARKS[0])
        DOCS.write_text(f"{before}{MARKS[0]}\n\n{table(rows)}\n\n{MARKS[1]}{rest.split(MARKS[1])[1]}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
