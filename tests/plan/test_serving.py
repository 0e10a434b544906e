"""From a plan to the server's settings."""

import pytest

from moetier.amounts import amount_of
from moetier.errors import SettingsError
from moetier.launch.planned import DEVICE_CHUNKS, Given, plan_serving
from moetier.plan import catalog
from moetier.plan.describe import describe
from moetier.plan.headers import read_folder
from moetier.settings import Settings
from moetier.store.checkpoint import Checkpoint
from moetier.store.trim import trim_checkpoint


def test_the_plan_becomes_settings_that_the_server_takes(nano, tmp_path):
    serving = plan_serving(nano, Given(), on_gpu=False)
    assert serving.plan.fits
    assert serving.changes == ()
    settings = Settings.parse({"store": tmp_path, **serving.settings})
    assert settings.dram_records == serving.plan.question.geometry.experts
    assert settings.slots == 0
    assert serving.kv_cache_gib > 0


def test_an_override_says_what_it_changes(nano):
    serving = plan_serving(nano, Given(dram_records="25%"), on_gpu=False)
    experts = serving.plan.question.geometry.experts
    assert serving.settings["dram_records"] == experts // 4
    text = "; ".join(serving.changes)
    assert f"experts of a layer in DRAM {experts} -> {experts // 4}" in text
    assert "decode, one stream (tokens/s) " in text


def test_vllms_own_context_is_planned_for(nano):
    whole = plan_serving(nano, Given(), on_gpu=False)
    short = plan_serving(nano, Given(arguments=("--max-model-len", "128")), on_gpu=False)
    assert short.kv_cache_gib < whole.kv_cache_gib
    assert short.arguments(("--max-model-len", "128")) == ()


@pytest.mark.parametrize(("text", "records"), [(None, None), ("auto", None), ("25%", 16), ("7", 7), ("100%", 64)])
def test_records_as_serve_takes_them(text, records):
    assert amount_of(text, "--dram-records", 64) == records


@pytest.mark.parametrize("text", ["", "many", "-1", "101%", "x%"])
def test_records_that_are_none(text):
    with pytest.raises(SettingsError, match="--dram-records"):
        amount_of(text, "--dram-records", 64)


def test_what_does_not_fit_is_refused_with_what_does(nano, monkeypatch):
    import moetier.launch.planned as module

    here = module._here

    def small(folder, on_gpu):
        found = here(folder, on_gpu)
        memory = found.memory.model_copy(update={"limit_bytes": 1 << 30})
        return found.model_copy(update={"memory": memory})

    monkeypatch.setattr(module, "_here", small)
    with pytest.raises(SettingsError, match="does not fit"):
        plan_serving(nano, Given(), on_gpu=False)


def test_a_trimmed_checkpoint_is_planned_as_the_whole_one(nano, tmp_path):
    trim_checkpoint(Checkpoint.open(nano), tmp_path / "trimmed")
    whole, trimmed = read_folder(nano), read_folder(tmp_path / "trimmed")
    assert (trimmed.moe_layers, trimmed.experts, trimmed.record_bytes) == (
        whole.moe_layers, whole.experts, whole.record_bytes,
    )  # fmt: skip
    assert trimmed.parts.experts == 0
    assert trimmed.parts.resident == whole.parts.resident


@pytest.mark.parametrize(
    ("model", "gpus", "ram"),
    [("qwen3-235b", "1xH200", "128GB"), ("deepseek-v4-flash", "1x32GB", "192GB"), ("gpt-oss-120b", "1x24GB", "96GB")],
)
def test_without_flags_a_machine_with_a_gpu_gets_slots(model, gpus, ram, monkeypatch):
    """From the geometry and the machine alone: what is free of DRAM and device goes to records."""
    import moetier.launch.planned as module

    geometry, machine = catalog.bundled(model), describe(gpus, ram)
    monkeypatch.setattr(module, "read_folder", lambda folder: geometry)
    monkeypatch.setattr(module, "_here", lambda folder, on_gpu: machine)
    serving = plan_serving(None, Given(), on_gpu=True)
    placement = serving.plan.placement
    settings = Settings.parse({"store": "/s", **serving.settings})
    assert settings.slots == placement.slots > 0
    assert placement.wanted.chunk == DEVICE_CHUNKS[0]
    assert placement.device_bytes <= placement.device_limit < machine.gpus[0].memory_bytes
    slot = geometry.moe_layers * geometry.record_bytes
    assert placement.slots == geometry.experts or placement.device_limit - placement.device_bytes < slot
    assert serving.device_bytes == placement.device_bytes
    assert any(f"{placement.slots} in GPU memory" in line for line in serving.lines())


def test_a_small_device_gets_smaller_chunks_before_it_is_refused(monkeypatch):
    import moetier.launch.planned as module

    geometry = catalog.bundled("qwen3-next-80b")
    monkeypatch.setattr(module, "read_folder", lambda folder: geometry)
    found = dict.fromkeys((8, 9, 10, 11, 12, 16))
    for gib in found:
        monkeypatch.setattr(module, "_here", lambda folder, on_gpu, gib=gib: describe(f"1x{gib}GB", "96GB"))
        try:
            found[gib] = plan_serving(None, Given(), on_gpu=True).plan.placement.wanted.chunk
        except SettingsError:
            found[gib] = 0
    assert list(found.values()) == sorted(found.values())
    assert set(found.values()) >= {0, *DEVICE_CHUNKS[:2]}
