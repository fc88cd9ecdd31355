"""Progress on the terminal while a tier starts, or while a command counts."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from kvray.console.interrupts import Interrupts
from kvray.console.output import printer

_DESCRIPTION = TextColumn("{task.description}", markup=False)
_WAITING = (SpinnerColumn(), _DESCRIPTION, TimeElapsedColumn())
COUNTING = (_DESCRIPTION, BarColumn(), DownloadColumn(binary_units=True), TimeElapsedColumn())


def make_progress(
    *columns: ProgressColumn, console: Console | None = None, auto_refresh: bool = True
) -> Progress:
    """Return a bar on `console`, by default stderr; it is silent if that is no terminal.

    Without `auto_refresh` it has no thread, which would take signals that are held back.
    """
    console = console or printer(is_error=True)
    return Progress(
        *columns,
        console=console,
        transient=True,
        disable=not console.is_terminal,
        auto_refresh=auto_refresh,
    )


def counting_progress() -> Progress:
    """Return a bar that counts steps."""
    return make_progress(_DESCRIPTION, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())


class LaunchProgress:
    """A spinner while Ray starts, then a bar with the bytes of the arenas that are being made.

    At the end of a tier it shows the bytes that go to disk, and of a node those that go to others.
    Its callbacks raise a signal that was held back.
    """

    def __init__(self, console: Console, interrupts: Interrupts) -> None:
        self._interrupts = interrupts
        self._progress = make_progress(*_WAITING, console=console, auto_refresh=False)
        self._task = self._progress.add_task("", total=None, visible=False)

    def __enter__(self) -> "LaunchProgress":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def waiting(self, elapsed_s: float) -> None:
        """Show that Ray is starting."""
        self._show("Starting Ray")

    def report(self, shards: list[dict[str, Any]]) -> None:
        """Show how far the shards are with their arenas."""
        self._show("Starting the tier", "Preparing the arena", shards)

    def flushing(self, shards: list[dict[str, Any]]) -> None:
        """Show how far the shards are with writing blocks to disk before they end."""
        ending = [shard for shard in shards if shard["state"] == "flushing"]
        self._show("Ending the tier", "Flushing to disk", ending)

    def draining(self, moved_bytes: int, left_bytes: int, message: str) -> None:
        """Show how much of a node is elsewhere, and what is in the way."""
        title = "Moving blocks to other nodes" + (f" ({message})" if message else "")
        self._show(title, title, [{"done": moved_bytes, "total": moved_bytes + left_bytes}])

    def _show(
        self, waiting: str, counting: str = "", shards: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """Show how many bytes of the shards are done, or only `waiting` if there are none to do."""
        self._interrupts.check()
        total = sum(shard.get("total", 0) for shard in shards)
        done = sum(shard.get("done", 0) for shard in shards)
        columns = COUNTING if total else _WAITING
        fields: Any = {
            "description": counting if total else waiting,
            "completed": done,
            "total": total or None,
            "visible": True,
        }
        if self._progress.columns is columns:
            self._progress.update(self._task, **fields)
        else:
            self._progress.columns = columns
            self._progress.reset(self._task, **fields)  # the time is that of each display
        self._progress.refresh()
