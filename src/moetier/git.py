"""How git is called: no program that a repository or an environment names is run by it."""

from __future__ import annotations

import os

ALONE = {
    "core.hooksPath": os.devnull,
    "core.fsmonitor": "false",
    "core.alternateRefsCommand": "true",
    "core.editor": "false",
    "core.pager": "cat",
    "commit.gpgSign": "false",
    "log.showSignature": "false",
    "gc.auto": "0",
    "maintenance.auto": "false",
    "submodule.recurse": "false",
    "protocol.ext.allow": "never",
}
"""Settings that go before those of any repository."""


def command(*arguments: str, settings: dict[str, str] | None = None) -> list[str]:
    """A git command with `ALONE` and more settings of that kind."""
    given = {**ALONE, **(settings or {})}
    return ["git", *(word for name, value in given.items() for word in ("-c", f"{name}={value}")), *arguments]


def environment() -> dict[str, str]:
    """Ours without what would point git elsewhere (GIT_DIR, GIT_TEMPLATE_DIR, GIT_SSH_COMMAND and the like)."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return {**kept, "GIT_ATTR_NOSYSTEM": "1", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
