"""The form of every table that a command prints, and the console for it."""

import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table


def printer(plain_width: int = 160) -> Console:
    """Return a console for stdout; what is no terminal is `plain_width` columns wide."""
    width = None if sys.stdout.isatty() else plain_width
    return Console(highlight=False, width=width, file=sys.stdout)


def empty_table(
    *columns: str, numbers: Sequence[str] = (), title: str | None = None, folds: bool = False
) -> Table:
    """Return a table with `columns`, and then `numbers`, which stand right.

    Too wide a table cuts its numbers short first; with `folds` its columns take several lines.
    """
    table = Table(title=title, title_justify="left", box=box.SIMPLE, collapse_padding=True)
    for name in columns:
        table.add_column(name, overflow="fold", no_wrap=not folds)
    for name in numbers:
        table.add_column(name, justify="right")
    return table
