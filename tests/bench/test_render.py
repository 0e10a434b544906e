"""Rendering: from results and nothing else, any drift found; the page looked at in a real browser."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from moetier_bench import BenchError
from moetier_bench.compare import compare
from moetier_bench.page import page
from moetier_bench.render import (
    BEGIN,
    CROWDED_MARK,
    END,
    drift,
    marks,
    outputs,
    readme_lines,
    why_empty,
    with_block,
    write,
)
from moetier_bench.result import Load, Served, write_result
from moetier_bench.samples import Cell
from tests.bench.made import checkout, commit_all, made, sections

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout with two results and a README that wants them."""
    root = tmp_path / "checkout"
    root.mkdir()
    commit = checkout(root)
    for name, gap in (("tiny/a", 0.005), ("tiny/b", 0.01)):
        write_result(root / "results", made(name, gap, commit))
    (root / "README.md").write_text(f"# tiny\n\n{BEGIN}\n{END}\n\nmore\n")
    commit_all(root)
    return root


def rendered(root: Path) -> dict[Path, str]:
    return outputs(root, root / "results")


def test_what_is_rendered_is_what_the_results_say(root: Path) -> None:
    written = write(rendered(root))
    assert {path.name for path in written} >= {"README.md", "0.1.0.md", "here-small-throughput.svg"}
    readme = (root / "README.md").read_text()
    assert readme.startswith("# tiny\n")
    assert readme.endswith("\n\nmore\n")
    assert "the scripted server as tiny/a" in readme
    table = (root / "docs" / "benchmarks" / "0.1.0.md").read_text()
    value = made("tiny/a", 0.005).cells["decode.C1"].value
    assert value is not None
    assert f"| decode.C1 | tok/s | **{value:.3g}**" in table
    assert "no energy counter can be read" in table or "decode.C1.energy | J/token" in table
    assert drift(rendered(root), root) == []
    assert write(rendered(root)) == []


@pytest.mark.parametrize("name", ["README.md", "docs/benchmarks/0.1.0.md", "docs/benchmarks/0.1.0/here-small-ttft.svg"])
def test_any_drift_is_found(root: Path, name: str) -> None:
    write(rendered(root))
    path = root / name
    path.write_text(path.read_text().replace("decode", "Decode").replace("tok", "Tok"))
    assert drift(rendered(root), root) == [f"{path} is not what the results give"]
    path.unlink()
    assert len(drift(rendered(root), root)) == (0 if name == "README.md" else 1)


def test_a_picture_that_no_result_gives_is_found(root: Path) -> None:
    write(rendered(root))
    stray = root / "docs" / "benchmarks" / "0.1.0" / "better.svg"
    stray.write_text("<svg/>")
    assert drift(rendered(root), root) == [f"{stray}: no result gives this picture"]


def test_a_readme_without_markers_is_left_alone(root: Path) -> None:
    (root / "README.md").write_text("# tiny\n")
    assert root / "README.md" not in rendered(root)


@pytest.mark.parametrize("text", [BEGIN, f"{END} {BEGIN}", f"{BEGIN} {BEGIN} {END}"])
def test_markers_that_are_no_pair(text: str) -> None:
    with pytest.raises(BenchError, match="markers once each and in order"):
        with_block(text, "x")


def test_nothing_is_rendered_from_an_edited_result(root: Path) -> None:
    path = next((root / "results").glob("here/*.json"))
    path.write_text(path.read_text().replace('"value":', '"value": ', 1))
    with pytest.raises(BenchError, match="not as they were measured"):
        rendered(root)


def test_the_page_in_a_browser(tmp_path: Path) -> None:
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"wants a browser: none of {', '.join(BROWSERS)} is installed")
    result = made("tiny/a")
    path, picture = tmp_path / "page.html", tmp_path / "page.png"
    path.write_text(page(result))
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    shot = [browser, *options, f"--screenshot={picture}", "--window-size=1100,2400", path.as_uri()]
    subprocess.run(shot, check=True, capture_output=True, timeout=600)
    width, height = (int.from_bytes(picture.read_bytes()[at : at + 4], "big") for at in (16, 20))
    assert (width, height) == (1100, 2400)
    dump = [browser, *options, "--dump-dom", path.as_uri()]
    dumped = subprocess.run(dump, check=True, capture_output=True, timeout=600)
    text = dumped.stdout.decode()
    for name, cell in result.cells.items():
        assert f">{name}<" in text
        assert cell.reason is None or cell.reason in text
    assert "<svg" in text
    assert text.count("://") == text.count("http://www.w3.org/2000/svg")  # nothing is fetched


def test_a_partial_result_says_what_it_lacks_and_stands_last_in_the_readme() -> None:
    cut = made("tiny/a").model_copy(
        update={"status": "partial", "failure": "time was over", "sections": sections(0.005)[:1]}
    )
    lines = list(readme_lines([cut, made("tiny/b")]))
    assert "as tiny/b" in lines[2]
    assert "as tiny/a (partial)" in lines[3]
    assert "(partial) Suite small: time was over; not run: prefill, coding." in lines


def test_on_a_machine_that_others_use_energy_is_no_figure() -> None:
    result = made("tiny/a")
    cell = Cell(name="decode.C1.energy", unit="J/token", better="lower", value=2.0, low=2.0, high=2.0, samples=(2.0,))
    for load, crowded in ((1.9, False), (2.1, True)):
        after = (0.0, load * len(result.machine.cpu.allowed), 0.0)
        loaded = result.model_copy(update={"load": Load(before=(0.0,), after=after)})
        assert ("of a whole device" in str(why_empty(cell, loaded))) == crowded
        assert (CROWDED_MARK in marks(loaded)) == crowded
        one = loaded.model_copy(update={"boot": (cell,), "sections": ()})
        assert ("of a whole device" in page(one)) == crowded
        (line,) = compare(one, one, parts=("speed",)).lines
        assert ("B has none: others used the machine too" in line.text) == crowded


def test_no_record_counted_at_the_end_is_no_figure() -> None:
    for count, shown in ((0, False), (32, True)):
        (cell,) = (c for c in Served(command=(), right_at_end=count).cells() if c.name == "end.records_right")
        assert (why_empty(cell, made("tiny/a")) is None) == shown


def test_a_page_escapes_what_others_wrote() -> None:
    result = made("tiny/a")
    hostile = result.model_copy(update={"failure": "<script>alert(1)</script>", "status": "partial"})
    assert "<script" not in page(hostile)
