"""The console of every command, and the form of every table that one prints."""

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

_WHOLE_LINES = 100_000
"""Columns of what is no terminal: a file or another program gets each line whole."""

_UNSEEN = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that control a terminal, turn the line around, or cannot be written."""


def printer(*, is_error: bool = False, soft_wrap: bool = False) -> Console:
    """Return a console for stdout, or stderr, which prints every text as it is.

    It knows no markup: names of models, replicas and counters come from others. A part that has a
    style is a `rich.text.Text`. With `soft_wrap` the terminal breaks its lines.
    """
    stream = sys.stderr if is_error else sys.stdout
    width = None if stream.isatty() else _WHOLE_LINES
    return Console(
        markup=False,
        emoji=False,
        highlight=False,
        soft_wrap=soft_wrap,
        width=width,
        file=stream,
    )


def visible(told: Any) -> Any:
    """Return what others told, plain data, with control characters in its texts written out."""
    if isinstance(told, str):
        return _UNSEEN.sub(lambda found: ascii(found[0])[1:-1], told)
    if isinstance(told, Mapping):
        return {visible(key): visible(value) for key, value in told.items()}
    if isinstance(told, list | tuple):
        return [visible(one) for one in told]
    return told


class PlainTable(Table):
    """A table whose texts are printed as they are, on any console."""

    def add_row(self, *cells: Any, **options: Any) -> None:
        """Add a row, as `Table` does."""
        super().add_row(*(Text(one) if isinstance(one, str) else one for one in cells), **options)

    def add_column(self, header: Any = "", *others: Any, **options: Any) -> None:
        """Add a column, as `Table` does."""
        super().add_column(Text(header) if isinstance(header, str) else header, *others, **options)


def empty_table(
    *columns: str, numbers: Sequence[str] = (), title: str | None = None, folds: bool = False
) -> PlainTable:
    """Return a table with `columns`, and then `numbers`, which stand right.

    Too wide a table cuts its numbers short first; with `folds` its columns take several lines.
    """
    heading = None if title is None else Text(title, style="table.title")
    table = PlainTable(title=heading, title_justify="left", box=box.SIMPLE, collapse_padding=True)
    for name in columns:
        table.add_column(name, overflow="fold", no_wrap=not folds)
    for name in numbers:
        table.add_column(name, justify="right")
    return table
