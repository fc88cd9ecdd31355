"""The report of a bench: rows with figures, as a table, as one JSON object, or as a picture."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from rich import box
from rich.table import Table

from kvray import __version__
from kvray.console.output import printer, write_picture
from kvray.lab.bench.runner import Duration, Pair, median_s, percentile_s, speed_ratio, time_ratio

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GB = 1e9

_PANELS = (("GB/s", "Copies", "higher is better"), ("ms", "Lookups", "lower is better"))
_INCHES_PER_ROW = 0.5
_OURS, _FLOOR = "#2a78b5", "#b8bcc2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement: kvray, the bare work, their ratio, and the figures for the JSON."""

    title: str
    unit: str
    ours: float
    floor: float | None = None
    ratio: float | None = None
    """kvray's speed over the floor's for copies; its time over the floor's for lookups."""
    figures: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of one run of a subcommand."""

    rows: Sequence[Row]
    note: str
    """Sentences below the table that say what was measured."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Sizes, counts and the machine, for the JSON."""

    def to_json(self) -> str:
        """Return all figures as one JSON object."""
        found: dict[str, Any] = {
            name: float(f"{value:.5g}") for row in self.rows for name, value in row.figures.items()
        }
        found |= {
            **self.facts,
            "cpu_cores": psutil.cpu_count(),
            "machine": platform.machine(),
            "version": __version__,
        }
        return json.dumps(found, indent=2)

    def show(self) -> None:
        """Print the table and the note."""
        console = printer()
        table = Table(box=box.SIMPLE, collapse_padding=True, pad_edge=False)
        table.add_column("", no_wrap=True)
        for name in ("kvray", "bare work", "ratio"):
            table.add_column(name, justify="right", no_wrap=True)
        unit = ""
        for row in self.rows:
            if unit not in ("", row.unit):
                table.add_section()
            unit = row.unit
            table.add_row(
                row.title,
                f"{_digits(row.ours)} {unit}",
                "" if row.floor is None else f"{_digits(row.floor)} {unit}",
                "" if row.ratio is None else f"{row.ratio:.2f}",
            )
        console.print(table)
        console.print(self.note)

    def draw(self, path: Path) -> None:
        """Write a PNG with kvray beside the bare work, copies and times apart.

        Raises:
            ConfigError: the file cannot be written.
        """
        from matplotlib.figure import Figure

        panels = [
            [row for row in self.rows if row.unit == unit and row.floor is not None]
            for unit, _, _ in _PANELS
        ]
        height = 2 + _INCHES_PER_ROW * sum(map(len, panels))
        figure = Figure(figsize=(10, height), layout="constrained")
        all_axes = figure.subplots(2, 1, height_ratios=[max(1, len(rows)) for rows in panels])
        for axes, (unit, title, note), rows in zip(all_axes, _PANELS, panels, strict=True):
            axes.set_title(f"{title}, {unit} ({note})", loc="left")
            _draw_panel(axes, rows)
        write_picture(figure, path)


def copy_row(
    title: str, names: str | tuple[str, str, str], pairs: Sequence[Pair], *, num_bytes: int
) -> Row:
    """Return the row of copies of `num_bytes` each.

    `names` are those of the ratio, kvray's speed and the bare speed in the JSON; or a pattern of
    all three, such as `store_{}_4mib`.
    """
    if isinstance(names, str):
        ratio_name, ours_name, floor_name = map(names.format, ("ratio", "gb_s", "floor_gb_s"))
    else:
        ratio_name, ours_name, floor_name = names
    ours = num_bytes / GB / median_s([pair.ours for pair in pairs])
    floor = num_bytes / GB / median_s([pair.floor for pair in pairs])
    ratio = speed_ratio(pairs)
    figures = {ratio_name: ratio, ours_name: ours, floor_name: floor}
    return Row(title=title, unit="GB/s", ours=ours, floor=floor, ratio=ratio, figures=figures)


def cpu_row(title: str, names: tuple[str, str], pairs: Sequence[Pair], *, num_bytes: int) -> Row:
    """Return the row of the CPU seconds for each GB; `names` are kvray's and the bare work's."""
    ours = statistics.median(pair.ours.cpu_s for pair in pairs) / (num_bytes / GB)
    floor = statistics.median(pair.floor.cpu_s for pair in pairs) / (num_bytes / GB)
    ratio = ours / floor if floor else None
    figures = {names[0]: ours, names[1]: floor}
    return Row(title=title, unit="s/GB", ours=ours, floor=floor, ratio=ratio, figures=figures)


def value_row(title: str, unit: str, value: float, name: str) -> Row:
    """Return a row without bare work."""
    return Row(title=title, unit=unit, ours=value, figures={name: value})


def time_rows(title: str, name: str, durations: Sequence[Duration]) -> list[Row]:
    """Return the rows of the median, the 99th percentile and the longest of times."""
    indent = "        " if title.startswith(" ") else "    "
    p99, longest = 1000 * percentile_s(durations, 99), 1000 * percentile_s(durations, 100)
    return [
        value_row(title, "ms", 1000 * median_s(durations), f"{name}_ms"),
        value_row(f"{indent}99th percentile", "ms", p99, f"{name}_ms_p99"),
        value_row(f"{indent}longest", "ms", longest, f"{name}_ms_max"),
    ]


def hash_rows(
    title: str, name: str, pairs: Sequence[Pair], *, has_spread: bool = False
) -> list[Row]:
    """Return the rows of the median and of the slowest percent of work beside bare hashing.

    With `has_spread` the second row also has the 99th percentile over the median.
    """
    ours, floor = [pair.ours for pair in pairs], [pair.floor for pair in pairs]
    p50, p99, bare = (1000 * s for s in (median_s(ours), percentile_s(ours, 99), median_s(floor)))
    ratio = time_ratio(pairs)
    median = Row(
        title=title,
        unit="ms",
        ours=p50,
        floor=bare,
        ratio=ratio,
        figures={f"{name}_ms_p50": p50, f"{name}_hash_ms_p50": bare, f"{name}_over_hash": ratio},
    )
    if not has_spread:
        return [median, value_row("    99th percentile", "ms", p99, f"{name}_ms_p99")]
    spread = Row(
        title="    its 99th percentile, over its median",
        unit="ms",
        ours=p99,
        ratio=p99 / p50,
        figures={f"{name}_ms_p99": p99, f"{name}_p99_over_p50": p99 / p50},
    )
    return [median, spread]


def cores() -> str:
    """Return how many cores this machine has, in words."""
    return f"{psutil.cpu_count()} cores"


def _digits(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _draw_panel(axes: Axes, rows: Sequence[Row]) -> None:
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
