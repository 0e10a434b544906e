"""Verbs by name: the module of a verb is imported when the verb is called, and not before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_group

from moetier.errors import MoetierError, NotBuiltError

VERBS = {
    "store": "moetier.cli.store:app",
    "eval": "moetier_bench.cli.eval:app",
    "bench": "moetier_bench.cli:app",
    "trace": "moetier.cli.trace:app",
    "stack": "moetier_stack.cli:app",
    "serve": "moetier.cli.serve:serve",
    "doctor": "moetier.cli.doctor:doctor",
    "plan": "moetier.cli.plan:plan",
    "calibrate": "moetier.cli.calibrate:calibrate",
    "identity": "moetier.cli.identity:identity",
    "prove": "moetier_bench.cli.prove:prove",
    "version": "moetier.cli.version:version",
}
"""Where each verb is."""
TRACE_VERBS = {"record": "moetier_bench.cli.record:record"}
"""Those of `moetier trace` that ask a server. Nothing else in moetier names moetier_bench or moetier_stack."""

PASSES_ON: dict[str, Any] = {"allow_extra_args": True}
"""A verb whose function takes the context wants what follows `--`."""


def group(verbs: Mapping[str, str]) -> type[TyperGroup]:
    """Return a class for `typer.Typer(cls=...)` whose commands are `verbs`, by name, beside those of the app itself.

    verbs: "module:name" of a function or of a `typer.Typer`.
    """

    class Verbs(TyperGroup):
        def list_commands(self, ctx: Any) -> list[str]:
            return [*verbs, *super().list_commands(ctx)]

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            return _load(cmd_name, verbs[cmd_name]) if cmd_name in verbs else super().get_command(ctx, cmd_name)

    return Verbs


def _refusal(error: MoetierError) -> Callable[..., None]:
    """Return a verb that takes whatever it is given and says why it cannot run; the others are listed beside it."""

    def refused(context: typer.Context) -> None:
        """Not in this installation."""
        raise error

    return refused


def _load(verb: str, where: str) -> TyperCommand | TyperGroup:
    module, name = where.split(":")
    try:
        found = getattr(import_module(module), name)
        settings = PASSES_ON if "context" in getattr(found, "__annotations__", ()) else None
    except NotBuiltError as error:
        found, settings = _refusal(error), PASSES_ON | {"ignore_unknown_options": True}
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name != package:
            raise
        absent = MoetierError(f"`moetier {verb}` is in the package {package}, which is not here: install moetier whole")
        found, settings = _refusal(absent), PASSES_ON | {"ignore_unknown_options": True}
    if isinstance(found, typer.Typer):
        command: TyperCommand | TyperGroup = get_group(found)
    else:
        app = typer.Typer(add_completion=False)
        app.command(verb, context_settings=settings)(found)
        command = get_command(app)  # type: ignore[assignment]  # typer says click.Command
    command.name = verb
    assert isinstance(command, TyperCommand | TyperGroup)
    return command
