"""What moves on the terminal while a tier comes up, or something long is counted."""

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from kvray.cli.interrupts import Interrupts


def counting_progress(console: Console) -> Progress:
    """Return a bar that counts steps; nothing moves where `console` is no terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


class LaunchProgress:
    """A spinner while Ray starts, then a bar with the bytes of the arenas that are made.

    At the end of a tier, a bar with the bytes that go to disk. Its callbacks let a signal through
    that was held back.
    """

    def __init__(self, console: Console, interrupts: Interrupts) -> None:
        self._interrupts = interrupts
        options: Any = {
            "console": console,
            "transient": True,
            "disable": not console.is_terminal,
            "auto_refresh": False,  # its thread would take signals that are held back
        }
        self._ray = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            **options,
        )
        self._bytes = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TimeElapsedColumn(),
            **options,
        )
        self._shown: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> "LaunchProgress":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._show(None, "", None)

    def waiting(self, elapsed_s: float) -> None:
        """Ray is starting."""
        self._interrupts.check()
        self._show(self._ray, "Starting Ray", None)

    def report(self, shards: list[dict[str, Any]]) -> None:
        """The shards are getting ready."""
        if not self._counts("Preparing the arena", shards):
            self._show(self._ray, "Starting the tier", None)

    def flushing(self, shards: list[dict[str, Any]]) -> None:
        """The shards end, and write to disk what is not there yet."""
        ending = [shard for shard in shards if shard["state"] == "flushing"]
        if not self._counts("Flushing to disk", ending):
            self._show(self._ray, "Ending the tier", None)

    def _counts(self, description: str, shards: list[dict[str, Any]]) -> bool:
        """Show how many bytes are done, if there are any to do."""
        self._interrupts.check()
        total = sum(shard.get("total", 0) for shard in shards)
        done = sum(shard.get("done", 0) for shard in shards)
        if total:
            self._show(self._bytes, description, total)
            assert self._task is not None
            self._bytes.update(self._task, completed=done, total=total)
        return bool(total)

    def _show(self, progress: Progress | None, description: str, total: float | None) -> None:
        if self._shown is not progress:
            if self._shown is not None:
                self._shown.stop()
            self._shown, self._task = progress, None
            if progress is not None:
                progress.start()
        if progress is None:
            return
        if self._task is None:
            self._task = progress.add_task(description, total=total)
        progress.update(self._task, description=description)
        progress.refresh()
