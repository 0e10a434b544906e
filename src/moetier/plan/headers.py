"""A model's geometry from config.json and safetensors headers alone, of a folder or of hf://ORG/NAME.

Of a repository, config.json, the index and each shard's header are fetched by ranged requests; no weight is.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moetier.checkpoint import config as keys
from moetier.checkpoint.experts import open_experts
from moetier.checkpoint.index import choose_files, lawful
from moetier.checkpoint.json_files import QUANTIZATION
from moetier.checkpoint.shards import MAX_JSON, Shard, Shards, Tensor, parse_shard, read_config, read_json
from moetier.decision.decide import format_of, require_readable
from moetier.decision.facts import TOKENIZER, WHOLE_TOKENIZER, Facts, TokenizerFiles
from moetier.errors import CheckpointError
from moetier.plan import kv
from moetier.plan.geometry import Drafter, Geometry, KvLayout
from moetier.plan.parts import sort_tensors
from moetier.store.origin import Origin
from moetier.store.remote.fetch import Fetcher, Patience, RemoteFile
from moetier.store.remote.hub import SCHEME, Repository, open_repository
from moetier.store.work import Workers

FIRST_READ = 1 << 16
"""Bytes of a shard's first request: its length field, and often the whole header."""
AT_ONCE = 8
MAX_TOTAL = 512 << 20
"""Bytes of all headers together: four times those of the largest checkpoint that we know."""
MAX_SHARDS = 4096
EXPERT = re.compile(r"\.experts\.(\d{1,6})\.")


@dataclass(frozen=True)
class Headers:
    """A model by its headers and config: the facts, whose geometry is worked out when it is asked for."""

    name: str
    source: str
    facts: Facts
    origin: Origin | None = None
    shards: Shards | None = None
    fetched: int = 0
    """Bytes that came over the network for it."""

    def check(self) -> None:
        """Refuse what `store build` refuses by headers and config.json, with the same words."""
        require_readable(self.facts)
        if self.origin is None and self.shards is not None:
            open_experts(self.facts.config, self.shards, list(self.facts.layers))

    def geometry(self, kv_bytes_per_token: float | None = None) -> Geometry:
        """CheckpointError where config.json and headers do not agree."""
        found = geometry_of(self.name, self.source, self.facts, kv_bytes_per_token, self.origin)
        self.check()
        return found


def read_folder(folder: Path, kv_bytes_per_token: float | None = None) -> Geometry:
    """Read those of a checkpoint on this machine."""
    return folder_headers(folder).geometry(kv_bytes_per_token)


def folder_headers(folder: Path) -> Headers:
    """Read those of a checkpoint on this machine."""
    config, _ = read_config(folder)
    shards, origin = Shards.open(folder), Origin.read(folder)
    trimmed = (None, ()) if origin is None else (origin.source_format, origin.moe_layers)
    facts = Facts(str(folder), config, shards.tensors, TokenizerFiles.read(folder), *trimmed)
    return Headers(folder.resolve().name, str(folder), facts, origin, shards)


def read_hub(
    source: str, kv_bytes_per_token: float | None = None, patience: Patience | None = None
) -> tuple[Geometry, int]:
    """Read those of hf://ORG/NAME[@REVISION], and count the bytes that were fetched for it."""
    found = hub_headers(source, patience)
    return found.geometry(kv_bytes_per_token), found.fetched


def hub_headers(source: str, patience: Patience | None = None) -> Headers:
    """Read those of hf://ORG/NAME[@REVISION]."""
    repository = open_repository(source)
    fetcher = _Counting(Fetcher(repository.headers, patience))
    with tempfile.TemporaryDirectory(prefix="moetier-") as scratch:
        folder = Path(scratch) / repository.name.replace("/", "--")
        folder.mkdir()
        _small(fetcher, repository, "config.json", folder)
        if QUANTIZATION in repository.files:
            _small(fetcher, repository, QUANTIZATION, folder)
        config, _ = read_config(folder)
        files = choose_files(
            source, repository.files, lambda name: read_json(_small(fetcher, repository, name, folder))
        )
        if _has(repository):
            _small(fetcher, repository, TOKENIZER, folder)
        tokenizer = replace(TokenizerFiles.read(folder), whole=WHOLE_TOKENIZER in repository.files)
    names = files.names
    if not 0 < len(names) <= MAX_SHARDS:
        raise CheckpointError(
            f"{source}: expected 1 to {MAX_SHARDS} safetensors files, found {len(names) or 'none'}; give a repository "
            "of whole safetensors weights"
        )
    with Workers(AT_ONCE, "moetier-headers") as workers:
        shards = dict(
            zip(names, workers.map(lambda name: _header(fetcher, repository.files[name]), names), strict=True)
        )
    lawful_shards = Shards(Path(source), files.index, lawful(source, files, shards), files.unread)
    where, name = f"{SCHEME}{repository.name}@{repository.commit}", repository.name.rpartition("/")[2]
    facts = Facts(source, config, lawful_shards.tensors, tokenizer)
    return Headers(name, where, facts, shards=lawful_shards, fetched=fetcher.fetched)


class _Counting:
    """A fetcher that counts, and stops when a repository's headers are larger than any model's."""

    def __init__(self, fetcher: Fetcher) -> None:
        self.fetcher = fetcher
        self.fetched = 0

    def read(self, file: RemoteFile, start: int, stop: int) -> bytes:
        self.fetched += stop - start
        if self.fetched > MAX_TOTAL:
            raise CheckpointError(
                f"{file.url}: expected at most {MAX_TOTAL} bytes of config, index and headers in all, found more; this "
                "is no model that can be planned"
            )
        return self.fetcher.read(file, start, stop)


def _small(fetcher: _Counting, repository: Repository, name: str, folder: Path) -> Path:
    """Fetch a file of JSON into a folder, where the store's reader checks it."""
    file = repository.files.get(name)
    if file is None or not 0 < file.size <= MAX_JSON:
        found = "none" if file is None else f"{file.size} bytes"
        raise CheckpointError(f"{SCHEME}{repository.name}: expected {name} of 1 to {MAX_JSON} bytes, found {found}")
    path = folder / name
    path.write_bytes(fetcher.read(file, 0, file.size))
    return path


def _has(repository: Repository) -> bool:
    """Whether there is a tokenizer_config.json that can be looked at."""
    file = repository.files.get(TOKENIZER)
    return file is not None and 0 < file.size <= MAX_JSON


def _header(fetcher: _Counting, file: RemoteFile) -> Shard:
    """One shard by its header: what the first request brought is not asked for again."""
    first = fetcher.read(file, 0, min(FIRST_READ, file.size))

    def read(start: int, stop: int) -> bytes:
        have = first[start:stop]
        return have + fetcher.read(file, start + len(have), stop) if len(have) < stop - start else have

    return parse_shard(Path(file.name), file.size, read)


def geometry_of(
    name: str,
    source: str,
    facts: Facts,
    kv_bytes_per_token: float | None = None,
    origin: Origin | None = None,
) -> Geometry:
    """Put config.json and headers together; CheckpointError where they do not agree, or experts cannot be read.

    origin: of a trimmed checkpoint, whose experts are in a store and not among the tensors.
    """
    require_readable(facts)
    config, tensors, text = facts.config, list(facts.tensors.values()), facts.text
    layers = keys.required(text, keys.LAYERS)
    hidden = keys.required(text, keys.HIDDEN)
    intermediate = keys.required(text, keys.INTERMEDIATE)
    experts, top_k = keys.required(text, keys.EXPERTS), keys.required(text, keys.TOP_K)
    if origin is None:
        own = [tensor for tensor in tensors if not facts.drafts(tensor.name)]
        moe = _routed(own, layers, experts, hidden * intermediate)
        formats = format_of(facts, facts.own_layers)
    else:
        moe, formats = sum(layer.number < layers for layer in origin.moe_layers), origin.source_format
    sorted_tensors = sort_tensors(tensors, layers)
    layout: KvLayout = kv.kv_layout(text, layers) if kv_bytes_per_token is None else kv.stated(kv_bytes_per_token)
    return Geometry(
        name=name,
        model_type=str(config.get("model_type") or keys.model_type(config) or "unknown"),
        source=f"headers of {source}",
        layers=layers,
        moe_layers=moe,
        hidden=hidden,
        intermediate=intermediate,
        experts=experts,
        top_k=top_k,
        expert_format=formats,
        max_context=keys.size(text, ("max_position_embeddings", "max_seq_len")) or 1 << 20,
        parts=sorted_tensors.parts,
        kv=layout,
        drafter=_drafter(text),
        assumed=(layout.assumed,) if layout.assumed else (),
        unclassified=sorted_tensors.unclassified,
    )


def _routed(tensors: list[Tensor], layers: int, experts: int, matrix: int) -> int:
    """Number of the model's own layers with routed experts.

    matrix: weights of one matrix of an expert; a layer must have three times that for each expert, at 4 to 32 bits.
    """
    sums: dict[str, int] = {}
    for tensor in tensors:
        prefix, found, rest = tensor.name.partition(".experts.")
        if not found or _draft_name(prefix, layers):
            continue
        sums[prefix] = sums.get(prefix, 0) + tensor.nbytes
        number = rest.partition(".")[0]
        if number.isdecimal() and int(number) >= experts:
            raise CheckpointError(
                f"config.json says {experts} experts, but there is tensor {tensor.name}; it does not belong to these "
                "weights"
            )
    weights = 3 * matrix * experts
    for prefix, size in sums.items():
        if not weights / 2 <= size <= weights * 4.5:
            raise CheckpointError(
                f"{prefix}: expected {weights} weights of {experts} experts by config.json, found {size} bytes, which "
                "is no number format; config.json does not belong to these weights"
            )
    return len(sums)


def _draft_name(prefix: str, layers: int) -> bool:
    match = re.search(r"layers\.(\d{1,4})\.", prefix + ".")
    return prefix.startswith("mtp") or (match is not None and int(match[1]) >= layers)


def _drafter(text: dict[str, Any]) -> Drafter | None:
    layers = next((text[key] for key in keys.DRAFT_LAYERS if text.get(key)), None)
    if type(layers) is not int or not 0 < layers < 64:
        return None
    dspark = keys.size(text, ("dspark_block_size",))
    return Drafter(
        kind="dspark" if dspark else "mtp",
        layers=layers,
        experts=keys.size(text, ("dspark_n_routed_experts", *keys.EXPERTS)) or 0,
        top_k=keys.size(text, ("dspark_num_experts_per_tok", *keys.TOP_K)) or 0,
        block=dspark or layers,
    )
