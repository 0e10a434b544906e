"""Mutations of names, index and files: each a function from a random generator to a checkpoint."""

from __future__ import annotations

import json
import shutil

import numpy as np

from moetier.checkpoint.names import LAYERS
from tests.store.mutants import (
    ENCODERS,
    INDEX,
    E,
    H,
    J,
    Mutant,
    bf16,
    layer_tensors,
    link,
    made,
    plain,
    safetensors,
    tensor,
)

KINDS = tuple(ENCODERS)
W = ("w1", "w3", "w2")


def any_kind(rng) -> str:
    return KINDS[int(rng.integers(len(KINDS)))]


def weight_of(m: Mutant, layer=None) -> str:
    return m.pick([name for name in m.experts(layer) if name.endswith((".weight", ".weight_packed"))])


def scale_of(m: Mutant) -> str:
    return m.pick([name for name in m.experts() if "scale" in name.rpartition(".")[2]])


def random(rng, *kinds) -> Mutant:
    return made(rng, kinds[int(rng.integers(len(kinds)))] if kinds else any_kind(rng))


def with_draft(m: Mutant, template="model.layers.{}.mlp.experts", number=2, experts=E, key="num_nextn_predict_layers"):
    """Add a draft layer, announced by config.json; it is in the store where it is as wide as the model."""
    written = 0 if template.startswith("mtp") else number
    parts, values = layer_tensors(m.rng, ENCODERS[m.kind], template.format(written), experts=experts)
    for name, value in parts.items():
        m.add(name, value)
    if key:
        m.config[key] = 1
    if experts == E:
        m.values[number] = values
    return m


# names --------------------------------------------------------------------------------------------------------------
def spelled(rng):
    spellings = [s.template.format(layer="{}") for s in LAYERS if not s.drafts]
    template = spellings[int(rng.integers(len(spellings)))]
    proj = W if rng.random() < 0.5 else ("gate_proj", "up_proj", "down_proj")
    return made(rng, any_kind(rng), template=template, proj=proj)


def drafted(rng):
    return with_draft(random(rng), ("model.layers.{}.mlp.experts", "mtp.layers.{}.mlp.experts")[int(rng.integers(2))])


def fused(rng):
    dtype, swap = ("BF16", "F16", "F32")[int(rng.integers(3))], rng.random() < 0.5
    m = made(rng, "bf16", encode=plain(dtype))
    tail = ".weight" if rng.random() < 0.3 else ""
    every = m.tensors
    for layer in range(2):
        parts = [[], []]
        for e in range(E):
            raw = [
                np.frombuffer(
                    every[f"model.layers.{layer}.mlp.experts.{e}.{p}.weight"][2], "<u4" if dtype == "F32" else "<u2"
                )
                for p in ("gate_proj", "up_proj", "down_proj")
            ]
            parts[0].append(np.concatenate([raw[0].reshape(J, H), raw[1].reshape(J, H)]))
            parts[1].append(raw[2].reshape(H, J))
        for name in m.experts(layer):
            m.edit(name)
        for name, stack in zip(("gate_up_proj", "down_proj"), parts, strict=True):
            data = np.stack(stack)
            m.add(
                f"model.layers.{layer}.mlp.experts.{name}{tail}",
                tensor(dtype, data.transpose(0, 2, 1) if swap else data),
            )
    return m


def neighbours(rng):
    m = random(rng)
    m.add("model.layers.1.mlp.shared_experts.gate_proj.weight", bf16(np.ones((4, H)))[0])
    m.add("model.layers.0.self_attn.k_proj.k_scale", tensor("F32", np.ones(1, "<f4")))
    return m


def renamed(rng):
    m = random(rng)
    name = weight_of(m)
    new = [
        name.replace("_proj", "_projection"),
        name.replace("experts.", "experts.0"),
        name.replace("layers.1.", "layers.7."),
        name.replace("layers.", "layers.0"),
        name.replace(".mlp.", ".moe."),
        name + "x",
    ][int(rng.integers(6))]
    m.edit(name, new if new != name else name + "y")
    return m


def gone(rng):
    m = random(rng)
    if rng.random() < 0.5:
        m.edit(weight_of(m))
    else:
        for name in m.experts(1):
            m.edit(name)
    return m


def one_more(rng):
    m = random(rng)
    name = weight_of(m)
    prefix, _, rest = name.partition(".experts.")
    m.add(f"{prefix}.experts.{E}.{rest.partition('.')[2]}", m.tensors[name])
    return m.meaningless()


def spelled_twice(rng):
    m = random(rng)
    for name in m.experts(0):
        for old, new in zip(("gate_proj", "up_proj", "down_proj"), W, strict=True):
            if f".{old}." in name and (new == "w1" or rng.random() < 0.5):
                m.add(
                    name.replace(old, new),
                    m.tensors[m.pick([n for n in m.experts(1) if n.split(".")[-2:] == name.split(".")[-2:]])],
                )
    return m.meaningless()


def two_names(rng):
    m = random(rng)
    for name in m.experts(0):
        m.add(name.replace("model.layers.0.mlp", "layers.0.ffn"), m.tensors[name])
    return m.meaningless()


# index --------------------------------------------------------------------------------------------------------------
def stale(rng):
    """A second copy of some experts, of the same names or of another format, in a shard that the index names."""
    m = random(rng)
    m.spread(int(rng.integers(2, 4)))
    other, _ = layer_tensors(rng, ENCODERS[any_kind(rng)], "model.layers.1.mlp.experts")
    files = list(m.files)
    for name, value in other.items():
        owner = m.index.get(name)
        file = files[int(rng.integers(len(files)))]
        if file != owner:
            m.files[file][name] = value
    return m


def beside(rng):
    m = random(rng)
    m.spread(2)
    other, _ = layer_tensors(rng, ENCODERS[m.kind], "model.layers.0.mlp.experts")
    m.more[("consolidated.safetensors", "model.safetensors", "adapter_model.safetensors")[int(rng.integers(3))]] = (
        safetensors(other)
    )
    return m


def second_index(rng):
    m = random(rng)
    m.spread(2)
    weight_map = dict(m.index) if rng.random() < 0.5 else {"output.weight": "consolidated.safetensors"}
    m.more["consolidated.safetensors.index.json"] = json.dumps({"weight_map": weight_map}).encode()
    return m


def linked(rng):
    m = random(rng)
    m.spread(2)

    def move(folder):
        blobs = folder.with_name(folder.name + "-blobs")
        blobs.mkdir()
        for number, path in enumerate(sorted(folder.iterdir())):
            shutil.move(path, blobs / f"b{number}")
            link(blobs / f"b{number}", path)

    m.after.append(move)
    return m


def unlisted(rng):
    m = random(rng)
    m.spread(2)
    del m.index[weight_of(m)]
    return m


def astray(rng):
    m = random(rng)
    m.spread(2)
    name = weight_of(m)
    paths = (
        "../x/model.safetensors",
        "/model.safetensors",
        "sub/" + m.index[name],
        "",
        "model.bin",
        "none.safetensors",
        7,
        None,
    )
    m.index[name] = paths[int(rng.integers(len(paths)))]
    return m


def elsewhere(rng):
    """The index says the other shard; only sometimes there is something there."""
    m = random(rng)
    m.spread(2)
    name = weight_of(m)
    m.index[name] = next(file for file in m.files if file != m.index[name])
    return m


def contradiction(rng):
    m = random(rng)
    m.spread(2)
    other = dict(m.index)
    name = weight_of(m)
    other[name] = "model-other.safetensors"
    m.more["other.safetensors.index.json"] = json.dumps({"weight_map": other}).encode()
    m.more["model-other.safetensors"] = safetensors({name: m.tensors[name]})
    return m.meaningless()


def no_map(rng):
    m = random(rng)
    m.spread(1)
    texts = (
        b"{}",
        b"[]",
        b'{"weight_map": []}',
        b'{"weight_map": {}}',
        b"{",
        b'{"weight_map": {"a": "b.safetensors"}}',
    )
    m.more[INDEX] = texts[int(rng.integers(len(texts)))]
    return m


# shards -------------------------------------------------------------------------------------------------------------
def numbered(rng):
    m = random(rng)
    m.spread(int(rng.integers(1, 6)), index=rng.random() < 0.5)
    return m


def lone(rng):
    m = random(rng)
    m.single()
    if rng.random() < 0.5:
        m.files = {"weights.safetensors": m.tensors}
    return m


def damaged(rng):
    m = random(rng)
    m.spread(int(rng.integers(1, 4)), index=rng.random() < 0.5)
    file = m.pick(list(m.files))
    raw = safetensors(m.files[file])
    kind = int(rng.integers(5))
    if kind == 0:
        raw = raw[: int(rng.integers(len(raw)))]
    elif kind == 1:
        raw += b"\0" * int(rng.integers(1, 9))
    elif kind == 2:
        raw = (int.from_bytes(raw[:8], "little") + int(rng.integers(1, 99))).to_bytes(8, "little") + raw[8:]
    elif kind == 3:
        at = raw.index(b'"data_offsets": [') + 17
        raw = raw[:at] + (b"9" if raw[at : at + 1] != b"9" else b"8") + raw[at + 1 :]
    else:
        raw = raw[:8] + bytes(rng.integers(0, 256, 16).astype(np.uint8)) + raw[24:]
    m.more[file] = raw
    return m


def incomplete(rng):
    m = random(rng)
    m.spread(int(rng.integers(2, 5)), index=rng.random() < 0.3)
    del m.files[m.pick(list(m.files))]
    return m


def mixed(rng):
    m = random(rng)
    m.spread(int(rng.integers(1, 4)), index=False)
    other, _ = layer_tensors(rng, ENCODERS[m.kind], "model.layers.0.mlp.experts")
    names = ("model.safetensors", "consolidated.safetensors", "model-00001-of-00009.safetensors", "x.safetensors")
    m.more[names[int(rng.integers(len(names)))]] = safetensors(other)
    return m.meaningless()


def exchanged(rng):
    m = random(rng)
    m.spread(2)
    first, second = m.files
    m.more = {first: safetensors(m.files[second]), second: safetensors(m.files[first])}
    return m
