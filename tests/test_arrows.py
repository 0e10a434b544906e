"""Which room may know which: an import goes to the same room or to a lower one, never up, and never round."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
ROOMS = (
    ("errors", "visible", "files", "folders", "git", "interrupts"),
    ("amounts", "settings", "vllm_arguments"),
    ("contract",),
    ("machine",),
    ("kernels",),
    ("checkpoint",),
    ("decision",),
    ("store",),
    ("tiers",),
    ("trace",),
    ("budget",),
    ("engine",),
    ("sentinel",),
    ("identity",),
    ("plan",),
    ("doctor",),
    ("launch",),
    ("vllm", "transformers"),
    ("cli",),
    ("moetier_reference",),
    ("moetier_stack",),
    ("moetier_bench",),
)
"""From the lowest up. Modules of one row may know each other; `moetier` itself knows nobody."""
RANK = {name: rank for rank, row in enumerate(ROOMS) for name in row}


def room(module: str) -> str:
    """Return the folder or file below moetier, or the package, that a module is in."""
    parts = module.split(".")
    return parts[0] if parts[0] != "moetier" else parts[1] if len(parts) > 1 else "moetier"


def imports() -> Iterator[tuple[str, int, str, str]]:
    """Yield file, line, and the rooms that import and are imported; imports inside functions too."""
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE)
        here = room(".".join(name.with_suffix("").parts))
        for node in ast.walk(ast.parse(path.read_text())):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                modules = [f"{node.module}.{alias.name}" for alias in node.names]
            for module in modules:
                if module.split(".")[0].startswith("moetier"):
                    yield str(name), node.lineno, here, room(module)


def test_no_room_imports_a_higher_one() -> None:
    alone = ("moetier", "__init__", "__main__", "__version__")
    found = [each for each in imports() if each[2] not in alone and each[3] not in alone]
    assert len(found) > 500
    unknown = {name for _, _, *names in found for name in names} - RANK.keys()
    assert not unknown, f"give these a room in ROOMS: {sorted(unknown)}"
    wrong = [
        f"{file}:{line}: {here} imports {there}, a higher room"
        for file, line, here, there in found
        if RANK[there] > RANK[here]
    ]
    assert not wrong, "\n".join(wrong)


def loaded(statement: str, forbidden: str = "") -> set[str]:
    """Return the modules that a fresh process has after a statement; importing a forbidden one fails in it."""
    code = f"""
import sys
class Forbid:
    def find_spec(self, name, path=None, target=None):
        if {forbidden!r} and name.startswith({forbidden!r}):
            raise ModuleNotFoundError(name + " is not there", name=name)
sys.meta_path.insert(0, Forbid())
try:
    {statement}
except SystemExit as end:
    assert not end.code, end.code
print("\\nLOADED", *(name for name in sys.modules if name.startswith("moetier")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("LOADED")[2].split())


def verb(*words: str) -> str:
    """Return the statement that runs the command line."""
    return f"sys.argv = ['moetier', *{words!r}]; from moetier.cli import main; main()"


def test_version_loads_little() -> None:
    modules = loaded(verb("version"))
    assert "moetier.kernels.cpu.isa" in modules
    assert len(modules) < 40, sorted(modules)


@pytest.mark.parametrize(
    "words",
    [("plan", "qwen3-235b", "--gpus", "1x32GB", "--ram", "192GB"), ("plan", "--models"), ("version",), ("--help",)],
    ids=" ".join,
)
def test_planning_needs_no_extension(words: tuple[str, ...]) -> None:
    """As in an installation without a compiler: what was compiled is not there."""
    loaded(verb(*words), forbidden="moetier.kernels.cpu._native")


def test_nothing_that_serves_knows_the_benchmarks() -> None:
    loaded("import moetier.vllm.plugin, moetier.launch.start, moetier.cli.serve", forbidden="moetier_")


def test_a_package_that_is_not_there_costs_its_own_verbs_alone() -> None:
    loaded(verb("--help"), forbidden="moetier_")
    with pytest.raises(AssertionError, match="`moetier bench` is in the package moetier_bench, which is not here"):
        loaded(verb("bench", "list"), forbidden="moetier_")


def test_the_life_of_a_step_names_files_that_are_there() -> None:
    text = (SOURCE.parent / "docs" / "step.md").read_text()
    named = re.findall(r"`([\w/]+\.py)`", text)
    assert len(named) > 25
    assert not [name for name in named if not (SOURCE / "moetier" / name).is_file()]
