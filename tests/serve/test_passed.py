"""Options that follow `--`: what moetier decides is understood or refused, in every spelling that vLLM knows."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moetier.errors import SettingsError
from moetier.launch.command import ServeRequest, arguments, check_reachable_only_with_key, example, url_from_here
from moetier.launch.passed import FLAGS, OURS, TABLE, take
from moetier.settings import Settings
from moetier.vllm_arguments import GRAPHS, UNDERSTOOD, has
from tests.conftest import ROOT


def request(*extra: str, **fields: Any) -> ServeRequest:
    return ServeRequest(Path("/models/m"), Settings(store=Path("/s")), extra=extra, **fields)


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    """VLLM's own."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    made: argparse.ArgumentParser = make_arg_parser(FlexibleArgumentParser())
    return made


def seen_by_vllm(parser: argparse.ArgumentParser, request: ServeRequest) -> argparse.Namespace:
    command = arguments(request, on_cpu=True)
    return parser.parse_args(command[command.index("-m") + 2 :])


HOSTS = (
    ("--host", "0.0.0.0"),
    ("--host=0.0.0.0",),
    ("--max-model-len", "1k", "--host", "0.0.0.0"),
    ("--host", "127.0.0.1", "--host=0.0.0.0"),
)


@pytest.mark.parametrize("extra", HOSTS, ids=" ".join)
def test_a_host_is_the_requests(extra: tuple[str, ...], parser: argparse.ArgumentParser) -> None:
    made = request(*extra)
    assert made.host == seen_by_vllm(parser, made).host == "0.0.0.0"
    assert url_from_here(made) == "http://127.0.0.1:8000"
    with pytest.raises(SettingsError, match=r"--host 0\.0\.0\.0 can be reached"):
        check_reachable_only_with_key(made)
    check_reachable_only_with_key(replace(made, api_keys=("k",)))


def test_what_is_taken_over_is_what_vllm_sees(parser: argparse.ArgumentParser) -> None:
    extra = ("--port=8123", "--shutdown_timeout", "17", "--api-key", "a", "b", "--served-model-name", "x", "y")
    made = request(*extra, "--seed", "-1", "--max_model_len=128")
    assert (made.port, made.drain_seconds, made.api_keys, made.served) == (8123, 17, ("a", "b"), ("x", "y"))
    assert made.extra == ("--seed", "-1", "--max_model_len=128")
    assert replace(made, host="::1").port == 8123
    seen = seen_by_vllm(parser, made)
    assert (seen.port, seen.shutdown_timeout, seen.served_model_name) == (8123, 17, ["x", "y"])
    assert (seen.seed, seen.max_model_len, seen.api_key) == (-1, 128, None)
    assert '"model": "x"' in example(made)


def test_a_key_is_neither_shown_nor_passed_on() -> None:
    made = request("--api-key=secret", "--api_key", "other", "secret")
    assert made.api_keys == ("other", "secret")
    assert "secret" not in repr(made) + " ".join(arguments(made, on_cpu=True))


@pytest.mark.parametrize(
    "extra",
    [("--ssl-keyfile", "k", "--ssl-certfile", "c"), ("--ssl_certfile=c", "--ssl_keyfile=k"), ("--ssl-certfile", "c")],
    ids=" ".join,
)
def test_with_a_certificate_the_address_is_https(extra: tuple[str, ...], parser: argparse.ArgumentParser) -> None:
    made = request(*extra)
    assert url_from_here(made) == "https://127.0.0.1:8000"
    assert "curl -k https://127.0.0.1:8000/" in example(made)
    assert seen_by_vllm(parser, made).ssl_certfile == "c"


REFUSED = [name for passed in TABLE if passed.refused for name in passed.names]


def spellings(name: str) -> Iterator[tuple[str, ...]]:
    yield (name, "value")
    yield (f"{name}=value",)
    if name.startswith("--"):
        yield (f"--{name[2:].replace('-', '_')}=value",)
        yield (f"{name}.key", "value")
        yield (f"{name}.key=value",)
    yield ("--seed", "1", name, "value")


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_named_in_every_spelling(name: str) -> None:
    for extra in spellings(name):
        with pytest.raises(SettingsError, match=f"^-- {name}: ") as error:
            request(*extra)
        assert OURS[name].here in str(error.value)


@pytest.mark.parametrize("extra", [("-qfp8",), ("-q=fp8",), ("-q", "fp8")], ids=" ".join)
def test_a_short_option_with_its_value(extra: tuple[str, ...]) -> None:
    with pytest.raises(SettingsError, match=r"^-- -q: "):
        request(*extra)


@pytest.mark.parametrize(
    "extra",
    [("--quantization", "moetier"), ("-q", "moetier"), ("--load-format=moetier",), ("--api-server-count", "1")],
    ids=" ".join,
)
def test_what_says_what_runs_anyway_is_accepted(extra: tuple[str, ...], parser: argparse.ArgumentParser) -> None:
    seen = seen_by_vllm(parser, request(*extra))
    assert (seen.quantization, seen.load_format) == ("moetier", "moetier")


def test_a_beginning_that_vllm_would_take_for_an_option_of_ours_is_refused(parser: argparse.ArgumentParser) -> None:
    whole = {name for action in parser._actions for name in action.option_strings}
    beginnings = 0
    for name in (*OURS, *UNDERSTOOD):
        for length in range(2 if name[1] != "-" else 3, len(name)):
            beginning = name[:length]
            if beginning in whole:
                continue
            beginnings += 1
            for spelling in (beginning, f"{beginning[:2]}{beginning[2:].replace('-', '_')}", f"{beginning}=8"):
                with pytest.raises(SettingsError, match="expected the whole name of an option"):
                    request(spelling, "8")
    assert beginnings > 100


def test_no_other_option_of_vllm_is_refused(parser: argparse.ArgumentParser) -> None:
    names = [name for action in parser._actions for name in action.option_strings if name not in OURS]
    assert len(names) > 200
    for name in names:
        assert request(name).extra == (name,)
        assert request(f"{name}=-1", "--seed", "-1").extra == (f"{name}=-1", "--seed", "-1")


@pytest.mark.parametrize(
    "extra", [("other-model",), ("other-model", "--seed", "1"), ("--seed", "1", "--")], ids=" ".join
)
def test_what_is_no_option_is_refused(extra: tuple[str, ...]) -> None:
    with pytest.raises(SettingsError, match="expected"):
        request(*extra)


@pytest.mark.parametrize("port", ["0", "-1", "65536", "eighty", "", "8000.0", "9" * 30])
def test_a_port_that_is_none(port: str) -> None:
    with pytest.raises(SettingsError, match="-- --port: expected a"):
        request(f"--port={port}")


@pytest.mark.parametrize("name", ["--host", "--port", "--api-key", "--served-model-name"])
def test_an_option_without_its_value(name: str) -> None:
    for extra in ((name,), (name, "--seed", "1")):
        with pytest.raises(SettingsError, match=f"-- {name}: expected a value, found none"):
            request(*extra)


@pytest.mark.parametrize("level", ["-O3", "-O=2", "-O"])
def test_a_level_of_optimization_decides_about_graphs(level: str) -> None:
    assert has((level,), *GRAPHS)


# -- a file of options -------------------------------------------------------------------------------------------------

FILE = """
host: 0.0.0.0
max_model_len: 256
seed: 7
served-model-name: [x, y]
enable-auto-tool-choice: true
enable-prefix-caching: false
headless: false
allowed-media-domains: []
speculative-config:
  method: ngram
  num_speculative_tokens: 3
"""


@pytest.mark.parametrize("form", [("--config", "{}"), ("--config={}",)], ids=["two", "one"])
def test_a_file_of_options_is_read_as_vllm_reads_it(
    form: tuple[str, ...], parser: argparse.ArgumentParser, tmp_path: Path
) -> None:
    path = tmp_path / "options.yaml"
    path.write_text(FILE)
    made = request("--seed", "8", *(part.format(path) for part in form))
    assert (made.host, made.served) == ("0.0.0.0", ("x", "y"))
    assert not has(made.extra, "--config")
    ours, theirs = seen_by_vllm(parser, made), parser.parse_args(["--config", str(path), "--seed", "8"])
    for name in ("host", "max_model_len", "seed", "enable_auto_tool_choice", "enable_prefix_caching", "headless"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.seed == 8, "the line comes after the file"
    assert ours.allowed_media_domains == theirs.allowed_media_domains
    assert ours.speculative_config == theirs.speculative_config
    assert ours.served_model_name == ["x", "y"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("uds: /tmp/socket", "-- --uds: "),
        ("quantization: fp8", "-- --quantization: "),
        ("config: other.yaml", "another --config"),
        ("api-key: geheim", "--api-key-file"),
        ("- host", "by name"),
        ("1: 2", "by name"),
        ("", "by name"),
        ("a: [", "cannot read it"),
    ],
)
def test_a_file_of_options_that_is_refused(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    path.write_text(content)
    with pytest.raises(SettingsError, match=message) as error:
        request("--config", str(path))
    assert "geheim" not in str(error.value)
    with pytest.raises(SettingsError, match="No such file"):
        request("--config", str(tmp_path / "nowhere.yaml"))


def test_flags_without_a_negation_are_vllms(parser: argparse.ArgumentParser) -> None:
    theirs = {
        name
        for action in parser._actions
        if isinstance(action, argparse._StoreTrueAction)
        for name in action.option_strings
    }
    assert {name for name in theirs if name.startswith("--")} == set(FLAGS)


# -- what is told -----------------------------------------------------------------------------------------------------


def test_the_documentation_has_the_table() -> None:
    text = (ROOT / "docs" / "serve.md").read_text()
    assert [passed.row for passed in TABLE if passed.row not in text] == []


def test_arguments_are_taken_once() -> None:
    """A request that is made anew from another reads the same."""
    taken = take(("--port", "8001", "--seed", "1"))
    assert take(taken.left) == replace(taken, port=None)
