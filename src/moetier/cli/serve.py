"""`moetier serve`: plan, check everything that can be checked, say what lives where, then run vLLM's server."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import typer

from moetier.cli import options as given
from moetier.cli.options import Model, StoreFolder
from moetier.errors import SettingsError
from moetier.folders import state_home, takes_files
from moetier.launch.command import ServeRequest
from moetier.launch.decide import decision_first
from moetier.launch.keys import keys_of
from moetier.launch.place import console
from moetier.launch.planning import request_of
from moetier.launch.start import check_cpus, start
from moetier.launch.tls import check_certificate
from moetier.settings import Settings

__all__ = ["Model", "StoreFolder", "serve", "start"]


def serve(
    context: typer.Context,
    model: given.Model,
    store: given.OwnStore = None,
    build: given.BuildStore = False,
    dram_records: given.DramRecords = None,
    slots: given.Slots = None,
    context_reserve: given.Reserve = None,
    longest_gap: given.LongestGap = None,
    host: given.Host = "127.0.0.1",
    port: given.Port = 8000,
    api_key: given.ApiKey = None,
    api_key_file: given.ApiKeyFile = None,
    kv_cache_gib: given.KvCacheGib = None,
    drain_seconds: given.DrainSeconds = 30,
    setting: given.Assignments = None,
    identity_check: given.IdentityCheck = Settings.model_fields["identity_check"].default,
    halt_on_corruption: given.HaltOnCorruption = False,
    record: given.Record = None,
    usage_stats: given.UsageStats = False,
    log_file: given.LogFile = None,
    skip_support_check: given.SkipSupportCheck = False,
    explain: given.Explain = False,
    verbose: given.Verbose = False,
    as_json: given.AsJson = False,
) -> None:
    """Serve MODEL over an OpenAI-compatible API; what follows `--` goes to vLLM."""
    values: dict[str, Any] = {"store": store or model.resolve().with_name(f"{model.resolve().name}-store")}
    values |= {"identity_check": identity_check, "record_trace": record, "halt_on_corruption": halt_on_corruption}
    values |= {} if dram_records is None else {"dram_records": dram_records}
    values |= {} if slots is None else {"slots": slots}
    values |= _assignments(setting or [])
    settings = Settings.parse(values)
    check_cpus(settings)
    asked = ServeRequest(
        model=model,
        settings=settings,
        host=host,
        port=port,
        kv_cache_gib=kv_cache_gib or 0.0,
        drain_seconds=drain_seconds,
        usage_stats=usage_stats,
        extra=tuple(context.args),
    )
    _check_said_once(context, asked)
    check_certificate(asked)
    keys, warnings = keys_of(api_key, api_key_file, asked.api_keys)
    log = None if verbose else log_file or _log_of_port(asked.port)
    in_shell = f"$(grep -m1 . {shlex.quote(str(api_key_file))})" if api_key_file else asked.key_in_shell
    asked = dataclasses.replace(asked, api_keys=keys, key_in_shell=in_shell)
    asked = dataclasses.replace(asked, log_file=log, log_kept=verbose or log is not None)
    with decision_first(model, skip_support_check, console, asked.extra):
        request, notes = request_of(asked, values, context_reserve, longest_gap)
    start(request, build, skip_support_check, as_json, explain, notes=(*warnings, *notes))


def _check_said_once(context: typer.Context, request: ServeRequest) -> None:
    """SettingsError where an option of ours and one of vLLM's say different things."""
    for name in ("host", "port", "drain_seconds"):
        value, decided = context.params[name], getattr(request, name)
        source = context.get_parameter_source(name)
        if value != decided and source is not None and source.name == "COMMANDLINE":
            option = f"--{name.replace('_', '-')}"
            raise SettingsError(f"{option}: found {value}, and {decided} after --; give one of them")


def _log_of_port(port: int) -> Path | None:
    """The log of a server on this port, in the user's state folder; None where that takes no files."""
    try:
        folder = state_home() / "moetier"
        folder.mkdir(parents=True, exist_ok=True)
    except (SettingsError, OSError):
        return None
    return folder / f"serve-{port}.log" if takes_files(folder) else None


def _assignments(pairs: list[str]) -> dict[str, Any]:
    """NAME=VALUE strings; a value is JSON where it is, else text."""
    values: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise typer.BadParameter(f"expected NAME=VALUE, found {pair!r}", param_hint="--set")
        try:
            values[name] = json.loads(value)
        except (ValueError, RecursionError):
            values[name] = value
    return values
