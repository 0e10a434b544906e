"""`moetier plan` and `moetier calibrate` as commands."""

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

from moetier.plan.describe import describe

FOUR = ("--gpus", "4x32GB", "--ram", "512GB", "--disk", "28GB/s", "--memory", "8xDDR5-4800", "--pcie", "5x16")
PROMISED = (
    "decode_tok_s", "prefill_tok_s", "ttft_2k_s", "ttft_16k_s", "host_gib", "device_gib", "slots_per_layer",
    "dram_records", "start_s",
)  # fmt: skip


def moetier(*arguments, **more):
    command = [sys.executable, "-c", "from moetier.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, **more)


def plan_json(*arguments):
    done = moetier("plan", *arguments, "--json")
    assert done.returncode in (0, 1), done.stderr
    return json.loads(done.stdout)


def test_records_as_a_share_as_serve_takes_them():
    assert plan_json("deepseek-v4.1-flash", *FOUR, "--dram-records", "25%")["dram_records"]["value"] == 384 // 4


def test_the_promised_numbers_with_low_and_high():
    found = plan_json("deepseek-v4.1-flash", *FOUR, "--dram-records", "120", "--workload", "short")
    for name in PROMISED:
        assert found[name]["low"] <= found[name]["value"] <= found[name]["high"]
    assert found["dram_records"] == {"value": 120, "low": 120, "high": 120}
    assert found["workload"]["name"] == "short"
    assert found["fits"]
    assert all(cost["source"] for cost in found["costs"].values())


def test_text_explanation_and_picture(tmp_path):
    picture = tmp_path / "plan.svg"
    done = moetier("plan", "deepseek-v4-flash", *FOUR, "--explain", "--plot", str(picture))
    assert done.returncode == 0, done.stderr
    for expected in ("each of 4 devices", "tokens/s", "one decode step", "disk_rate", "stated", "tokens of context"):
        assert expected in done.stdout
    root = ET.fromstring(picture.read_text())
    text = " ".join(element.text or "" for element in root.iter())
    assert "decode step" in text
    assert "expert slots" in text
    width = float(root.attrib["viewBox"].split()[2])
    rects = [e for e in root.iter() if e.tag.endswith("rect") and "x" in e.attrib]
    assert all(float(r.attrib["x"]) + float(r.attrib["width"]) <= width for r in rects)


def test_what_does_not_fit_ends_with_1_and_says_what_does():
    done = moetier("plan", "glm-5.2", "--gpus", "1x32GB", "--ram", "64GB", "--dram-records", "200")
    assert done.returncode == 1
    assert "does not fit" in done.stdout
    assert "the nearest settings that fit: --dram-records" in done.stdout


def test_two_machines_side_by_side(tmp_path):
    for name, gpus in (("a", "1x32GB"), ("b", "4x32GB")):
        (tmp_path / f"{name}.json").write_text(describe(gpus, "512GB", "7GB/s").to_json())
    files = (str(tmp_path / "a.json"), str(tmp_path / "b.json"))
    done = moetier("plan", "deepseek-v4.1-flash", "--compare", *files)
    assert done.returncode == 0, done.stderr
    assert "decode_tok_s" in done.stdout
    both = json.loads(moetier("plan", "deepseek-v4.1-flash", "--compare", *files, "--json").stdout)
    assert both[0]["decode_tok_s"]["value"] < both[1]["decode_tok_s"]["value"]
    alone = plan_json("deepseek-v4.1-flash", "--machine", files[1])
    assert alone["decode_tok_s"] == both[1]["decode_tok_s"]


def test_this_machine_is_planned_for_by_default(nano):
    found = plan_json(str(nano))
    assert found["geometry"]["record_bytes"] > 0
    assert found["host_gib"]["value"] > 0


def test_a_geometry_file_plans_as_its_checkpoint(nano, tmp_path):
    out = tmp_path / "g.json"
    first = plan_json(str(nano), *FOUR, "--geometry-out", str(out))
    assert plan_json(str(out), *FOUR)["decode_tok_s"] == first["decode_tok_s"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("deepseek-v41-flash", *FOUR), "did you mean deepseek-v4.1-flash"),
        (("deepseek-v4.1-flash", "--gpus", "4x32GB"), "--ram"),
        (("deepseek-v4.1-flash", *FOUR, "--machine", "x.json"), "not both"),
        (("deepseek-v4.1-flash", "--machine", "absent.json"), "absent.json"),
        (("deepseek-v4.1-flash", *FOUR, "--workload", "heavy"), "short, mixed, deep"),
        (("deepseek-v4.1-flash", *FOUR, "--engine", "vllm-cpu"), "leave --engine out"),
        (("deepseek-v4-flash", *FOUR, "--draft-tokens", "3", "--accepted", "9"), "at most 4"),
        (("deepseek-v4.1-flash", *FOUR, "--accepted", "2"), "say --draft-tokens too"),
        (("deepseek-v4.1-flash", *FOUR, "--dram-records", "-1"), "a share such as 25%"),
        (("deepseek-v4.1-flash", *FOUR, "--kv-format", "int3"), "int3"),
        (("deepseek-v4.1-flash", *FOUR, "--plot", "/dev/null/x.svg"), "cannot be written"),
        ((), "expected a MODEL"),
    ],
)
def test_errors_name_the_fix(arguments, message, tmp_path):
    done = moetier("plan", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.startswith("moetier: error: ")
    assert "Traceback" not in done.stderr


def test_a_calibration_brings_the_prediction_to_the_measurement(tmp_path):
    file, row = tmp_path / "c.json", ("--dram-records", "120", "--slots", "110", "--workload", "short")
    before = plan_json("deepseek-v4.1-flash", *FOUR, *row)
    done = moetier(
        "calibrate", "deepseek-v4.1-flash", *FOUR, *row, "--measured", "ttft_2k_s=2.7", "--blame", "disk_rate",
        "--source", "published row", "--out", str(file),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "disk_rate" in done.stdout
    after = plan_json("deepseek-v4.1-flash", *FOUR, *row, "--calibration", str(file))
    assert before["ttft_2k_s"]["value"] > 4
    assert after["ttft_2k_s"]["value"] == pytest.approx(2.7, rel=0.01)
    assert "published row" in after["costs"]["disk_rate"]["source"]
    assert after["calibration"]["evidence"][0]["measured"] == 2.7


def test_a_second_benchmark_corrects_another_cost_and_keeps_the_first(tmp_path):
    file, results = tmp_path / "c.json", tmp_path / "r.json"
    results.write_text(json.dumps({"decode_tok_s": {"median": 140.0}, "note": "x", "machine": {"a": 1}}))
    row = ("--slots", "110", "--workload", "short")
    for more in (("--measured", "ttft_2k_s=1.1"), ("--results", str(results))):
        done = moetier("calibrate", "deepseek-v4.1-flash", *FOUR, *row, *more, "--out", str(file))
        assert done.returncode == 0, done.stderr
    kept = json.loads(file.read_text())
    assert {entry["metric"] for entry in kept["evidence"]} == {"ttft_2k_s", "decode_tok_s"}
    assert len(kept["factors"]) == 2
    after = plan_json("deepseek-v4.1-flash", *FOUR, *row, "--calibration", str(file))
    assert after["decode_tok_s"]["value"] == pytest.approx(140, rel=0.01)


def test_this_machine_keeps_its_own_corrections(nano, tmp_path):
    env = os.environ | {"XDG_STATE_HOME": str(tmp_path)}
    before = json.loads(moetier("plan", str(nano), "--json", env=env).stdout)["decode_tok_s"]["value"]
    done = moetier("calibrate", str(nano), "--measured", f"decode_tok_s={before * 0.8}", env=env)
    assert done.returncode == 0, done.stderr
    after = json.loads(moetier("plan", str(nano), "--json", env=env).stdout)
    assert after["decode_tok_s"]["value"] == pytest.approx(before * 0.8, rel=0.02)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--measured", "decode_tok_s=0"), "positive"),
        (("--measured", "speed=3"), "no metric"),
        (("--measured", "decode_tok_s=100000", "--blame", "disk_rate"), "name another with --blame"),
        (("--measured", "decode_tok_s=100", "--blame", "luck"), "luck"),
        ((), "expected what was measured"),
    ],
)
def test_calibrations_that_mean_nothing_are_refused(arguments, message, tmp_path):
    out = tmp_path / "c.json"
    done = moetier("calibrate", "deepseek-v4.1-flash", *FOUR, *arguments, "--out", str(out))
    assert done.returncode == 2
    assert message in done.stderr
    assert not out.exists()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"schema": 1, "factors": {"disk_rate": 1e300}}', "\0" * 100])
def test_damaged_corrections_are_refused(content, tmp_path):
    (tmp_path / "c.json").write_text(content)
    done = moetier("plan", "deepseek-v4.1-flash", *FOUR, "--calibration", str(tmp_path / "c.json"))
    assert done.returncode == 2
    assert "calibrate again" in done.stderr


def test_a_calibration_of_another_versions_costs_is_refused_with_the_fix(tmp_path):
    file = tmp_path / "c.json"
    state = {"schema": 1, "identity": "x", "engine": "vllm-graphs", "factors": {"gone": 1.1}, "evidence": []}
    file.write_text(json.dumps(state))
    done = moetier("plan", "deepseek-v4.1-flash", *FOUR, "--calibration", str(file))
    assert done.returncode == 2
    assert "gone" in done.stderr
    assert "remove it and calibrate again" in " ".join(done.stderr.split())
