"""`moetier stack` on the demo stack, in this process."""

from __future__ import annotations

from pathlib import Path

from tests.remedies.commands import moetier
from tests.stack.project import POLITE, Demo


def stack(demo: Demo, verb: str, *arguments: str | Path) -> str:
    """Run `moetier stack VERB` on the demo's folder and cache."""
    more = ("--stack", demo.folder / "stack", "--cache", demo.folder / "cache")
    return moetier("stack", verb, *arguments, *more)


def lock_and_verify(demo: Demo) -> None:
    stack(demo, "lock")
    stack(demo, "verify")


def carry_path(demo: Demo, name: str) -> Path:
    return demo.folder / "stack" / "carries" / "demo" / f"{name}.patch"


def drop(demo: Demo, *names: str) -> None:
    """Take carries out of carries/."""
    for name in names:
        carry_path(demo, name).unlink()


def in_cache(demo: Demo, suffix: str) -> Path:
    return next(path for path in (demo.folder / "cache").rglob("*") if path.name.endswith(suffix))


def polite(demo: Demo) -> None:
    """Define the stack with one right carry."""
    name = f"polite-{len(list(demo.folder.glob('repo-polite-*')))}"
    demo.write(("polite", demo.patch(POLITE, name)))


def shifted(files: dict[str, str]) -> dict[str, str]:
    """The demo with three more lines at the top of its module: every hunk is elsewhere."""
    return {**files, "demo/app.py": '"""Other words."""\n\nX = 1\n' + files["demo/app.py"]}
