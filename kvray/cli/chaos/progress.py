"""One bar after the other on a terminal; elsewhere a line when a stage has ended."""

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class Bars:
    """Shows the stages of a run."""

    def __init__(self, console: Console) -> None:
        """Show nothing yet."""
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._title = ""
        self._began = 0.0

    def __enter__(self) -> "Bars":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._progress.stop()

    def begin(self, title: str, total: float | None) -> None:
        """End the stage before, and begin one of `total` steps; None: nobody knows how many."""
        self._end()
        self._title, self._began = title, time.monotonic()
        self._task = self._progress.add_task(title, total=total)

    def advance(self, steps: float) -> None:
        """Show that some more is done."""
        assert self._task is not None
        self._progress.advance(self._task, steps)

    def reach(self, steps: float) -> None:
        """Show how much is done."""
        assert self._task is not None
        self._progress.update(self._task, completed=steps)

    def _end(self) -> None:
        if self._task is None:
            return
        task = self._progress.tasks[-1]
        self._progress.update(self._task, total=task.total or 1, completed=task.total or 1)
        self._task = None
        if not self._console.is_terminal:
            took = time.monotonic() - self._began
            self._console.print(f"{self._title}: done in {took:.0f} s")
