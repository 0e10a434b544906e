"""Geometry from headers alone: true ones of released models over holes, and hostile ones."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moetier.errors import CheckpointError
from moetier.plan import catalog
from moetier.plan.headers import read_folder, read_hub
from moetier.store.remote.fetch import Patience
from tests.plan import released
from tests.plan.hub import serving

QUICK = Patience(stall=2.0, attempts=2, pause=0.01)
RELEASED = {
    "deepseek-v4.1-flash": released.V41_FLASH,
    "deepseek-v4-flash": released.V4_FLASH,
    "deepseek-v3": released.DEEPSEEK_V3,
    "glm-5.2": released.GLM_52,
    "glm-4.5-air": released.GLM4_AIR,
    "kimi-k2.7": released.KIMI_K27,
    "qwen3-235b": released.QWEN3_235B,
    "qwen3-next-80b": released.QWEN3_NEXT,
    "gpt-oss-120b": released.GPT_OSS,
}
PUBLISHED_TOTALS = {
    "deepseek-v4.1-flash": (510_286_023_000, 0.0),
    "deepseek-v4-flash": (148.66 * 2**30, 0.001),
    "kimi-k2.7": (594e9, 0.005),
    "qwen3-235b": (470.2e9, 0.001),
    "gpt-oss-120b": (65.2e9, 0.002),
}
"""Bytes of the released weights by their index or repository, and how near we must be (relative)."""


@pytest.mark.parametrize("name", RELEASED)
def test_bundled_facts_are_what_the_headers_say(name, tmp_path):
    total = released.write(RELEASED[name], tmp_path / name, 8 << 30)
    found, bundled = read_folder(tmp_path / name), catalog.bundled(name)
    assert found.parts.total == total
    assert found.unclassified == ()
    facts = {"name", "source", "assumed"}
    assert found.model_dump(exclude=facts) == bundled.model_dump(exclude=facts)


@pytest.mark.parametrize("name", PUBLISHED_TOTALS)
def test_totals_are_the_published_ones(name):
    total, within = PUBLISHED_TOTALS[name]
    assert catalog.bundled(name).parts.total == pytest.approx(total, rel=within, abs=0)


def test_every_bundled_model_is_tested_and_says_its_source():
    assert set(catalog.names()) == set(RELEASED)
    assert all(len(catalog.bundled(name).source) > 40 for name in catalog.names())


def test_parts_of_v41_flash():
    g = catalog.bundled("deepseek-v4.1-flash")
    assert g.record_bytes == 18_800_640
    assert g.store_bytes == g.parts.experts == 40 * 384 * 18_800_640
    assert g.parts.tables == (384_006_168 + 384_016_682) * 264
    assert g.parts.drafter_experts == 3 * 128 * 18_800_640
    assert (g.drafter.kind, g.drafter.layers, g.drafter.block) == ("dspark", 3, 5)
    assert g.kv.formats["nvfp4_ds_mla"].bytes_per_token == 890  # DeepSeek's own figure


@pytest.mark.parametrize(
    ("name", "kv_format", "per_token"),
    [
        ("deepseek-v3", "bf16", 61 * 576 * 2),
        ("glm-5.2", "fp8_ds_mla", 78 * (656 + 132)),
        ("kimi-k2.7", "bf16", 61 * 576 * 2),
        ("qwen3-235b", "bf16", 94 * 2 * 4 * 128 * 2),
        ("qwen3-235b", "fp8", 94 * 2 * 4 * 128),
        ("qwen3-next-80b", "bf16", 12 * 2 * 2 * 256 * 2),
        ("gpt-oss-120b", "bf16", 18 * 2 * 8 * 64 * 2),
        ("glm-4.5-air", "bf16", 46 * 2 * 8 * 128 * 2),
        ("deepseek-v4-flash", "fp8_ds_mla", 584 * (21 / 4 + 20 / 128) + 132 * 21 / 4),
    ],
)
def test_kv_bytes_by_attention_layout(name, kv_format, per_token):
    assert catalog.bundled(name).kv.formats[kv_format].bytes_per_token == pytest.approx(per_token)


def test_bounded_state_of_windows_and_linear_attention():
    next80 = catalog.bundled("qwen3-next-80b").kv.formats["bf16"].bytes_per_sequence
    assert next80 == 36 * 2 * (32 * 128 * 128 + 3 * (2 * 16 * 128 + 32 * 128))
    assert catalog.bundled("gpt-oss-120b").kv.formats["bf16"].bytes_per_sequence == 18 * 128 * 2 * 8 * 64 * 2


@pytest.fixture
def hub_of(monkeypatch):
    """Serve a folder as hf://org/model."""
    constants = pytest.importorskip("huggingface_hub.constants", reason="huggingface_hub is not installed")
    running = []

    def start(folder):
        context = serving(folder)
        hub = context.__enter__()
        running.append(context)
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        return hub

    yield start
    for context in running:
        context.__exit__(None, None, None)


def test_510_gigabytes_are_planned_with_less_than_50_megabytes(hub_of, tmp_path):
    released.write(released.V41_FLASH, tmp_path / "model", 8 << 30)
    hub = hub_of(tmp_path / "model")
    found, fetched = read_hub("hf://org/model")
    assert found.parts == catalog.bundled("deepseek-v4.1-flash").parts
    assert fetched <= hub.sent < 50e6


SMALL = released.GLM4_AIR | {
    "num_hidden_layers": 3, "n_routed_experts": 4, "num_experts_per_tok": 2, "hidden_size": 64, "vocab_size": 128,
    "moe_intermediate_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16,
}  # fmt: skip


@pytest.fixture
def small(tmp_path):
    released.write(SMALL, tmp_path / "model", 1 << 18)
    return tmp_path / "model"


def shard(folder: Path, number: int = 0) -> Path:
    return sorted(folder.glob("*.safetensors"))[number]


def rewrite_header(folder: Path, change, length=None):
    """Change the header of the first shard; the data after it stays as long as it was."""
    path = shard(folder)
    raw = path.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])
    changed = change(header)
    text = changed if isinstance(changed, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + raw[end:])


def first(header):
    return header[min(header, key=lambda name: header[name]["data_offsets"])]


def edit_config(folder: Path, **values):
    config = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def edit_index(folder: Path, change):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


HOSTILE = {
    "length of 2^63": (lambda f: rewrite_header(f, lambda h: None, 1 << 63), "header of 2 to"),
    "length past the file": (lambda f: rewrite_header(f, lambda h: None, 1 << 30), "header of 2 to"),
    "length of zero": (lambda f: rewrite_header(f, lambda h: None, 0), "header of 2 to"),
    "no JSON": (lambda f: rewrite_header(f, lambda h: b"\0" * 100), "expected JSON"),
    "nested brackets": (lambda f: rewrite_header(f, lambda h: b"[" * 100_000), "expected JSON"),
    "overlapping tensors": (
        lambda f: rewrite_header(f, lambda h: [e.update(data_offsets=[0, e["data_offsets"][1] - e["data_offsets"][0]])
                                               for e in h.values()] and None),
        "overlaps",
    ),
    "a shape of 2^60": (lambda f: rewrite_header(f, lambda h: first(h).update(shape=[1 << 60])), "needs"),
    "a negative shape": (lambda f: rewrite_header(f, lambda h: first(h).update(shape=[-1, 2])), "shape"),
    "an unknown dtype": (lambda f: rewrite_header(f, lambda h: first(h).update(dtype="F5")), "unknown dtype"),
    "another dtype": (lambda f: rewrite_header(f, lambda h: first(h).update(dtype="F64")), "needs"),
    "a missing shard": (lambda f: shard(f).unlink(), "missing|expected model-00001"),
    "an empty shard": (lambda f: shard(f).write_bytes(b""), "0 bytes|safetensors file"),
    "a tensor that no shard has": (
        lambda f: edit_index(f, lambda m: m.update({"model.extra.weight": shard(f).name})), "does not hold it"
    ),
    "a shard outside the folder": (
        lambda f: edit_index(f, lambda m: m.update(x="../other.safetensors")), "name of a"
    ),
    "an index of lists": (lambda f: (f / "model.safetensors.index.json").write_text("[]"), "JSON object"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json"),
    "config without experts": (lambda f: edit_config(f, n_routed_experts=None), "n_routed_experts"),
    "config with fewer experts": (lambda f: edit_config(f, n_routed_experts=2), "does not belong"),
    "config with more experts": (lambda f: edit_config(f, n_routed_experts=400), "does not belong"),
    "config of another size": (lambda f: edit_config(f, moe_intermediate_size=3200), "does not belong"),
    "a size of text": (lambda f: edit_config(f, hidden_size="64"), "positive integer"),
    "a size of 2^70": (lambda f: edit_config(f, hidden_size=1 << 70), "does not belong"),
    "heads of nonsense": (lambda f: edit_config(f, num_key_value_heads=-3), "whole number"),
    "no routed experts": (
        lambda f: [p.unlink() for p in f.glob("*.safetensors*")]
        and released.write(SMALL | {"num_nextn_predict_layers": 0, "first_k_dense_replace": 3}, f, 1 << 18),
        "routed experts",
    ),
}  # fmt: skip


@pytest.mark.parametrize("where", ["folder", "hub"])
@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_checkpoints_are_one_clear_error(case, where, small, hub_of):
    damage, message = HOSTILE[case]
    damage(small)
    if where == "hub":
        hub_of(small)
    with pytest.raises(CheckpointError, match=message):
        read_folder(small) if where == "folder" else read_hub("hf://org/model", patience=QUICK)


def test_the_undamaged_one_is_read_alike_both_ways(small, hub_of):
    hub_of(small)
    local, remote = read_folder(small), read_hub("hf://org/model")[0]
    assert local.model_dump(exclude={"source"}) == remote.model_dump(exclude={"source", "name"}) | {"name": "model"}


def test_a_hub_that_states_other_sizes(small, hub_of):
    hub = hub_of(small)
    hub.sizes[shard(small).name] = 1 << 50
    with pytest.raises(CheckpointError, match=r"expected .* bytes"):
        read_hub("hf://org/model", patience=QUICK)


BOMB = """
import resource, sys
from moetier.errors import CheckpointError
from moetier.plan.headers import read_hub
from moetier.store.remote.fetch import Patience
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
try:
    read_hub("hf://org/model", patience=Patience(stall=5, attempts=1, pause=0.01))
except CheckpointError as error:
    print(error)
"""


def test_many_huge_headers_stop_within_bounded_memory(small, hub_of):
    """16 shards with a header of 47 MiB each: more than any model has, so the reader stops on the way."""
    weight_map = {f"model.t{i}": f"s{i}.safetensors" for i in range(16)}
    (small / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for i in range(16):
        with (small / f"s{i}.safetensors").open("wb") as file:
            text = json.dumps({f"model.t{i}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}).encode()
            file.write((47 << 20).to_bytes(8, "little") + text.ljust(47 << 20))
    hub = hub_of(small)
    done = subprocess.run(
        [sys.executable, "-c", BOMB], env=os.environ | {"HF_ENDPOINT": hub.endpoint}, capture_output=True, text=True,
        timeout=600,
    )  # fmt: skip
    assert "expected at most" in done.stdout, done.stderr[-2000:]
    assert hub.sent < 700e6


def test_unknown_names_are_counted_and_said(small):
    edit_config(small, model_type="something_new")
    rewrite_header(small, lambda h: [h.update({n.replace("self_attn", "mystery"): h.pop(n)}) for n in list(h)] and None)
    index = small / "model.safetensors.index.json"
    names = {n: p.name for p in small.glob("*.safetensors") for n in header_names(p)}
    index.write_text(json.dumps({"weight_map": names}))
    found = read_folder(small)
    assert any("mystery" in name for name in found.unclassified)
    assert found.parts.unclassified > 0
    assert found.assumed


def header_names(path: Path) -> list[str]:
    raw = path.read_bytes()
    return list(json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")]))


def test_a_cache_of_unknown_size_is_refused_and_can_be_stated(small):
    edit_config(small, model_type="something_new", num_attention_heads=None)
    with pytest.raises(CheckpointError, match="--kv-bytes-per-token"):
        read_folder(small)
    assert read_folder(small, 1000.0).kv.formats["stated"].bytes_per_token == 1000.0
