"""Safetensors files from strangers: each of these is refused with one error, in bounded time and memory."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from moetier.checkpoint.shards import MAX_JSON, Shards, read_shard
from moetier.errors import CheckpointError


def file_of(header, data=b"", length=None):
    """The bytes of a file; header is text, or an object that becomes it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype="U8", shape=(4,), offsets=(0, 4), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


ONE = {"a": entry()}
TWO = {"a": entry(), "b": entry(offsets=(4, 8))}

HOSTILE = {
    "empty file": b"",
    "seven bytes": b"\x02\0\0\0\0\0\0",
    "length zero": file_of(b""),
    "length one": file_of(b"{", b"}"),
    "length past the file": file_of(ONE, b"abcd", 1000),
    "length of 2^63": file_of(ONE, b"abcd", 1 << 63),
    "length of 2^64-1": file_of(ONE, b"abcd", (1 << 64) - 1),
    "length cuts the JSON": file_of(ONE, b"abcd", 10),
    "length takes in data": file_of(ONE, b"abcd", len(json.dumps(ONE)) + 2),
    "not JSON": file_of(b"pickle....."),
    "not UTF-8": file_of(b'{"\xff\xfe": 1}'),
    "UTF-16": file_of(json.dumps(ONE).encode("utf-16"), b"abcd"),
    "a list": file_of([ONE]),
    "a number": file_of(b"1234"),
    "null": file_of(b"null"),
    "a key twice": file_of(b'{"a":%s,"a":%s}' % (json.dumps(entry()).encode(), json.dumps(entry()).encode()), b"abcd"),
    "a key of an entry twice": file_of(b'{"a":{"dtype":"U8","dtype":"I8","shape":[4],"data_offsets":[0,4]}}', b"abcd"),
    "brackets nested": file_of(b"[" * 100_000),
    "objects nested": file_of(b'{"a":' * 100_000),
    "a bomb of empty lists": file_of(b'{"a":[' + b"[]," * 1_000_000 + b"[]]}"),
    "a bomb of empty objects": file_of(b'{"a":[' + b"{}," * 1_000_000 + b"{}]}"),
    "an entry that is a list": file_of({"a": [1, 2]}),
    "an entry that is a string": file_of({"a": "x"}),
    "no dtype": file_of({"a": {"shape": [4], "data_offsets": [0, 4]}}, b"abcd"),
    "no shape": file_of({"a": {"dtype": "U8", "data_offsets": [0, 4]}}, b"abcd"),
    "no offsets": file_of({"a": {"dtype": "U8", "shape": [4]}}, b"abcd"),
    "a key more": file_of({"a": entry(extra=1)}, b"abcd"),
    "unknown dtype": file_of({"a": entry(dtype="F5")}, b"abcd"),
    "dtype of another type": file_of({"a": entry(dtype=8)}, b"abcd"),
    "dtype in lower case": file_of({"a": entry(dtype="u8")}, b"abcd"),
    "negative dimension": file_of({"a": entry(shape=(-4,))}, b"abcd"),
    "two negative dimensions": file_of({"a": entry(shape=(-2, -2))}, b"abcd"),
    "dimension as text": file_of({"a": entry(shape=("4",))}, b"abcd"),
    "dimension as a float": file_of({"a": entry(shape=(4.0,))}, b"abcd"),
    "dimension as true": file_of({"a": entry(shape=(True, 4))}, b"abcd"),
    "dimension of 2^64": file_of({"a": entry(shape=(1 << 64, 4))}, b"abcd"),
    "product that wraps to 4": file_of({"a": entry(shape=(1 << 62, 4, 1))}, b"abcd"),
    "number of 5000 digits": file_of(b'{"a":{"dtype":"U8","shape":[%s],"data_offsets":[0,4]}}' % (b"9" * 5000)),
    "nine dimensions": file_of({"a": entry(shape=(4, 1, 1, 1, 1, 1, 1, 1, 1))}, b"abcd"),
    "shape that is a number": file_of({"a": {"dtype": "U8", "shape": 4, "data_offsets": [0, 4]}}, b"abcd"),
    "one offset": file_of({"a": entry(offsets=(0,))}, b"abcd"),
    "three offsets": file_of({"a": entry(offsets=(0, 4, 8))}, b"abcd"),
    "negative offset": file_of({"a": entry(offsets=(-4, 0))}, b"abcd"),
    "offsets that run backwards": file_of({"a": entry(offsets=(4, 0))}, b"abcd"),
    "NaN as an offset": file_of(b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[NaN,4]}}', b"abcd"),
    "offsets past the file": file_of({"a": entry(offsets=(0, 4))}, b"abc"),
    "fewer bytes than the shape": file_of({"a": entry(shape=(5,))}, b"abcd"),
    "more bytes than the shape": file_of({"a": entry(shape=(3,))}, b"abcd"),
    "half a byte": file_of({"a": entry(dtype="F4", shape=(7,))}, b"abcd"),
    "an overlap": file_of({"a": entry(), "b": entry(offsets=(2, 6))}, b"abcdef"),
    "the same bytes twice": file_of({"a": entry(), "b": entry()}, b"abcd"),
    "a hole": file_of({"a": entry(), "b": entry(offsets=(5, 9))}, b"abcdefghi"),
    "a hole at the start": file_of({"a": entry(offsets=(1, 5))}, b"abcde"),
    "bytes left over": file_of(TWO, b"abcdefghi"),
}  # fmt: skip


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file_is_refused(tmp_path, content):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model.safetensors"):
        read_shard(path)


def test_there_are_at_least_fifty():
    assert len(HOSTILE) >= 50


def test_the_files_that_hostile_ones_are_made_from_open(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_of(TWO, b"abcdefgh"))
    tensors = read_shard(path).tensors
    assert [bytes(Shards.open(tmp_path).read(tensors[name])) for name in ("a", "b")] == [b"abcd", b"efgh"]


def test_a_folder_and_a_pipe_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="expected a regular file"):
        read_shard(tmp_path)
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(CheckpointError, match="expected a regular file"):
        read_shard(tmp_path / "pipe.safetensors")


INDEXES = {
    "a path that climbs": {"weight_map": {"a": "../model.safetensors"}},
    "an absolute path": {"weight_map": {"a": "/etc/passwd.safetensors"}},
    "a file of another kind": {"weight_map": {"a": "config.json"}},
    "a number for a file": {"weight_map": {"a": 1}},
    "an empty map": {"weight_map": {}},
    "no map": {"metadata": {}},
    "a list for a map": {"weight_map": ["a"]},
    "a shard that is missing": {"weight_map": {"a": "other.safetensors"}},
    "a tensor that the shard lacks": {"weight_map": {"z": "model.safetensors"}},
}


@pytest.mark.parametrize("index", INDEXES.values(), ids=INDEXES)
def test_a_hostile_index_is_refused(tmp_path, index):
    (tmp_path / "model.safetensors").write_bytes(file_of(ONE, b"abcd"))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError):
        Shards.open(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    for name in ("x.safetensors", "y.safetensors"):
        (tmp_path / name).write_bytes(file_of(ONE, b"abcd"))
    with pytest.raises(CheckpointError, match=r"lies in both x.safetensors and y.safetensors"):
        Shards.open(tmp_path)


def keys(count):
    """`"8 digits":1,` so many times, all different."""
    text = np.tile(np.frombuffer(b'"00000000":1,', np.uint8), (count, 1))
    numbers = np.arange(count)
    for column in range(8, 0, -1):
        text[:, column] += (numbers % 10).astype(np.uint8)
        numbers //= 10
    return text.tobytes()


BOMBS = {
    "lists": lambda size: b'{"a":[' + b"[]," * (size // 3) + b"0]}",
    "numbers": lambda size: b'{"a":[' + b"123456," * (size // 7) + b"0]}",
    "strings": lambda size: b'{"a":[' + b'"123456789",' * (size // 12) + b"0]}",
    "keys": lambda size: b'{"a":{' + keys(size // 13) + b'"a":0}}',
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_a_bomb_fills_at_most_a_gibibyte_were_it_of_the_largest_size(tmp_path, bomb):
    """A header in which every few bytes are a value; a third of the largest size, so that the test is quick."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_of(bomb(MAX_JSON // 3)))
    code = (
        "import sys, re\nfrom pathlib import Path\nfrom moetier.errors import CheckpointError\n"
        "from moetier.checkpoint.shards import read_shard\n"
        "try:\n    read_shard(Path(sys.argv[1]))\n"
        "except CheckpointError as error:\n    assert len(str(error)) < 1000\n"
        "    print(re.search(r'VmHWM:\\s+(\\d+) kB', Path('/proc/self/status').read_text())[1])\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert 10_000 < int(done.stdout) < (1 << 20) // 3 + 60_000  # KiB; the interpreter and NumPy need 60,000
