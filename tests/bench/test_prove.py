"""Files of `moetier prove`: no path in them, refused where they contradict themselves, rendered as someone else's."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from moetier_bench import BenchError
from moetier_bench.check import check_folder
from moetier_bench.documents import Suite
from moetier_bench.probes import Decode, Prefill, Quality
from moetier_bench.prove import checked_for_paths, import_proof, prove, slug, write_proof
from moetier_bench.render import IMPORTED_MARK, outputs
from moetier_bench.result import Result
from tests.bench.made import checkout, commit_all, made

ROOT = Path(__file__).resolve().parents[2]


def proof() -> Result:
    """A made result as `prove` marks it."""
    result = made("tiny/a").model_copy(update={"origin": "prove", "extra": {"identity": {"calls": 1, "differ": 0}}})
    return result.sealed()


@pytest.mark.long
def test_a_real_proof_from_end_to_end(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    probes = (
        Decode(levels=(1,), repeats=1, seconds=0.3, warmup_seconds=0.1),
        Prefill(lengths=(64,), repeats=1),
        Quality(tasks=("copy",), limit=4, concurrency=2),
    )
    suite, settings = Suite(id="small", summary="for tests", probes=probes), {"dram_records": "25%"}
    result = prove(ROOT / "models" / "nano-mxfp4", None, settings, ("--max-model-len", "512"), suite, print, calls=20)
    assert result.status == "ok"
    assert result.extra["identity"]["calls"] > 0
    assert result.extra["identity"]["differ"] == 0
    for name in ("decode.C1", "ttft.64", "quality.copy"):
        assert result.cells[name].value, result.cells[name].reason
    write_proof(result, tmp_path / "proof.json.gz")
    text = gzip.decompress((tmp_path / "proof.json.gz").read_bytes()).decode()
    question = json.loads((ROOT / "models" / "eval" / "copy.jsonl").read_text().splitlines()[0])["messages"][-1]
    assert question["content"] not in text
    assert str(tmp_path) not in text
    path, imported = import_proof(tmp_path / "proof.json.gz", tmp_path / "results")
    assert imported == result
    assert check_folder(tmp_path / "results")[1] == []
    assert path.is_file()


@pytest.mark.parametrize("name", ["proof.json", "proof.json.gz"])
def test_written_imported_checked_and_rendered(tmp_path: Path, name: str) -> None:
    root = tmp_path / "checkout"
    root.mkdir()
    checkout(root)
    write_proof(proof(), tmp_path / name)
    path, result = import_proof(tmp_path / name, root / "results")
    assert result == proof()
    assert path.parent.parent.parent.name == "imported"
    commit_all(root)
    results, wrong = check_folder(root / "results", root)
    assert wrong == []
    assert len(results) == 1
    (page,) = (text for file, text in outputs(root, root / "results").items() if file.suffix == ".md")
    assert f"tiny/a {IMPORTED_MARK}" in page
    with pytest.raises(BenchError, match="was imported before"):
        import_proof(tmp_path / name, root / "results")


def test_a_proof_is_not_written_over_a_file(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("mine")
    with pytest.raises(BenchError, match="there already"):
        write_proof(proof(), tmp_path / "x.json")
    assert (tmp_path / "x.json").read_text() == "mine"


def test_an_edited_proof_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "proof.json"
    write_proof(proof(), path)
    state = json.loads(path.read_text())
    state["sections"][0]["cells"][0]["value"] = 1e6
    path.write_text(json.dumps(state))
    with pytest.raises(BenchError, match="refused: its hash is not that of its content"):
        import_proof(path, tmp_path / "results")
    assert not (tmp_path / "results").exists()


def test_a_result_of_run_is_no_proof(tmp_path: Path) -> None:
    write_proof(made("tiny/a"), tmp_path / "x.json")
    with pytest.raises(BenchError, match="not written by `moetier prove MODEL OUT`"):
        import_proof(tmp_path / "x.json", tmp_path / "results")


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"\xff\xfe", b"[" * 100_000, b'{"format": 1}', b"null"],
    ids=["empty", "object", "bytes", "deep", "format only", "null"],
)
@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_hostile_files_are_refused_in_one_line(tmp_path: Path, data: bytes, suffix: str) -> None:
    path = tmp_path / f"x{suffix}"
    path.write_bytes(data)
    with pytest.raises(BenchError) as error:
        import_proof(path, tmp_path / "results")
    assert "\n" not in str(error.value)
    path.write_bytes(gzip.compress(data))
    with pytest.raises(BenchError):
        import_proof(path, tmp_path / "results")


def test_a_gzip_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moetier_bench.prove.LARGEST", 1 << 20)
    path = tmp_path / "x.json.gz"
    path.write_bytes(gzip.compress(b" " * (4 << 20)))
    with pytest.raises(BenchError, match="more than"):
        import_proof(path, tmp_path / "results")


@pytest.mark.parametrize("field", ["machine", "recipe"])
def test_an_id_that_is_a_path_is_refused(tmp_path: Path, field: str) -> None:
    path = tmp_path / "x.json"
    write_proof(proof(), path)
    state = json.loads(path.read_text())
    state[field]["id"] = "../../x"
    path.write_text(json.dumps(state))
    with pytest.raises(BenchError, match="expected small letters"):
        import_proof(path, tmp_path / "results")


def test_what_others_write_is_text_in_a_table(tmp_path: Path) -> None:
    from moetier_bench.render import said

    assert said("a | b <img src=x> [x](y)\nc") == r"a \| b &lt;img src=x&gt; \[x\](y) c"


def test_a_path_in_the_file_is_found() -> None:
    result = proof().model_copy(update={"failure": "no such file: /home/someone/model"})
    with pytest.raises(BenchError, match="would name /home/someone"):
        checked_for_paths(result, ["/home/someone"])


@pytest.mark.parametrize(("text", "name"), [("GLM-4.5 Air", "glm-4.5-air"), ("..", "model"), ("A/B", "a-b")])
def test_slugs(text: str, name: str) -> None:
    assert slug(text) == name
