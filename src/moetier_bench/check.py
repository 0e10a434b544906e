"""Whether results are what was measured: every aggregate recomputed, every hash compared, nothing changed or copied."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import yaml

from moetier_bench import BenchError
from moetier_bench.documents import Recipe, sha256_of
from moetier_bench.possible import impossible
from moetier_bench.provenance import git, not_of
from moetier_bench.result import SUMS, Result, cells_of, listed, parse_result, read_data, tier_cells
from moetier_bench.samples import Cell


def check_file(path: Path) -> tuple[Result | None, list[str]]:
    """The result of one file, and what is wrong with it by itself."""
    try:
        data = read_data(path)
        result = parse_result(data, str(path))
    except BenchError as error:
        return None, [str(error)]
    return result, [f"{path}: {found}" for found in problems(data, result)]


def problems(data: bytes, result: Result) -> Iterator[str]:
    """Yield what a file contradicts itself in. The hashes are of what is written in it, whatever fields came since."""
    raw = json.loads(data)
    try:
        own = sha256_of({key: value for key, value in raw.items() if key != "sha256"})
    except ValueError:  # JSON has neither NaN nor infinities
        yield "it holds a number that is none: NaN or an infinity"
        return
    if own != result.sha256:
        yield "its hash is not that of its content: something was edited"
    for what in ("recipe", "suite", "machine"):
        if result.hashes.get(what) != sha256_of(raw[what]):
            yield f"the hash of its {what} is not that of the {what} in it"
    if sorted(result.hashes) != ["machine", "recipe", "suite"]:
        yield "expected hashes of recipe, suite and machine"
    if result.recipe.model.identity not in (None, result.model.identity):
        yield "the model that was served is not the recipe's"
    whole = (*result.served.cells(), *tier_cells(result.counters_before, result.counters_after))
    yield from _cells_differ("boot", result.boot, whole)
    try:
        probes = result.suite.probes_for(result.recipe)
    except BenchError as error:
        yield str(error)
        return
    done = [section.probe for section in result.sections]
    if done != list(probes[: len(done)]) or (result.status == "ok" and len(done) != len(probes)):
        yield "its probes are not those of its suite and recipe"
    strange = list(impossible(result))
    yield from strange
    if strange:
        return  # there is nothing to compute from what was never measured
    for section in result.sections:
        limit = result.suite.most_foreign_cpus
        yield from _cells_differ(section.probe.probe, section.cells, cells_of(section.probe, section.raw, limit))
    if (result.status == "ok") != (result.failure is None):
        yield "its status and its failure contradict each other"


def _cells_differ(where: str, stored: tuple[Cell, ...], computed: tuple[Cell, ...]) -> Iterator[str]:
    if [cell.name for cell in stored] != [cell.name for cell in computed]:
        yield f"{where}: its cells are not those that its samples give"
        return
    for one, other in zip(stored, computed, strict=True):
        if one != other:
            yield f"{one.name}: stored {one.value} ({one.reason}), its samples give {other.value} ({other.reason})"


def check_folder(folder: Path, root: Path | None = None) -> tuple[list[Result], list[str]]:
    """All results below a folder, and what is wrong. root: the checkout, whose history is asked too."""
    results, found = [], []
    try:
        sums = listed(folder)
    except BenchError as error:
        return [], [str(error)]
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != SUMS)
    for path in paths:
        name = path.relative_to(folder).as_posix()
        if path.suffix != ".json":
            found.append(f"{path}: no result; only results belong here")
            continue
        result, wrong = check_file(path)
        if name not in sums:
            wrong.append(f"{path}: not listed in {SUMS}: copied here, or its run was killed while writing: remove it")
        elif sums[name] != hashlib.sha256(path.read_bytes()).hexdigest():
            wrong.append(f"{path}: not the file that was listed in {SUMS}: restore it from the history")
        if result is not None:
            expected = imported_name(result) if result.origin == "prove" else result.name
            wrong += [f"{path}: by its content it belongs to {expected}"] if name != expected else []
            wrong += [f"{path}: {text}" for text in _against_history(result, root, name)] if root else []
            if not wrong:
                results.append(result)
        found += wrong
    gone = sums.keys() - {path.relative_to(folder).as_posix() for path in paths}
    found += [f"{folder / name}: listed in {SUMS} but gone: restore it from the history" for name in sorted(gone)]
    return results, found + (list(_history(folder, root)) if root else [])


def imported_name(result: Result) -> str:
    """Where a result of someone else lies below results/."""
    return f"imported/{result.sha256[:12]}/{result.name}"


def _against_history(result: Result, root: Path, name: str) -> Iterator[str]:
    """Whether the documents of a run of ours are those of its commit."""
    if name.startswith("imported/") or git(root, "rev-parse", "HEAD") is None:
        return
    if result.code.changed:
        yield f"its tree was changed ({', '.join(result.code.changed[:3])}): no commit has what was measured"
    commit = result.code.commit
    if commit is None or git(root, "cat-file", "-e", f"{commit}^{{commit}}") is None:
        if (git(root, "rev-parse", "--is-shallow-repository") or "").strip() == "false":
            yield f"its commit {commit} is not in the history"
        return
    if result.code.blobs and (other := not_of(result.code, root)):
        yield f"its commit was stated, and {len(other)} of its files are not that commit's: {', '.join(other[:3])}"
    text = git(root, "show", f"{commit}:recipes/{result.recipe.id}.yaml")
    try:
        same = text is not None and Recipe.model_validate(yaml.safe_load(text)) == result.recipe
    except (ValueError, yaml.YAMLError):
        same = False
    if not same:
        yield f"its recipe is not recipes/{result.recipe.id}.yaml of commit {commit[:12]}"


def _history(folder: Path, root: Path) -> Iterator[str]:
    """Results are only ever added: a commit that changes, moves or removes one is named."""
    where = str(folder.resolve())
    log = git(root, "log", "--diff-filter=MDRT", "--format=commit %h", "--name-only", "--", where) or ""
    commit = ""
    for line in log.splitlines():
        if line.startswith("commit "):
            commit = line[7:]
        elif line and not line.endswith(SUMS):
            yield f"{line}: changed after it was added, by commit {commit}"
    now = git(root, "diff", "HEAD", "--diff-filter=MDRT", "--name-only", "--", where) or ""
    yield from (f"{line}: changed since it was committed" for line in now.splitlines() if not line.endswith(SUMS))
    removed = git(root, "log", "--numstat", "--format=", "--", str(folder.resolve() / SUMS)) or ""
    if any(line.split("\t")[1] != "0" for line in removed.splitlines() if "\t" in line):
        yield f"{folder / SUMS}: a line was changed or removed; lines are only ever added"
