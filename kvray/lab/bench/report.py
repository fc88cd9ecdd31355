"""The report of a bench: rows with figures, as a table, as one JSON object, or as a picture."""

from __future__ import annotations

import json
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from rich import box
from rich.console import Console
from rich.table import Table

from kvray import __version__
from kvray.console.picture import write_picture
from kvray.lab.bench.runner import Pair, median_s, percentile_s, speed_ratio, time_ratio

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GB = 1e9

_PLAIN_WIDTH = 110
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
    is_met: bool | None = None
    """Whether kvray reaches its own target here; None without a target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that one run of a subcommand found."""

    rows: Sequence[Row]
    note: str
    """Sentences below the table that say what was measured."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Sizes, counts and the machine, for the JSON."""

    @property
    def missed(self) -> list[str]:
        """Titles of the rows that miss their target."""
        return [row.title.strip() for row in self.rows if row.is_met is False]

    def to_json(self) -> str:
        """Return all figures as one JSON object."""
        figures = {name: value for row in self.rows for name, value in row.figures.items()}
        found: dict[str, Any] = {name: float(f"{value:.5g}") for name, value in figures.items()}
        found |= {
            "missed": self.missed,
            **self.facts,
            "cpu_cores": psutil.cpu_count(),
            "machine": platform.machine(),
            "version": __version__,
        }
        return json.dumps(found, indent=2)

    def show(self) -> None:
        """Print the table and the note."""
        console = Console(highlight=False, width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
        console.print(_make_table(self.rows))
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
        figure = Figure(
            figsize=(10, 2 + _INCHES_PER_ROW * sum(map(len, panels))), layout="constrained"
        )
        all_axes = figure.subplots(2, 1, height_ratios=[max(1, len(rows)) for rows in panels])
        for axes, (unit, title, note), rows in zip(all_axes, _PANELS, panels, strict=True):
            axes.set_title(f"{title}, {unit} ({note})", loc="left")
            _draw_panel(axes, rows)
        write_picture(figure, path)


def copy_row(
    title: str,
    names: str | tuple[str, str, str],
    pairs: Sequence[Pair],
    *,
    num_bytes: int,
    least: float | None = None,
    least_gb_s: float | None = None,
) -> Row:
    """Return the row of a copy.

    Args:
        title: for the table.
        names: of the ratio, kvray's speed and the bare speed in the JSON; or a pattern of all
            three, such as `store_{}_4mib`.
        pairs: kvray's copies and the bare ones.
        num_bytes: bytes of each copy.
        least: the ratio that it should reach.
        least_gb_s: kvray's speed that it should reach.
    """
    if isinstance(names, str):
        ratio_name, ours_name, floor_name = map(names.format, ("ratio", "gb_s", "floor_gb_s"))
    else:
        ratio_name, ours_name, floor_name = names
    ours = num_bytes / GB / median_s([pair.ours for pair in pairs])
    floor = num_bytes / GB / median_s([pair.floor for pair in pairs])
    ratio = speed_ratio(pairs)
    is_met = None if least is None else ratio >= least
    if least_gb_s is not None:
        is_met = ours >= least_gb_s
    return Row(
        title=title,
        unit="GB/s",
        ours=ours,
        floor=floor,
        ratio=ratio,
        figures={ratio_name: ratio, ours_name: ours, floor_name: floor},
        is_met=is_met,
    )


def cpu_row(title: str, names: tuple[str, str], pairs: Sequence[Pair], *, num_bytes: int) -> Row:
    """Return the row of the CPU seconds for each GB; `names` are kvray's and the bare work's."""
    ours = statistics.median(pair.ours.cpu_s for pair in pairs) / (num_bytes / GB)
    floor = statistics.median(pair.floor.cpu_s for pair in pairs) / (num_bytes / GB)
    return Row(
        title=title,
        unit="s/GB",
        ours=ours,
        floor=floor,
        ratio=ours / floor if floor else None,
        figures={names[0]: ours, names[1]: floor},
    )


def value_row(title: str, unit: str, value: float, name: str, *, most: float | None = None) -> Row:
    """Return a row without bare work, whose value should be at most `most`."""
    figures = {name: value}
    return Row(title=title, unit=unit, ours=value, figures=figures, is_met=_is_met((value, most)))


def hash_rows(
    title: str,
    name: str,
    pairs: Sequence[Pair],
    *,
    most_ms: float | None = None,
    most_p99_ms: float | None = None,
    most_over_hash: float | None = None,
    most_spread: float | None = None,
) -> list[Row]:
    """Return the rows of the median and of the slowest percent of work beside bare hashing.

    The limits are those of the median, of the 99th percentile, of the ratio of kvray's time to
    the bare work's, and of that of the 99th percentile to the median.
    """
    ours, floor = [pair.ours for pair in pairs], [pair.floor for pair in pairs]
    p50, p99, bare = (1000 * s for s in (median_s(ours), percentile_s(ours, 99), median_s(floor)))
    ratio, spread = time_ratio(pairs), p99 / p50
    median = Row(
        title=title,
        unit="ms",
        ours=p50,
        floor=bare,
        ratio=ratio,
        figures={
            f"{name}_ms_p50": p50,
            f"{name}_hash_ms_p50": bare,
            f"{name}_over_hash": ratio,
        },
        is_met=_is_met((p50, most_ms), (ratio, most_over_hash)),
    )
    slowest = value_row("    99th percentile", "ms", p99, f"{name}_ms_p99", most=most_p99_ms)
    if most_spread is None:
        return [median, slowest]
    spread_row = Row(
        title="    its 99th percentile, over its median",
        unit="ms",
        ours=p99,
        ratio=spread,
        figures={**slowest.figures, f"{name}_p99_over_p50": spread},
        is_met=spread <= most_spread,
    )
    return [median, spread_row]


def cores() -> str:
    """Return how many cores this machine has, in words."""
    return f"{psutil.cpu_count()} cores"


def _is_met(*judged: tuple[float, float | None]) -> bool | None:
    """Return whether each value is at most its limit; None if no value has a limit."""
    verdicts = [value <= most for value, most in judged if most is not None]
    return all(verdicts) if verdicts else None


def _make_table(rows: Sequence[Row]) -> Table:
    table = Table(box=box.SIMPLE, collapse_padding=True, pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in ("kvray", "bare work", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    unit = ""
    for row in rows:
        if unit not in ("", row.unit):
            table.add_section()
        unit = row.unit
        table.add_row(
            row.title,
            f"{_digits(row.ours)} {unit}",
            "" if row.floor is None else f"{_digits(row.floor)} {unit}",
            "" if row.ratio is None else f"{row.ratio:.2f}",
        )
    return table


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
