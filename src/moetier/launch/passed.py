"""Pass on to vLLM what follows `--`; options that moetier decides are understood here, or refused by name.

`TABLE` has all of them, and docs/serve.md shows it. vLLM's spellings are read as vLLM reads them: `--name value` and
`--name=value`, underscores for hyphens, several values, a file named by `--config`. Beginnings of names are refused,
for what they mean depends on all other names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moetier.errors import SettingsError
from moetier.vllm_arguments import UNDERSTOOD, plain, value_of

CONFIG = "--config"
HOST, PORT, KEY, NAME, DRAIN = "--host", "--port", "--api-key", "--served-model-name", "--shutdown-timeout"
DRAIN_HERE = "--drain-seconds"
SEVERAL = (KEY, NAME)
"""Options with one value or more."""
FLAGS = (
    *("--aggregate-engine-logging", "--data-parallel-multi-port-external-lb", "--disable-log-stats"),
    *("--grpc", "--headless"),
)
"""Options without a value that have no `--no-...`: in a file of options they may be false all the same."""
TLS = ("--ssl-keyfile", "--ssl-certfile")
"""With one of these the server speaks https."""


@dataclass(frozen=True)
class Passed:
    """Options of vLLM that moetier decides."""

    names: tuple[str, ...]
    here: str
    """Their meaning here, or what to do instead."""
    refused: bool = False
    harmless: str | None = None
    """The one value that is not refused, since it is what runs anyway."""

    @property
    def row(self) -> str:
        """For docs/serve.md."""
        what = f"refused: {self.here}" if self.refused else self.here
        return f"| {', '.join(f'`{name}`' for name in self.names)} | {what} |"


TABLE = (
    Passed((HOST,), f"as `{HOST}`: beyond loopback a key is required"),
    Passed((PORT,), f"as `{PORT}`"),
    Passed((KEY,), f"as `{KEY}`, several keys too"),
    Passed((DRAIN,), f"as `{DRAIN_HERE}`"),
    Passed((NAME,), "the model's name in the API and in the printed line"),
    Passed((*TLS, "--ssl-cert-reqs"), "the server speaks https; so do its health check and the printed line"),
    Passed((CONFIG,), "its options are read as if they stood first on the line"),
    Passed(("--model",), "the model is MODEL, in front of `--`", refused=True),
    Passed(("--quantization", "-q"), "moetier computes the experts; leave it out", refused=True, harmless="moetier"),
    Passed(("--load-format",), "moetier loads the model; leave it out", refused=True, harmless="moetier"),
    Passed(("--additional-config",), "it holds moetier's settings; use `--set NAME=VALUE`", refused=True),
    Passed(("--worker-cls",), "moetier's worker tells the tiers of each step; leave it out", refused=True),
    Passed(("--kv-cache-memory-bytes",), "use `--kv-cache-gib`", refused=True),
    Passed(("--uds",), "the server listens on an address; use `--host` and `--port`", refused=True),
    Passed(("--api-server-count", "-asc"), "there is one API server; leave it out", refused=True, harmless="1"),
    Passed(("--grpc", "--grpc-port", "--headless"), "the API is HTTP; leave it out", refused=True),
)
OURS = {name: passed for passed in TABLE for name in passed.names}


@dataclass(frozen=True)
class Taken:
    """Values that were taken over from vLLM's arguments, None where they do not say them, and the rest for vLLM."""

    left: tuple[str, ...]
    host: str | None = None
    port: int | None = None
    drain_seconds: int | None = None
    served: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()


def take(arguments: Sequence[str]) -> Taken:
    """Understand what moetier decides; SettingsError where it is refused."""
    options = [*_of_file(arguments), *_without(arguments, CONFIG)]
    if options and not options[0].startswith("-"):
        raise SettingsError(
            f"-- {options[0][:60]!r}: expected an option of vLLM, found a value; MODEL stands before --"
        )
    for at, argument in enumerate(options):
        _check(argument, options[at + 1 : at + 2])
    return Taken(
        left=tuple(_without(options, HOST, PORT, KEY, DRAIN, NAME)),
        host=_one(options, HOST),
        port=_number(options, PORT, 1, 65535),
        drain_seconds=_number(options, DRAIN, 0, 86_400),
        served=_several(options, NAME),
        api_keys=_several(options, KEY),
    )


def _check(argument: str, following: Sequence[str]) -> None:
    """SettingsError where an argument is refused."""
    if argument == "--":
        raise SettingsError("-- --: expected options of vLLM, found a second --; leave it out")
    name, equals, value = argument.partition("=")
    if re.match(r"-q[^=]", name):
        name, equals, value = "-q", "=", name[2:]
    name = plain(name).partition(".")[0]
    passed = OURS.get(name)
    if passed is None:
        _check_whole(name)
    elif passed.refused and (passed.harmless is None or passed.harmless != (value if equals else "".join(following))):
        raise SettingsError(f"-- {name}: {passed.here}")


def _check_whole(name: str) -> None:
    """SettingsError where argparse would take a beginning of a name for an option that moetier wants to see."""
    if not re.fullmatch(r"--?[a-zA-Z][a-zA-Z-]*", name) or name in UNDERSTOOD:
        return
    for whole in (*OURS, *UNDERSTOOD):
        if whole.startswith(name):
            raise SettingsError(
                f"-- {name}: expected the whole name of an option, found a beginning of {whole}; write it out"
            )


def _without(arguments: Sequence[str], *names: str) -> Iterator[str]:
    """The arguments less these options and their values."""
    dropping = 0
    for argument in arguments:
        is_option = re.match(r"--?[a-zA-Z]", argument) is not None
        if dropping and not is_option:
            dropping -= 1
            continue
        name, equals, _ = argument.partition("=")
        if plain(name) in names:
            dropping = 0 if equals else len(arguments) if plain(name) in SEVERAL else 1
            continue
        dropping = 0
        yield argument


def _several(arguments: Sequence[str], name: str) -> tuple[str, ...]:
    """Values of an option that takes more than one; the last one counts."""
    found: tuple[str, ...] = ()
    for at, argument in enumerate(arguments):
        given, equals, value = argument.partition("=")
        if plain(given) != name:
            continue
        rest = arguments[at + 1 :]
        end = next((number for number, other in enumerate(rest) if re.match(r"--?[a-zA-Z]", other)), len(rest))
        found = (value,) if equals else tuple(rest[:end])
        if not found:
            raise SettingsError(f"-- {name}: expected a value, found none; give one, or leave it out")
    return found


def _one(arguments: Sequence[str], name: str) -> str | None:
    found = _several(arguments, name)
    return found[0] if found else None


def _number(arguments: Sequence[str], name: str, least: int, most: int) -> int | None:
    text = _one(arguments, name)
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,9}", text) or not least <= int(text) <= most:
        raise SettingsError(f"-- {name}: expected a number from {least} to {most}, found {text[:60]!r}; give another")
    return int(text)


def _of_file(arguments: Sequence[str]) -> Iterator[str]:
    """Arguments that a file of options stands for, as vLLM would read it."""
    path = value_of(arguments, CONFIG)
    if path is None:
        return
    for key, value in _options(Path(path)).items():
        name = f"--{key}"
        if plain(name) == CONFIG:
            raise SettingsError(f"-- {CONFIG} {path}: expected options, found another {CONFIG} in it; write one file")
        if plain(name) == KEY:
            raise SettingsError(
                f"-- {CONFIG} {path}: expected no API key in it; write keys into a file for --api-key-file"
            )
        if isinstance(value, bool):
            if value or plain(name) not in FLAGS:
                yield name if value else f"--no-{key}"
        elif isinstance(value, list):
            yield from [name, *map(str, value)] if value else []
        else:
            yield from (name, json.dumps(value) if isinstance(value, dict) else str(value))


def _options(path: Path) -> dict[str, Any]:
    """The file's content: names of options without hyphens in front, and their values."""
    import yaml  # vLLM's own dependency: where it is not installed, nothing is served

    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise SettingsError(f"-- {CONFIG} {path}: cannot read it ({reason}); name a YAML file of options") from error
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise SettingsError(f"-- {CONFIG} {path}: expected options by name, found something else; write NAME: VALUE")
    return content
