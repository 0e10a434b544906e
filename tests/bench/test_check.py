"""Tampering: a committed result is edited in every way we could think of, and `check` finds each."""

from __future__ import annotations

import json
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from moetier_bench import BenchError
from moetier_bench.check import check_file, check_folder, problems
from moetier_bench.documents import sha256_of
from moetier_bench.provenance import git_blob, stated
from moetier_bench.result import SUMS, Result, Section, cells_of, listed, tier_cells, to_text, write_result
from moetier_bench.samples import Cell
from tests.bench.made import checkout, commit_all, git, made


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout with two committed results."""
    root = tmp_path_factory.mktemp("checkout")
    commit = checkout(root)
    for name in ("tiny/a", "tiny/b"):
        write_result(root / "results", made(name, commit=commit))
        commit_all(root)
    return root


@pytest.fixture
def root(committed: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(committed, tmp_path / "copy"))


def found(root: Path) -> list[str]:
    return check_folder(root / "results", root)[1]


def file_of(root: Path, name: str = "tiny__a") -> Path:
    return next((root / "results").glob(f"here/{name}__*.json"))


def test_nothing_is_found_where_nothing_was_done(root: Path) -> None:
    results, wrong = check_folder(root / "results", root)
    assert wrong == []
    assert sorted(result.recipe.id for result in results) == ["tiny/a", "tiny/b"]


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Writing stops where a file would be larger: in the middle of a line, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def test_a_disk_that_is_full_when_a_result_is_listed_leaves_the_others_valid(tmp_path: Path) -> None:
    a, b = made("tiny/a"), made("tiny/b")
    size = max(len(to_text(one.sealed())) for one in (a, b))
    others = "".join(f"{number:064x}  here/other{number}.json\n" for number in range(size // 64 + 1))
    (tmp_path / SUMS).write_text(others)
    with files_of_at_most(len(others) + 30), pytest.raises(BenchError, match="this result is lost"):
        write_result(tmp_path, a)
    assert (tmp_path / SUMS).read_text() == others
    assert [*tmp_path.glob("here/*")] == []
    written = [write_result(tmp_path, one) for one in (b, a)]
    assert [*listed(tmp_path)][-2:] == [path.relative_to(tmp_path).as_posix() for path in written]


Edit = Callable[[dict[str, Any]], None]


def section(state: dict[str, Any], number: int) -> dict[str, Any]:
    part: dict[str, Any] = state["sections"][number]
    return part


def set_cell(state: dict[str, Any], key: str, value: Any) -> None:
    section(state, 0)["cells"][0][key] = value


def faster(state: dict[str, Any]) -> None:
    """Every gap of the first stream halved: the samples themselves are made up."""
    stream = section(state, 0)["raw"]["trials"][0]["streams"][0]
    stream["gaps_us"] = [gap // 2 for gap in stream["gaps_us"]]


def more_tokens(state: dict[str, Any]) -> None:
    stream = section(state, 0)["raw"]["trials"][0]["streams"][0]
    stream["tokens"] = [2 * count for count in stream["tokens"]]


EDITS: dict[str, Edit] = {
    "a sample": faster,
    "tokens of a sample": more_tokens,
    "a trial removed": lambda s: section(s, 0)["raw"]["trials"].pop(2),
    "an aggregate": lambda s: set_cell(s, "value", 1e4),
    "the range of an aggregate": lambda s: set_cell(s, "low", 49.9),
    "a reason erased": lambda s: s["boot"][2].update(reason=None, value=1.0, low=1.0, high=1.0, samples=[1.0]),
    "a cell removed": lambda s: section(s, 0)["cells"].pop(),
    "a probe removed": lambda s: s["sections"].pop(),
    "a parameter of a probe": lambda s: section(s, 0)["probe"].update(repeats=4),
    "the hash of the recipe": lambda s: s["hashes"].update(recipe="f" * 64),
    "the recipe": lambda s: s["recipe"].update(summary="on a small machine"),
    "the machine": lambda s: s["machine"].update(summary="a laptop"),
    "the commit": lambda s: s["code"].update(commit="2" * 40),
    "a version": lambda s: s["software"]["packages"].update(numpy="9.9"),
    "a hash of a file": lambda s: s["model"]["files"].update({"config.json": "4" * 64}),
    "the model": lambda s: s["model"].update(identity="6" * 64),
    "the load": lambda s: s["load"].update(before=[0.0, 0.0, 0.0]),
    "the command": lambda s: s["served"]["command"].append("--fast"),
    "the status": lambda s: s.update(failure="none"),
    "the date": lambda s: s.update(started="2027-01-01T00:00:00Z"),
}


@pytest.mark.parametrize("what", EDITS)
def test_an_edit_is_found_by_the_file_alone(root: Path, what: str) -> None:
    path = file_of(root)
    state = json.loads(path.read_text())
    EDITS[what](state)
    path.write_text(json.dumps(state))
    assert any("its hash is not that of its content" in line for line in found(root)) or what == "a reason erased"
    assert found(root)


@pytest.mark.parametrize("what", EDITS)
def test_an_edit_with_all_hashes_made_anew_is_found_by_the_history(root: Path, what: str) -> None:
    path = file_of(root)
    state = json.loads(path.read_text())
    EDITS[what](state)
    state["sha256"] = sha256_of({key: value for key, value in state.items() if key != "sha256"})
    path.write_text(json.dumps(state))
    relist(root)
    assert any("changed since it was committed" in line for line in found(root))
    commit_all(root)
    assert any("changed after it was added, by commit" in line for line in found(root))


COMPUTED = ["an aggregate", "the range of an aggregate", "a reason erased", "a cell removed", "a trial removed"]
COMPUTED += ["a sample", "tokens of a sample", "a probe removed", "a parameter of a probe", "the hash of the recipe"]
COMPUTED += ["the recipe", "the machine", "the model", "the status", "the commit"]


@pytest.mark.parametrize("what", COMPUTED)
def test_an_edit_that_contradicts_the_rest_is_found_even_where_it_was_never_committed(root: Path, what: str) -> None:
    git(root, "rm", "-q", "-r", "--cached", "results")
    path = file_of(root)
    state = json.loads(path.read_text())
    EDITS[what](state)
    state["sha256"] = sha256_of({key: value for key, value in state.items() if key != "sha256"})
    path.write_text(json.dumps(state))
    relist(root)
    assert any("tiny__a" in line and "changed" not in line for line in found(root))


def stream_of(state: dict[str, Any], number: int = 0) -> dict[str, Any]:
    stream: dict[str, Any] = section(state, number)["raw"]["trials"][0]["streams"][0]
    return stream


def trial_of(state: dict[str, Any]) -> dict[str, Any]:
    trial: dict[str, Any] = section(state, 0)["raw"]["trials"][0]
    return trial


def another(state: dict[str, Any]) -> None:
    """A good trial twice: as if it had been measured again until it was."""
    trials = section(state, 0)["raw"]["trials"]
    trials.append(trials[0])


def shrunk(state: dict[str, Any]) -> None:
    for counters, value in (("counters_before", 5.0), ("counters_after", 4.0)):
        state[counters] = {"vllm:prompt_tokens_total": value}


PAGES = {"at": 0.0, "rss_mib": 1.0, "pss_mib": 2.0}
CACHED = {"vllm:prefix_cache_hits_total": 5.0, "vllm:prefix_cache_queries_total": 4.0}
HITS = {"moetier_hits_total": 5.0, "moetier_pairs_total": 4.0}


def instant(state: dict[str, Any]) -> None:
    """As many tokens at once as no stream brings."""
    stream = stream_of(state)
    stream.update(end=stream["sent"], gaps_us=[0], tokens=[10**6], completion_tokens=10**6)


IMPOSSIBLE: dict[str, tuple[Edit, str]] = {
    "negative seconds": (lambda s: trial_of(s).update(seconds=-1.0), "decode: raw.trials.seconds -1"),
    "negative energy": (lambda s: trial_of(s).update(joules=-1.0), "decode: raw.trials.joules -1"),
    "an end before the beginning": (lambda s: stream_of(s).update(end=-0.5), "and ended at -0.5 s"),
    "sent before it was due": (lambda s: stream_of(s).update(due=0.5), "due at 0.5 s was sent at"),
    "tokens after the end": (lambda s: stream_of(s)["gaps_us"].append(9 * 10**6), "or after its end"),
    "arrivals without tokens": (lambda s: stream_of(s)["tokens"].pop(), "brought tokens"),
    "a gap backwards": (lambda s: stream_of(s)["gaps_us"].__setitem__(1, -5), "arrived before they were sent"),
    "more tokens than asked": (lambda s: stream_of(s, 2).update(completion_tokens=17), "17 tokens, at most 16"),
    "more cached than sent": (lambda s: stream_of(s, 1).update(cached_tokens=33), "33 tokens of a prompt of 32"),
    "a trial more": (another, "5 trials of C1 were to be measured, found 6"),
    "a trial fewer": (lambda s: section(s, 0)["raw"]["trials"].pop(), "5 trials of C2 were to be measured, found 4"),
    "a trial of another label": (lambda s: trial_of(s).update(label="C3"), "found 1"),
    "a probe quicker than its trials": (lambda s: section(s, 0).update(seconds=0.0) or slow(s), "in 0.0 s"),
    "a run quicker than its probes": (lambda s: section(s, 1).update(seconds=900.0), "of a run of 60 s"),
    "a start of no time": (lambda s: s["served"].update(start_seconds=[-1.0]), "served.start_seconds -1"),
    "a start longer than the run": (lambda s: s["served"].update(start_seconds=[99.0]), "a start took 99 s of a run"),
    "a probe of no time": (lambda s: section(s, 1).update(seconds=-1.0), "prefill: seconds -1"),
    "a run backwards": (lambda s: s.update(finished="2026-01-02T03:04:00Z"), "it ended 5 s before it began"),
    "an idle server of no CPU": (lambda s: s["served"].update(idle_cpus=-0.5), "served.idle_cpus -0.5"),
    "a negative load": (lambda s: s["load"].update(others=-0.1), "load.others -0.1"),
    "a negative counter": (lambda s: s.update(counters_before={"a": -2.0}), "counters before.a -2"),
    "a negative count of a trial": (lambda s: trial_of(s).update(counters={"a": -2.0}), "raw.trials.counters.a -2"),
    "more CPUs than there are": (lambda s: trial_of(s).update(foreign_cpus=9e9), "CPUs were used of"),
    "more without shared pages": (lambda s: s["served"].update(footprint=PAGES), "2 MiB without what is shared, 1"),
    "more records than there are": (
        lambda s: s["served"].update(placed={"DRAM": 9, "all": 8}),
        "more records in a tier",
    ),
    "more cached than asked for": (lambda s: s.update(counters_after=CACHED), "grew by 5, of which it is a part"),
    "more hits than pairs in a trial": (
        lambda s: trial_of(s).update(counters=HITS),
        "grew by 5, of which it is a part",
    ),
    "tokens in no time": (instant, "tokens in 0 s: more than anything makes"),
    "counters that fall": (shrunk, "a counter fell"),
}


def slow(state: dict[str, Any]) -> None:
    trial_of(state).update(seconds=9.0)


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_what_cannot_have_been_measured_is_found_with_every_cell_and_hash_made_anew(what: str) -> None:
    edit, said = IMPOSSIBLE[what]
    state = json.loads(to_text(made()))
    edit(state)
    result = Result.model_validate(state)
    sections = [s.model_copy(update={"cells": cells_again(s)}) for s in result.sections]
    boot = (*result.served.cells(), *tier_cells(result.counters_before, result.counters_after))
    result = result.model_copy(update={"sections": tuple(sections), "boot": boot}).sealed()
    wrong = list(problems(to_text(result).encode(), result))
    assert any(said in line for line in wrong), wrong


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("where", ["trial", "answer"])
def test_what_is_no_number_is_no_result(where: str, number: str, tmp_path: Path) -> None:
    state = json.loads(to_text(made()))
    if where == "trial":
        trial_of(state).update(seconds=12345.0)
    else:
        answer = {"task": "a", "id": 1, "digest": "0", "thinking": False, "seconds": 12345.0}
        section(state, 0)["raw"]["answers"] = [answer]
    path = tmp_path / "r.json"
    path.write_text(json.dumps(state).replace("12345.0", number))
    wrong = check_file(path)[1]
    assert any("finite number" in line or "a number that is none" in line for line in wrong), wrong


def cells_again(part: Section) -> tuple[Cell, ...]:
    """As a forger would, who leaves them where nothing can be computed."""
    try:
        return cells_of(part.probe, part.raw, None)
    except (ValueError, ZeroDivisionError):
        return part.cells


def relist(root: Path) -> None:
    import hashlib

    folder = root / "results"
    paths = sorted(folder.rglob("*.json"))
    lines = [f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.relative_to(folder).as_posix()}\n" for p in paths]
    (folder / SUMS).write_text("".join(lines))


def copied(root: Path) -> None:
    shutil.copy(file_of(root), root / "results" / "here" / "tiny__b__small__111111111111.json")


def copied_over(root: Path) -> None:
    shutil.copy(file_of(root), file_of(root, "tiny__b"))


def copied_and_listed(root: Path) -> None:
    copied(root)
    relist(root)


def moved(root: Path) -> None:
    (root / "results" / "there").mkdir()
    file_of(root).rename(root / "results" / "there" / file_of(root).name)


def truncated(root: Path) -> None:
    path = file_of(root)
    path.write_bytes(path.read_bytes()[:-100])


def removed(root: Path) -> None:
    file_of(root).unlink()


def removed_and_unlisted(root: Path) -> None:
    removed(root)
    relist(root)
    commit_all(root)


def line_removed(root: Path) -> None:
    sums = root / "results" / SUMS
    sums.write_text("".join(sums.read_text().splitlines(keepends=True)[1:]))


def strange_file(root: Path) -> None:
    (root / "results" / "here" / "notes.txt").write_text("much faster today")


def not_json(root: Path) -> None:
    file_of(root).write_bytes(b"\xff\xfe{")


def deep_json(root: Path) -> None:
    file_of(root).write_text("[" * 100_000)


ACTS: dict[Callable[[Path], None], str] = {
    copied: "not listed in SHA256SUMS",
    copied_over: "not the file that was listed in SHA256SUMS",
    copied_and_listed: "by its content it belongs to here/tiny__a",
    moved: "not listed in SHA256SUMS",
    truncated: "expected a result",
    removed: "listed in SHA256SUMS but gone",
    removed_and_unlisted: "SHA256SUMS: a line was changed or removed",
    line_removed: "not listed in SHA256SUMS",
    strange_file: "only results belong here",
    not_json: "expected a result",
    deep_json: "expected a result",
}


@pytest.mark.parametrize(("act", "said"), ACTS.items())
def test_files_that_were_copied_moved_or_lost_are_found(root: Path, act: Callable[[Path], None], said: str) -> None:
    act(root)
    assert any(said in line for line in found(root)), found(root)


def test_a_result_is_never_overwritten(root: Path) -> None:
    commit = git(root, "rev-list", "--max-parents=0", "HEAD")
    before = file_of(root).read_bytes()
    with pytest.raises(BenchError, match="never overwritten"):
        write_result(root / "results", made("tiny/a", commit=commit))
    assert file_of(root).read_bytes() == before
    assert found(root) == []


def test_a_killed_run_leaves_no_half_result(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    commit = git(root, "rev-parse", "HEAD")
    with pytest.raises(BenchError, match="cannot be written: No space"):
        write_result(root / "results", made("tiny/a", commit=commit))
    assert found(root) == []


def test_a_changed_tree_is_no_result_to_keep(root: Path) -> None:
    commit = git(root, "rev-list", "--max-parents=0", "HEAD")
    result = made("tiny/b", commit=commit)
    file_of(root, "tiny__b").unlink()
    result = result.model_copy(update={"code": result.code.model_copy(update={"changed": ("src/x.py",)})})
    (root / "results" / SUMS).unlink()
    write_result(root / "results", result)
    assert any("its tree was changed (src/x.py)" in line for line in found(root))


BLOBS = {"src/moetier/a.py": git_blob(b"one\n"), "src/moetier/b.py": git_blob(b"")}


@pytest.mark.parametrize(
    ("blobs", "other"),
    [
        (BLOBS, None),
        ({**BLOBS, "src/moetier/b.py": git_blob(b"two\n")}, "src/moetier/b.py"),
        ({"src/moetier/a.py": BLOBS["src/moetier/a.py"]}, "src/moetier/b.py"),
        ({**BLOBS, "src/moetier/c.py": git_blob(b"")}, "src/moetier/c.py"),
    ],
    ids=["the same files", "another content", "one missing", "one more"],
)
def test_a_stated_commit_is_held_against_its_files(root: Path, blobs: dict[str, str], other: str | None) -> None:
    (root / "src" / "moetier").mkdir(parents=True)
    (root / "src" / "moetier" / "a.py").write_text("one\n")
    (root / "src" / "moetier" / "b.py").write_text("")
    commit_all(root)
    result = made("tiny/b", commit=git(root, "rev-parse", "HEAD"))
    result = result.model_copy(update={"code": result.code.model_copy(update={"blobs": blobs})})
    write_result(root / "results", result)
    wrong = found(root)
    assert wrong == [] if other is None else len(wrong) == 1
    assert other is None or wrong[0].endswith(f"1 of its files are not that commit's: {other}")


def test_a_copy_states_the_files_that_it_has() -> None:
    blobs = stated("5" * 40).blobs
    name = "src/moetier_bench/provenance.py"
    assert blobs[name] == git(Path(__file__).parents[2], "hash-object", name)
    assert not [file for file in blobs if file.endswith((".so", ".pyc"))]
