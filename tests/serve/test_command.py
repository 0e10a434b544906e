"""The server's command line and environment follow from what was asked for."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from moetier.errors import SettingsError
from moetier.launch.command import (
    ACCESS,
    ServeRequest,
    arguments,
    check_reachable_only_with_key,
    environment,
    example,
    is_loopback,
)
from moetier.launch.keys import HASHES, hashes_of
from moetier.settings import Settings

REQUEST = ServeRequest(Path("/models/m"), Settings.parse({"store": "/s", "dram_records": 8, "cpus": [0, 1]}))


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("localhost", True),
        ("LocalHost", True),
        ("", False),
        ("::1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.5", False),
        ("example.org", False),
    ],
)
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_beyond_loopback_wants_a_key() -> None:
    check_reachable_only_with_key(REQUEST)
    with pytest.raises(SettingsError, match="--api-key-file"):
        check_reachable_only_with_key(replace(REQUEST, host="0.0.0.0"))
    check_reachable_only_with_key(replace(REQUEST, host="0.0.0.0", api_keys=("k",)))


def test_settings_reach_the_plugin() -> None:
    command = arguments(REQUEST, on_cpu=True)
    config = json.loads(command[command.index("--additional-config") + 1])
    assert Settings.parse(config["moetier"]) == REQUEST.settings
    assert command[command.index("--quantization") + 1] == command[command.index("--load-format") + 1] == "moetier"
    assert "--trust-remote-code" not in command


def test_the_engine_of_cpu_workers_rests_unless_the_user_names_an_executor() -> None:
    assert "--distributed-executor-backend" not in arguments(REQUEST, on_cpu=False)
    command = arguments(replace(REQUEST, extra=("--distributed-executor-backend", "mp")), on_cpu=True)
    backends = [command[at + 1] for at, word in enumerate(command) if word == "--distributed-executor-backend"]
    assert backends == ["moetier.vllm.executor.RestingExecutor", "mp"]


def test_kv_cache_of_a_gpu_is_vllms() -> None:
    assert "--kv-cache-memory-bytes" in arguments(REQUEST, on_cpu=True)
    assert "--kv-cache-memory-bytes" not in arguments(REQUEST, on_cpu=False)


def test_what_follows_goes_to_vllm_after_ours_and_before_the_outermost_layer() -> None:
    command = arguments(replace(REQUEST, extra=("--max-model-len", "128", "--middleware", "theirs")), True)
    assert command[-6:] == ["--max-model-len", "128", "--middleware", "theirs", "--middleware", ACCESS]


def test_an_api_key_reaches_the_server_as_its_hash_alone() -> None:
    request = replace(REQUEST, api_keys=("secret", "other"))
    found = environment(request, (0, 1), {"VLLM_API_KEY": "secret", HASHES: "stale"})
    assert "secret" not in " ".join([*arguments(request, True), *found.values(), repr(request), example(request)])
    assert found[HASHES] == hashes_of(("secret", "other"))
    assert environment(REQUEST, (0, 1), {HASHES: "stale"})[HASHES] == ""


def test_usage_statistics_are_off_unless_asked_for() -> None:
    assert environment(REQUEST, (0, 1), {})["VLLM_NO_USAGE_STATS"] == "1"
    assert "VLLM_NO_USAGE_STATS" not in environment(replace(REQUEST, usage_stats=True), (0, 1), {})


def test_the_users_environment_wins() -> None:
    assert environment(REQUEST, (0, 1), {"OMP_WAIT_POLICY": "active"})["OMP_WAIT_POLICY"] == "active"


def test_what_the_surroundings_ask_for_wins() -> None:
    found = environment(replace(REQUEST, surroundings={"HOME": "/ours"}), (0, 1), {"HOME": "/theirs", "TERM": "dumb"})
    assert found["HOME"] == "/ours"
    assert found["TERM"] == "dumb"


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000/"),
        ("0.0.0.0", "http://127.0.0.1:8000/"),
        ("", "http://127.0.0.1:8000/"),
        ("::1", "http://[::1]:8000/"),
        ("0:0::", "http://[::1]:8000/"),
        ("a.host", "http://a.host:8000/"),
    ],
)
def test_example_reaches_the_server(host: str, url: str) -> None:
    assert url in example(replace(REQUEST, host=host))


def test_device_slots_want_graphs_no_larger_than_what_the_device_plans() -> None:
    request = replace(REQUEST, settings=Settings(store=Path("/s"), slots=110, planned_tokens=48))
    command = arguments(request, on_cpu=False)
    assert command[command.index("--max-cudagraph-capture-size") + 1] == "48"
    assert "--enforce-eager" not in command
    assert "--kv-cache-memory-bytes" in command
    assert "--enforce-eager" in arguments(REQUEST, on_cpu=False)
