"""A progress bar for what takes minutes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from moetier.store.work import Progress as Step
from moetier.store.work import Report


@contextmanager
def progress_bar() -> Iterator[Report]:
    """A progress bar on stderr."""
    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, Any] = {}

        def step(at: Step) -> None:
            if at.stage not in tasks:
                tasks[at.stage] = bars.add_task(f"{at.stage} records", total=at.total)
            bars.update(tasks[at.stage], completed=at.done)

        yield step
