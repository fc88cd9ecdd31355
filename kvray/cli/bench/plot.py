"""The figures of a run as a picture."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvray.cli.bench.results import Result
from kvray.cli.picture import write_picture

_PANELS = (("GB/s", "Copies", "higher is better"), ("ms", "Lookups", "lower is better"))
_INCHES_PER_ROW = 0.5
_OURS, _FLOOR = "#2a78b5", "#b8bcc2"


def draw(results: Sequence[Result], path: Path) -> None:
    """Write a PNG with kvray beside the bare work, copies and lookups apart.

    Raises:
        ConfigError: the file cannot be written.
    """
    panels = [
        (title, unit, note, [row for row in results if row.unit == unit and row.floor is not None])
        for unit, title, note in _PANELS
    ]
    num_rows = sum(len(rows) for *_, rows in panels)
    figure = Figure(figsize=(10, 2 + _INCHES_PER_ROW * num_rows), layout="constrained")
    all_axes = figure.subplots(2, 1, height_ratios=[max(1, len(rows)) for *_, rows in panels])
    for axes, (title, unit, note, rows) in zip(all_axes, panels, strict=True):
        axes.set_title(f"{title}, {unit} ({note})", loc="left")
        _draw_panel(axes, rows)
    write_picture(figure, path)


def _draw_panel(axes: Axes, rows: Sequence[Result]) -> None:
    places = range(len(rows))
    axes.barh([at - 0.2 for at in places], [row.ours for row in rows], 0.4, color=_OURS)
    axes.barh([at + 0.2 for at in places], [row.floor or 0 for row in rows], 0.4, color=_FLOOR)
    axes.set_yticks(places, [row.title.strip() for row in rows])
    axes.invert_yaxis()
    axes.legend(
        ["kvray", "bare work"], frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=2
    )
    for at, row in zip(places, rows, strict=True):
        axes.annotate(f" {row.ratio:.2f}", (row.ours, at - 0.2), va="center", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
