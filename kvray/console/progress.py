"""Progress on the terminal while a tier starts, or while a command counts."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

from kvray.console.interrupts import Interrupts


def counting_progress(console: Console) -> Progress:
    """Return a bar that counts steps; it is silent if `console` is no terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


class ProgressLine:
    """One line for a command of several parts; without a terminal, it prints a line after each."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> "ProgressLine":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    @contextmanager
    def during(self, title: str, total: float | None = None) -> Iterator[Callable[..., None]]:
        """Show one part; the callback takes how many steps of `total` are done since, or 1."""
        began = time.monotonic()
        task = self._progress.add_task(title, total=total)
        try:
            yield lambda steps=1.0: self._progress.advance(task, steps)
        finally:
            self._progress.remove_task(task)
        if not self._console.is_terminal:
            self._console.print(f"{title}: done in {time.monotonic() - began:.0f} s")


class LaunchProgress:
    """A spinner while Ray starts, then a bar with the bytes of the arenas that are being made.

    At the end of a tier it shows the bytes that go to disk. Its callbacks raise a signal that was
    held back.
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

    def __exit__(self, *_: object) -> None:
        self._show(None, "", None)

    def waiting(self, elapsed_s: float) -> None:
        """Show that Ray is starting."""
        self._interrupts.check()
        self._show(self._ray, "Starting Ray", None)

    def report(self, shards: list[dict[str, Any]]) -> None:
        """Show how far the shards are with their arenas."""
        if not self._counts("Preparing the arena", shards):
            self._show(self._ray, "Starting the tier", None)

    def flushing(self, shards: list[dict[str, Any]]) -> None:
        """Show how far the shards are with writing blocks to disk before they end."""
        ending = [shard for shard in shards if shard["state"] == "flushing"]
        if not self._counts("Flushing to disk", ending):
            self._show(self._ray, "Ending the tier", None)

    def _counts(self, description: str, shards: list[dict[str, Any]]) -> bool:
        """Show how many bytes are done; return False if there are none to do."""
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
