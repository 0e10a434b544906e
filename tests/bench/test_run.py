"""A real run: the bundled model served with a quarter of its experts in DRAM, probed, and found to be what it says."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from moetier_bench import BenchError
from moetier_bench.check import problems
from moetier_bench.documents import Library, MachineFile, Recipe, Suite, read_document
from moetier_bench.here import check_machine, set_folders
from moetier_bench.probes import Coding, Decode, Growth, Mixed, Prefill, Quality, Soak
from moetier_bench.provenance import ModelFiles, Software, changed_files, code_of, machine_here, model_files, software
from moetier_bench.result import Result, Served, to_text
from moetier_bench.run import Run
from moetier_bench.server import Place, checked_at_end, environment, free_port
from moetier_bench.server import Served as Started
from tests.bench.made import IDENTITY, recipe
from tests.bench.scripted import Script, scripted
from tests.serve.server import runs

ROOT = Path(__file__).resolve().parents[2]
KINDS = {"decode": Decode, "prefill": Prefill, "growth": Growth, "quality": Quality}
SMOKE = Suite(
    id="smoke",
    summary="for tests",
    probes=(
        Decode(levels=(1, 3), repeats=1, seconds=0.5, warmup_seconds=0.1),
        Prefill(lengths=(300, 100_000), repeats=1),
        Coding(max_tokens=24, repeats=1),
        Mixed(ask="question", requests=8, per_second=4, longest=1500, max_tokens=128),
        Quality(tasks=("arithmetic", "nowhere"), limit=6, concurrency=3),
        Soak(minutes=0.06, concurrency=2, every=0.4),
    ),
    check_at_end=True,
)


def run_of(recipe: Recipe, tmp_path: Path, model: Path) -> Run:
    machine = MachineFile.model_validate(machine_here("here", "where the tests run"))
    place = Place(model, tmp_path / "store", tmp_path / "scratch", free_port())
    return Run(ROOT, recipe, (SMOKE,), machine, code_of(ROOT), model_files(model), place, set_folders(ROOT))


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """One run for all tests of this file; skips without vLLM."""
    pytest.importorskip("vllm")
    recipe = Library(ROOT).recipe("nano/tiered-25").model_copy(update={"params": {}})
    run = run_of(recipe, tmp_path_factory.mktemp("run"), ROOT / "models" / "nano-mxfp4")
    children = set(psutil.Process().children(recursive=True))
    result = run.measure(print)
    assert not [child for child in psutil.Process().children(recursive=True) if child not in children and runs(child)]
    return result


def test_it_is_whole_and_contradicts_itself_nowhere(result: Result) -> None:
    assert result.failure is None
    data = to_text(result).encode()
    assert list(problems(data, Result.model_validate_json(data))) == []


def test_its_figures_are_there_or_have_a_reason(result: Result) -> None:
    cells = result.cells
    for name in ("boot.start", "decode.C1", "decode.C3", "ttft.300", "coding.ttft", "tiers.hit_share"):
        assert cells[name].value, cells[name].reason
    assert cells["ttft.100000"].reason == "needs 100001 positions, the server has 2048"
    assert cells["quality.nowhere"].reason == "the set nowhere is not here"
    assert (cells["quality.arithmetic"].value or 0) > 0.5


def test_questions_about_documents_are_answered_and_end(result: Result) -> None:
    (trial,) = next(section.raw.trials for section in result.sections if section.probe.probe == "mixed")
    assert [stream.finish for stream in trial.streams] == ["stop"] * 8
    lengths = [stream.prompt_tokens or 0 for stream in trial.streams]
    assert min(lengths) < 500 < max(lengths)
    assert result.cells["mixed.latency"].value, result.cells["mixed.latency"].reason


def test_a_quarter_of_the_experts_in_dram_misses_some(result: Result) -> None:
    share, reads = result.cells["tiers.hit_share"].value, result.cells["tiers.disk_reads"].value
    assert share is not None
    assert reads is not None
    assert 0 < share < 1
    assert reads > 0


def test_a_soak_ends_with_tables_and_bytes_compared(result: Result) -> None:
    assert result.cells["end.records_right"].value == 32, "a quarter of 32 experts in each of 4 layers"
    assert (result.cells["soak.requests"].value or 0) >= 8
    assert (result.cells["soak.right_last_third"].value or 0) > 0.5
    assert "soak.minutes" not in result.cells, "it was as long as it should be"
    assert result.served.placed == {"DRAM": 32, "disk": 96, "all": 128}


def test_an_end_without_agreement_is_no_figure_but_a_reason(tmp_path: Path) -> None:
    recipe, place = Library(ROOT).recipe("base/h200-hybrid-43"), Place(tmp_path, tmp_path, tmp_path, 1)
    log = "moetier: tables agree, 32 records in DRAM have the right bytes"
    said = {"model": "m", "layers": 7, "experts": 64, "tiers": [{"tier": "device slots", "records": 196}]}
    (tmp_path / "server.out").write_text(json.dumps(said) + "\n")
    for text in ("", log):
        (tmp_path / "vllm.log").write_text(text)
        assert "were not found to agree" in str(checked_at_end(recipe, place))
    (tmp_path / "vllm.log").write_text(f"{log}\nmoetier: slots agree, every record")
    assert checked_at_end(recipe, place) == 32 + 196
    (tmp_path / "server.out").write_text("moetier: error: layer 1: a slot holds other bytes\n")
    (tmp_path / "vllm.log").write_text(log)
    assert "a slot holds other bytes" in str(checked_at_end(recipe, place))
    (cell,) = (c for c in Served(command=(), wrong_at_end="x").cells() if c.name == "end.records_right")
    assert (cell.value, cell.reason) == (None, "x")


def test_it_names_the_native_code_that_ran(result: Result) -> None:
    from moetier.kernels.cpu import _native

    assert list(result.software.native) == [Path(_native.__file__).name]


def test_no_folder_of_this_machine_is_in_it(result: Result) -> None:
    text = json.dumps({k: v for k, v in json.loads(to_text(result)).items() if k != "code"})
    for folder in (str(ROOT), str(Path.home()) + "/", sys.prefix, "/tmp/"):
        assert folder not in text


def scripted_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *suites: Suite, **more: Any) -> Run:
    """A run whose server is scripted and takes 1.1 s to start."""

    @contextmanager
    def slow_start(*_: object) -> Iterator[Started]:
        with scripted(Script(first=0.02, gap=0.005)) as url:
            time.sleep(1.1)
            yield Started(url, psutil.Process(), 1.1)

    monkeypatch.setattr("moetier_bench.run.serving", slow_start)
    monkeypatch.setattr("moetier_bench.run.IDLE_SECONDS", 0.1)
    machine = MachineFile.model_validate(machine_here("here", "where the tests run"))
    files, place = ModelFiles(identity=IDENTITY, bytes=1, files={}), Place(tmp_path / "scripted", tmp_path, tmp_path, 1)
    return Run(ROOT, recipe(), suites, machine, code_of(ROOT), files, place, (), **more)


DECODES = Suite(
    id="one", summary="for tests", starts=2, probes=(Decode(levels=(1,), repeats=2, seconds=0.5, warmup_seconds=0.1),)
)
ANSWERS = Suite(id="two", summary="for tests", probes=(Coding(max_tokens=16, repeats=1),))


def test_the_time_of_the_probes_begins_when_the_server_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = Suite(id="both", summary="for tests", probes=(*DECODES.probes, *ANSWERS.probes))
    # Less than a start with its second of rest takes, and than the three trials of the first probe.
    result = scripted_run(tmp_path, monkeypatch, both, within=1.8).measure(print)
    assert result.status == "partial"
    assert result.failure == "the 1.8 s that the probes were given were over before coding"
    assert result.cells["decode.C1"].value, result.cells["decode.C1"].reason


def test_suites_of_one_server_are_whole_results_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = scripted_run(tmp_path, monkeypatch, DECODES, ANSWERS).results(print)
    assert [one.suite, two.suite] == [DECODES, ANSWERS]
    assert [section.probe.probe for section in (*one.sections, *two.sections)] == ["decode", "coding"]
    assert one.served.start_seconds == two.served.start_seconds == (1.1, 1.1)
    for result in (one, two):
        assert result.status == "ok"
        assert list(problems(to_text(result).encode(), result)) == []


def test_a_recipe_can_ask_for_fewer_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = scripted_run(tmp_path, monkeypatch, DECODES)
    serve = run.recipe.serve.model_copy(update={"most_starts": 1})
    once = replace(run, recipe=run.recipe.model_copy(update={"serve": serve}))
    assert once.measure(print).served.start_seconds == (1.1,)


@pytest.mark.parametrize("at", ["decode", "coding"])
def test_an_interrupt_leaves_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    def interrupting(text: str) -> None:
        if text.endswith(at):
            signal.raise_signal(signal.SIGINT)

    run = scripted_run(tmp_path, monkeypatch, DECODES, ANSWERS)
    *whole, last = run.results(interrupting)
    assert (last.status, last.failure, last.sections) == ("failed", "it was interrupted", ())
    assert [result.status for result in whole] == (["ok"] if at == "coding" else [])
    assert list(problems(to_text(last).encode(), last)) == []


def test_an_interrupt_while_a_result_is_made_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def software_once_interrupted() -> Software:
        made.append(software())
        if len(made) == 1:
            signal.raise_signal(signal.SIGINT)
        return made[-1]

    monkeypatch.setattr("moetier_bench.run.software", software_once_interrupted)
    (result,) = scripted_run(tmp_path, monkeypatch, DECODES, ANSWERS).results(print)
    assert (result.suite, result.status, result.failure) == (DECODES, "partial", "it was interrupted")
    assert result.cells["decode.C1"].value


def test_a_server_that_does_not_come_up_is_a_failed_result(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    recipe = Library(ROOT).recipe("nano/tiered-25")
    serve = recipe.serve.model_copy(update={"vllm": ("--no-such-flag",)})
    run = run_of(recipe.model_copy(update={"serve": serve}), tmp_path, ROOT / "models" / "nano-mxfp4")
    failed = run.measure(lambda _: None)
    assert failed.status == "failed"
    assert "the server ended after" in (failed.failure or "")
    assert "__failed-" in failed.name


def test_a_variable_that_a_result_would_not_show_does_not_reach_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_API_KEY", "VLLM_ENFORCE_STRICT_TOOL_CALLING", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    found = environment(Library(ROOT).recipe("nano/tiered-25"))
    assert "VLLM_API_KEY" not in found
    assert "OMP_NUM_THREADS" not in found
    assert found["VLLM_ENFORCE_STRICT_TOOL_CALLING"] == "0"
    assert found["CUDA_VISIBLE_DEVICES"] == "0"


def bench(*arguments: str, code: int) -> str:
    command = [str(Path(sys.executable).with_name("moetier")), "bench", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=ROOT)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("loop", [True, False], ids=["a loop of links", "a folder"])
def test_lint_goes_on_after_a_document_that_cannot_be_read(tmp_path: Path, loop: bool) -> None:
    folder = tmp_path / "recipes" / "tiny"
    folder.mkdir(parents=True)
    (folder / "a.yaml").symlink_to("a.yaml") if loop else (folder / "a.yaml").mkdir()
    (folder / "b.yaml").write_text("[]")
    found = list(Library(tmp_path).lint())
    assert [("a.yaml cannot be read" in line, "b.yaml" in line) for line in found] == [(True, False), (False, True)]


def test_every_document_is_right() -> None:
    assert "none is wrong" in bench("lint", code=0)


def test_results_are_as_they_were_measured_and_rendered() -> None:
    assert "as they were measured" in bench("check", code=0)
    assert "what the results give" in bench("render", "--check", code=0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("run", "nano/tiered-25", "--commit", "1"), "expected the 40 digits of `git rev-parse HEAD`"),
        (("run", "deepseek-v4-flash/1x32gb"), "is a plan: pin its revision"),
        (("run", "nano/none"), "is not there; `moetier bench list` shows what is"),
        (("run", "../x"), "expected small letters"),
        (("run", "nano/dram", "--suite", "none"), "is not there"),
        (("run", "nano/dram", "--suite", "quick", "--suite", "quick"), "a suite is named twice"),
        (("compare", "README.md", "README.md"), "expected a result of `moetier bench run`"),
        (("show", "recipe", "nano/none"), "is not there"),
        (("machine", "../x", "--summary", "x"), "expected small letters"),
        (("import", "README.md"), "expected a file that `moetier prove` wrote"),
        (("sweep", "nano/dram", "--axis", "dram_record=1"), "did you mean 'dram_records'"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_refusals_are_one_clear_error(arguments: tuple[str, ...], said: str) -> None:
    told = bench(*arguments, code=2)
    assert said in " ".join(told.split())
    assert told.count("moetier: error:") == 1


def test_a_machine_that_is_too_small_is_refused() -> None:
    here = MachineFile.model_validate(machine_here("here", "x"))
    recipe = Recipe.model_validate(
        {
            **Library(ROOT).recipe("nano/dram").model_dump(),
            "requires": {"cpus": 5000, "host_gib": 1e6, "gpus": 64, "gpu_gib": 1},
        }
    )
    with pytest.raises(BenchError, match=r"needs 5000 CPUs \(found \d+\); 1e\+06 GiB .*; 64 GPUs"):
        check_machine(recipe, here)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("id: tiny/a\nid: tiny/b\n", "the key id occurs twice"),
        ("id: tiny/b\n", "summary: Field required"),
        ("[1, 2", "expected YAML"),
        ("!!python/object/apply:os.system [ls]\n", "expected YAML"),
        ("id: tiny/a\nsummary: x\nspeed: 9\n", "speed: Extra inputs are not permitted"),
        ("", "Input should be a valid dictionary"),
        ("a: &a [*a]\n", "expected YAML"),
        ('serve: {engine: vllm, vllm: ["a\\0b"]}\n', "a zero byte cannot be given to a program"),
        ("serve: {engine: vllm, env: {A=B: x}}\n", "'A=B' cannot be the name of a variable"),
    ],
)
def test_bad_recipes_are_named(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "recipes" / "tiny").mkdir(parents=True)
    (tmp_path / "recipes" / "tiny" / "a.yaml").write_text(text)
    (finding,) = list(Library(tmp_path).lint())
    assert "recipes/tiny/a.yaml" in finding
    assert said in finding or "Extra inputs" in finding


@pytest.mark.parametrize(
    ("probe", "said"),
    [
        (
            {"probe": "decode", "levels": [1, 2, 1, 2]},
            "probes.0.decode.levels: Value error, 1, 2 is named more than once",
        ),
        ({"probe": "prefill", "lengths": [256, 256]}, "lengths: Value error, 256 is named more than once"),
        ({"probe": "growth", "lengths": [0]}, "lengths.0: Input should be greater than or equal to 1"),
        ({"probe": "decode", "levels": []}, "levels: Tuple should have at least 1 item"),
        ({"probe": "quality", "tasks": ["copy", "copy"]}, "tasks: Value error, copy is named more than once"),
    ],
    ids=["streams", "lengths", "none of a length", "no level", "sets"],
)
def test_a_probe_that_names_a_cell_twice_is_refused_where_it_is_written(
    tmp_path: Path, probe: dict[str, Any], said: str
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({"id": "mine", "summary": "x", "probes": [probe]}))
    with pytest.raises(BenchError) as suite:
        read_document(path, Suite)
    kind, params = probe["probe"], {key: value for key, value in probe.items() if key != "probe"}
    asked = recipe().model_copy(update={"params": {kind: params}})
    with pytest.raises(BenchError) as of_recipe:
        Suite(id="mine", summary="x", probes=(KINDS[kind](),)).probes_for(asked)
    assert said in str(suite.value)
    assert said.removeprefix("probes.0.decode.") in str(of_recipe.value)


def test_a_recipe_in_the_wrong_place(tmp_path: Path) -> None:
    (tmp_path / "recipes" / "tiny").mkdir(parents=True)
    values = Library(ROOT).recipe("nano/dram").model_dump(mode="json")
    (tmp_path / "recipes" / "tiny" / "a.yaml").write_text(yaml.safe_dump(values))
    (finding,) = list(Library(tmp_path).lint())
    assert "expected the id of its place, tiny/a, found nano/dram" in finding


def test_porcelain_is_read_without_losing_letters() -> None:
    status = " M src/a.py\0?? results/x.json\0R  new name.py\0old.py\0 M docs/benchmarks/0.1.0.md\0"
    assert changed_files(status) == ["new name.py", "old.py", "src/a.py"]
