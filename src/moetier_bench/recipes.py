"""A recipe run as a user asks for it: what cannot become a valid result is refused, what was measured is written."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from moetier_bench import BenchError
from moetier_bench.documents import Library, MachineFile, Recipe, Suite, sha256_of
from moetier_bench.here import check_machine, machine_of, set_folders
from moetier_bench.provenance import Code, code_of, machine_here, model_files, package_blobs, software, stated
from moetier_bench.result import Result, name_of, refuse_existing, require_space, write_result
from moetier_bench.run import Run, Say
from moetier_bench.server import Place, free_port
from moetier_bench.sweep import Measured


def run_recipe(
    library: Library,
    recipe: Recipe,
    suites: Sequence[Suite],
    out: Path,
    say: Say,
    *,
    machine: str | None = None,
    model: Path | None = None,
    store: Path | None = None,
    allow_dirty: bool = False,
    commit: str | None = None,
    within: float | None = None,
) -> Iterator[tuple[Path, Result]]:
    """Run a recipe, one server for all suites, and write each result below `out` as soon as it is whole; BenchError
    for what cannot become a valid result. One that cannot be written is told when all the others are.

    commit: of a copy without git. within: seconds, from when the server is ready, after which no
    further probe begins: what a start takes differs too much from one to the next to decide what is measured.
    """
    if recipe.status == "plan":
        raise BenchError(f"{recipe.id} is a plan: pin its revision, name its identity and set its status to run first")
    if len({suite.id for suite in suites}) != len(suites):
        raise BenchError("a suite is named twice: each gives one result, which is never overwritten")
    code = _code(library.root, commit)
    named = library.machine(machine) if machine else machine_of(library)
    check_machine(recipe, named)
    if code.commit is None and not allow_dirty:
        raise BenchError(
            f"a result is bound to a commit: expected a git checkout that moetier is installed from (make setup does "
            f"that), found {library.root}; install it so, give --commit for a copy without git, or use --allow-dirty"
        )
    if code.changed and not allow_dirty:
        raise BenchError(
            f"a result is bound to a commit, and this tree is not clean: {', '.join(code.changed[:5])}; commit the "
            "changes, or use --allow-dirty"
        )
    if code.changed and out.resolve() == (library.root / "results").resolve():
        raise BenchError("a result of a changed tree does not go to results/; name another folder with --out")
    folder = model or library.model_folder(recipe.model)
    with tempfile.TemporaryDirectory(prefix="moetier-bench-") as scratch:
        place = Place(
            folder.resolve(),
            (store or library.root / "stores" / recipe.model.name).resolve(),
            Path(scratch).resolve(),
            free_port(),
        )
        files = model_files(folder)
        if recipe.model.identity not in (None, files.identity):
            raise BenchError(f"{recipe.id}: expected the checkpoint {recipe.model.identity}, found {files.identity}")
        sets = set_folders(library.root)
        run = Run(library.root, recipe, tuple(suites), named, code, files, place, sets, within=within)
        for suite in suites:
            suite.probes_for(recipe)  # wrong parameters are an error now, not after a start
            refuse_existing(out, name_of(named, recipe, suite, code))
        require_space(out)
        unwritten = []
        for result in run.results(say):
            try:
                path = write_result(out, result)
            except BenchError as error:  # those that wait for the server's end are still to come
                say(str(error))
                unwritten.append(str(error))
                continue
            yield path, result
        if unwritten:
            raise BenchError("; ".join(unwritten))


def _code(root: Path, commit: str | None) -> Code:
    """As git says, or where there is none as was stated."""
    code = code_of(root)
    if commit is None:
        return code
    if not re.fullmatch(r"[0-9a-f]{40}", commit):
        raise BenchError(f"--commit {commit!r}: expected the 40 digits of `git rev-parse HEAD`")
    if code.commit is not None:
        raise BenchError(f"--commit is for a copy without git; this is a checkout of {code.commit[:12]}; leave it out")
    return stated(commit)


def measure_cells(
    library: Library, say: Say, model: Path | None, store: Path | None
) -> tuple[Callable[[Recipe, Suite], Measured], str]:
    """How a sweep measures a recipe here, and what its figures depend on besides: code, packages and machine."""
    here = MachineFile.model_validate(machine_here("here", "the machine of the sweep"))
    code, installed = code_of(library.root), software()

    def measure(recipe: Recipe, suite: Suite) -> Measured:
        folder = model or library.model_folder(recipe.model)
        with tempfile.TemporaryDirectory(prefix="moetier-sweep-") as scratch:
            where = (store or library.root / "stores" / recipe.model.name).resolve()
            place = Place(folder.resolve(), where, Path(scratch).resolve(), free_port())
            files = model_files(folder)
            sets = set_folders(library.root)
            result = Run(library.root, recipe, (suite,), here, code, files, place, sets).measure(say)
        return tuple(result.cells.values()), result.failure, result.load.others

    return measure, sha256_of([package_blobs(), installed.model_dump(mode="json"), here.identity])
