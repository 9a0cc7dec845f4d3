"""Progress bars of a pipeline, one for each stage, with the time left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class StageProgress:
    """Bars on stderr; nothing at all where `shown` is False. A context manager: it leaves the terminal as it was."""

    def __init__(self, shown: bool) -> None:
        self._progress = Progress(
            TextColumn("{task.description:<24}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            refresh_per_second=4,
            disable=not shown,
        )

    def __enter__(self) -> StageProgress:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def stage(self, name: str, total: int) -> StageBar:
        """A new bar of `total` units."""
        return StageBar(self._progress, self._progress.add_task(name, total=total), name)


class StageBar:
    """One stage's bar."""

    def __init__(self, progress: Progress, task: TaskID, name: str) -> None:
        self._progress, self._task, self._name = progress, task, name

    def advance(self, units: int = 1) -> None:
        """`units` more are done."""
        self._progress.advance(self._task, units)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """One unit that has a name, shown while it runs."""
        self._progress.update(self._task, description=f"{self._name}: {name}")
        yield
        self._progress.update(self._task, description=self._name)
        self.advance()
