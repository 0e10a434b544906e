"""JSON from strangers: of bounded size, an object, no key twice."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from moetier.errors import CheckpointError

MAX_JSON = 48 << 20
"""Bytes of a header, an index or a config: enough for 400,000 tensors, and parsed within a GiB whatever it holds."""
QUANTIZATION = "hf_quant_config.json"
DENSE_JSON = 1 << 20
"""From this size on, text made of nothing but tiny values is refused before it is parsed: it would fill the memory."""
SPARSE = {b"[": 16, b"{": 16, b'"': 5, b",": 6}
"""A table of tensors has at least this many bytes for each of these characters."""


def read_json(path: Path) -> tuple[dict[str, Any], bytes]:
    """A JSON object from a file of bounded size, and its bytes."""
    size = regular_size(path)
    if size > MAX_JSON:
        raise CheckpointError(f"{path}: expected at most {MAX_JSON} bytes of JSON, found {size}")
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    return parse_json(raw, str(path)), raw


def read_config(folder: Path) -> tuple[dict[str, Any], bytes]:
    """config.json of a checkpoint's folder, and its bytes."""
    file = folder / "config.json"
    if not folder.is_dir():
        found = "a file" if folder.exists() else "nothing"
        raise CheckpointError(f"{folder}: expected a checkpoint folder, found {found}; {what_to_give(folder)}")
    if not os.path.lexists(file):
        raise CheckpointError(f"{file} cannot be read: it is not there; {what_to_give(folder)}")
    config, raw = read_json(file)
    return with_quantization(config, folder), raw


def with_quantization(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return config.json with what hf_quant_config.json beside it says of number formats, where it is there.

    ModelOpt up to 0.29 wrote them there alone, and vLLM reads them so. CheckpointError where both files say it, and
    not the same.
    """
    path = folder / QUANTIZATION
    if not os.path.lexists(path):
        return config
    said, _ = read_json(path)
    inner = said.get("quantization", said)
    if not isinstance(inner, dict):
        raise CheckpointError(f"{path}: expected an object for quantization, found {inner!r:.80}; download it again")
    own = config.get("quantization_config")
    if own is None:
        return {**config, "quantization_config": {"quant_method": "modelopt", **said, **inner}}
    algorithms = [part.get("quant_algo") for part in (own, inner) if isinstance(part, dict)]
    if len(algorithms) == 2 and None not in algorithms and len({str(one).upper() for one in algorithms}) > 1:
        raise CheckpointError(
            f"{path}: expected quant_algo {algorithms[0]!r:.40} as config.json says, found {algorithms[1]!r:.40}; one "
            "of the files is of another release: download both again"
        )
    return config


def what_to_give(path: Path) -> str:
    """Return what to give for something that is no checkpoint."""
    quantized = path.suffix == ".gguf" or any(path.glob("*.gguf"))
    note = " (GGUF is not read: take the repository that it was made from)" if quantized else ""
    return f"give the folder that holds config.json and *.safetensors{note}"


def regular_size(path: Path) -> int:
    """Bytes of a regular file; CheckpointError for anything else."""
    try:
        status = path.stat()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path}: expected a regular file, found something else")
    return status.st_size


def parse_json(raw: bytes, what: str) -> dict[str, Any]:
    """A JSON object without a key twice; what names it in errors."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            keys = [key for key, _ in pairs]
            raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} twice")
        return found

    if len(raw) > DENSE_JSON and any(raw.count(mark) * size > len(raw) for mark, size in SPARSE.items()):
        raise CheckpointError(f"{what}: expected a table of names, found mostly punctuation; the file is damaged")
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{what}: expected JSON, found {error}; the file is damaged: download it again"
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{what}: expected a JSON object, found {type(value).__name__}")
    return value
