"""Read a command line for vLLM, as far as plans and launches follow from it.

vLLM takes `--name value` and `--name=value`, underscores for hyphens, and the last one counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moetier.errors import SettingsError

NUMBER = re.compile(r"[0-9]{1,18}")
LENGTH = "--max-model-len"
SEQUENCES = "--max-num-seqs"
BATCHED = "--max-num-batched-tokens"
BLOCK = "--block-size"
SIZES = "--cudagraph-capture-sizes"
GRAPHS = (SIZES, "--max-cudagraph-capture-size", "--compilation-config", "-cc", "-O", "--optimization-level")
"""Whoever gives one of these decides about graphs."""
SPECULATIVE = "--speculative-config"
BLOCK_DRAFTS = ("dspark", "dflash")
"""Methods whose drafter guesses all tokens in one forward."""
SPELT = ("--spec-method", "--spec-model", "--spec-tokens")
"""Keys of --speculative-config that have an option of their own."""
RANKS = ("-tp", "--tensor-parallel-size")
UNDERSTOOD = (
    *(LENGTH, SEQUENCES, BATCHED, BLOCK, *GRAPHS, SPECULATIVE, "-sc", *SPELT, *RANKS),
    *("--enforce-eager", "--no-enable-chunked-prefill"),
)
"""Every option that plans and launches follow from."""


def value_of(arguments: Sequence[str], *names: str) -> str | None:
    """Return what the last of these options says; "" where it is the end of the line."""
    found = None
    for at, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if plain(name) in names:
            found = value if equals else "".join(arguments[at + 1 : at + 2])
    return found


def number_of(arguments: Sequence[str], *names: str) -> int | None:
    """A plain number of at least 1; other forms (4k, auto, more digits than any size has) are vLLM's to judge."""
    text = value_of(arguments, *names)
    return int(text) if text is not None and NUMBER.fullmatch(text) and int(text) > 0 else None


def has(arguments: Sequence[str], *names: str) -> bool:
    """Whether one of these options is there, also as --name.key."""
    given = (plain(argument.partition("=")[0]) for argument in arguments)
    return any(name == option or name.startswith(option + ".") for name in given for option in names)


def plain(name: str) -> str:
    """An option's name as vLLM spells it; `-O3` is `-O`."""
    if re.match(r"-O.", name):
        return "-O"
    return name.replace("_", "-") if name.startswith("--") else name


@dataclass(frozen=True)
class Drafting:
    """Speculative decoding: tokens guessed a step, and whether one forward guesses them all. tokens 0: none."""

    tokens: int = 0
    block: bool = False


def drafting_of(arguments: Sequence[str]) -> Drafting:
    """Return the speculative config: of JSON, of --speculative-config.key, of --spec-tokens and --spec-method."""
    config = _config(arguments)
    method = value_of(arguments, f"{SPECULATIVE}.method", "--spec-method") or config.get("method")
    tokens = number_of(arguments, f"{SPECULATIVE}.num-speculative-tokens", "--spec-tokens")
    tokens = tokens or config.get("num_speculative_tokens") or 0
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
        raise SettingsError(f"{SPECULATIVE}: expected a number for num_speculative_tokens, found {tokens!r}")
    return Drafting(tokens, method in BLOCK_DRAFTS)


def speculates(arguments: Sequence[str]) -> bool:
    """Whether the engine guesses tokens: whatever gives vLLM a speculative config."""
    return has(arguments, SPECULATIVE, "-sc", *SPELT)


def drafts_itself(arguments: Sequence[str]) -> bool:
    """Whether speculation asks for the drafter that is in the checkpoint."""
    config = _config(arguments)
    method = value_of(arguments, f"{SPECULATIVE}.method", "--spec-method") or config.get("method")
    other = value_of(arguments, f"{SPECULATIVE}.model", "--spec-model") or config.get("model")
    return isinstance(method, str) and not other and (method.endswith("mtp") or method in BLOCK_DRAFTS)


def _config(arguments: Sequence[str]) -> dict[str, Any]:
    text = value_of(arguments, SPECULATIVE, "-sc")
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise SettingsError(f"{SPECULATIVE}: expected a JSON object, found {text[:60]!r}") from None
    if not isinstance(found, dict):
        raise SettingsError(f"{SPECULATIVE}: expected a JSON object, found {text[:60]!r}")
    return found
