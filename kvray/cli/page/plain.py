"""What commands print, as plain data for a page: texts, and tables as rows of texts; pure."""

from collections.abc import Iterable
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text


def plain(part: RenderableType) -> str | dict[str, Any]:
    """Return a text or a table without its markup."""
    if not isinstance(part, Table):
        return _text(part)
    return {
        "columns": [_text(column.header).replace("\n", " ") for column in part.columns],
        "numbers": [column.justify == "right" for column in part.columns],
        "rows": _rows(column.cells for column in part.columns),
    }


def _rows(columns: Iterable[Iterable[RenderableType]]) -> list[list[str]]:
    return [[_text(cell) for cell in row] for row in zip(*columns, strict=True)]


def _text(part: RenderableType) -> str:
    return Text.from_markup(part).plain if isinstance(part, str) else str(part)
