"""Which files and tensors of a folder or a repository are the checkpoint's.

With an index, a tensor is where the index says and nowhere else. Without one, the files must be one whole set.
"""

from __future__ import annotations

import functools
import logging
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moetier.errors import CheckpointError

if TYPE_CHECKING:
    from moetier.checkpoint.shards import Shard

logger = logging.getLogger(__name__)

SUFFIX = ".safetensors"
INDEX_SUFFIX = SUFFIX + ".index.json"
USUAL = "model" + INDEX_SUFFIX
"""The index that frameworks read where there are several."""
SINGLE = "model" + SUFFIX
CONSOLIDATED = re.compile(r"(?:model|consolidated)\.safetensors")
NUMBERED = re.compile(r"(.+)-(\d{1,9})-of-(\d{1,9})\.safetensors")
FEW = 2


@dataclass(frozen=True)
class Files:
    """The files of a checkpoint, among those of a folder or a repository."""

    names: tuple[str, ...]
    """Its shards, sorted."""
    weight_map: dict[str, str]
    """Tensor to shard; empty without an index."""
    index_name: str
    index: bytes
    """The index as it is written; b"" without one."""
    unread: tuple[str, ...]
    """Other safetensors files beside them."""


def choose_files(where: str, names: Iterable[str], read: Callable[[str], tuple[dict[str, Any], bytes]]) -> Files:
    """The checkpoint's files among all file names of a folder; CheckpointError where that cannot be told.

    read gives the content of an index by its name. No shard at all is for the caller to refuse.
    """
    plain = sorted(name for name in names if not name.startswith(".") and "/" not in name)
    present = [name for name in plain if name.endswith(SUFFIX)]
    indexes = {name: _read_weight_map(f"{where}/{name}", read) for name in plain if name.endswith(INDEX_SUFFIX)}
    index_name, weight_map, raw = "", dict[str, str](), b""
    if not indexes:
        chosen = _without_index(where, present)
    else:
        index_name = _one_of(where, {name: weight_map for name, (weight_map, _) in indexes.items()})
        weight_map, raw = indexes[index_name]
        chosen = sorted(set(weight_map.values()))
        absent = next((name for name in chosen if name not in present), None)
        if absent is not None:
            raise CheckpointError(f"shard {where}/{absent} is missing, {index_name} names it; download it again")
    unread = tuple(name for name in present if name not in set(chosen))
    if unread:
        why = (
            f"which {index_name} does not name" if index_name else f"since {', '.join(chosen)} is the whole checkpoint"
        )
        say_once(f"{where}: {named(unread)} not read, {why}")
    return Files(tuple(chosen), weight_map, index_name, raw, unread)


def lawful(where: str, files: Files, shards: Mapping[str, Shard]) -> list[Shard]:
    """The shards with those tensors only that the index places in them, which must all be there."""
    if not files.weight_map:
        return [shards[name] for name in files.names]
    for tensor, file in files.weight_map.items():
        if tensor not in shards[file].tensors:
            raise CheckpointError(
                f"{where}/{files.index_name} places tensor {_plain(tensor)} in {file}, which does not hold "
                "it; download both again"
            )
    result, ignored = [], []
    for name in files.names:
        own = {t: tensor for t, tensor in shards[name].tensors.items() if files.weight_map.get(t) == name}
        other = frozenset(shards[name].tensors.keys() - own.keys())
        ignored += [f"{tensor} in {name}" for tensor in sorted(other)]
        result.append(replace(shards[name], tensors=own, ignored=other))
    if ignored:
        say_once(
            f"{where}: {len(ignored)} tensors ignored, which lie where {files.index_name} does not place them: "
            f"{named(ignored)}"
        )
    return result


def named(names: Iterable[str]) -> str:
    """The first few of some names, and how many there are more. No name can move a terminal's cursor."""
    names = [_plain(name) for name in names]
    return ", ".join(names[:FEW]) + (f" and {len(names) - FEW} more" if len(names) > FEW else "")


@functools.cache
def say_once(line: str) -> None:
    """Warn, once a process: a checkpoint is opened more often than that."""
    logger.warning("%s", line)


def _one_of(where: str, weight_maps: dict[str, dict[str, str]]) -> str:
    """The index that counts. Others beside it may be of another set of files, but must not contradict it."""
    if len(weight_maps) == 1:
        return next(iter(weight_maps))
    usual = weight_maps.get(USUAL)
    for other in weight_maps.values():
        differs = usual is None or any(usual.get(tensor, file) != file for tensor, file in other.items())
        if differs:
            raise CheckpointError(
                f"{where}: expected one *{INDEX_SUFFIX}, found {', '.join(weight_maps)}, which place tensors in "
                "different files; remove the one that does not belong to the checkpoint"
            )
    others = [name for name in weight_maps if name != USUAL]
    say_once(f"{where}: {named(others)} not read, {USUAL} is the index")
    return USUAL


def _without_index(where: str, present: list[str]) -> list[str]:
    """The shards where no index names them: one file, one whole numbered set, or files of other names."""
    sets: dict[tuple[str, int], set[int]] = {}
    for name in present:
        if match := NUMBERED.fullmatch(name):
            sets.setdefault((match[1], int(match[3])), set()).add(int(match[2]))
    if not sets:
        return [SINGLE] if SINGLE in present else present
    consolidated = [name for name in present if CONSOLIDATED.fullmatch(name)]
    if consolidated or len(sets) > 1:
        kinds = consolidated + [f"{stem}-*-of-{total:05d}{SUFFIX}" for stem, total in sets]
        raise CheckpointError(
            f"{where}: expected one set of weights, found {' and '.join(kinds)} without an index that says which of "
            "them are the checkpoint's; remove those that are not, or download the index"
        )
    ((stem, total), numbers) = next(iter(sets.items()))
    if len(numbers) != total or max(numbers) != total:
        absent = next((number for number in range(1, total + 1) if number not in numbers), 0)
        raise CheckpointError(
            f"{where}: expected {total} files {stem}-*-of-{total:05d}{SUFFIX}, found {len(numbers)} of them"
            f"{f' and not number {absent}' if absent else ''}, and no index; download those that are missing"
        )
    return present


def _read_weight_map(index: str, read: Callable[[str], tuple[dict[str, Any], bytes]]) -> tuple[dict[str, str], bytes]:
    content, raw = read(index.rpartition("/")[2])
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: expected a weight_map with names and files, found {type(weight_map).__name__}")
    for name, file in weight_map.items():
        if not isinstance(file, str):
            raise CheckpointError(f"{index}: expected a file's name for tensor {name}, found {reprlib.repr(file)}")
    for file in set(weight_map.values()):
        if Path(file).name != file or not file.endswith(SUFFIX) or file.startswith("."):
            raise CheckpointError(f"{index}: expected the name of a *.safetensors file beside it, found {file!r}")
    return weight_map, raw


def _plain(name: str) -> str:
    return name if name.isprintable() else ascii(name)
