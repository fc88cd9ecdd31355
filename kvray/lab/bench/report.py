"""The rows of a bench, each with its figures, and the report of them."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from kvray.console.output import empty_table
from kvray.lab.report import Report, machine_facts
from kvray.lab.runner import Duration, Pair, median_s, percentile_s, speed_ratio, time_ratio

GB = 1e9


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement: kvray, the bare work, their ratio, and the figures for the JSON."""

    title: str
    unit: str
    ours: float
    floor: float | None = None
    ratio: float | None = None
    """kvray's speed over the floor's for copies; its time over the floor's for lookups."""
    figures: Mapping[str, float] = field(kw_only=True)


def bench_report(
    rows: Sequence[Row], *, note: str, facts: Mapping[str, Any], has_failed: bool = False
) -> Report:
    """Return the report; `note` says below the table what was measured, `facts` how much."""
    table = empty_table("", numbers=("kvray", "bare work", "ratio"))
    for row, before in zip(rows, [None, *rows], strict=False):
        if before is not None and before.unit not in ("", row.unit):
            table.add_section()
        table.add_row(
            row.title,
            f"{_digits(row.ours)} {row.unit}",
            "" if row.floor is None else f"{_digits(row.floor)} {row.unit}",
            "" if row.ratio is None else f"{row.ratio:.2f}",
        )
    figures = {name: float(f"{value:.5g}") for row in rows for name, value in row.figures.items()}
    facts = {**figures, **facts, **machine_facts()}
    return Report(parts=[table, note], facts=facts, has_failed=has_failed)


def copy_row(
    title: str, names: str | tuple[str, str, str], pairs: Sequence[Pair], *, num_bytes: int
) -> Row:
    """Return the row of copies of `num_bytes` each.

    `names` are those of the ratio, kvray's speed and the bare speed in the JSON; or a pattern of
    all three, such as `store_{}_4mib`.
    """
    if isinstance(names, str):
        names = (names.format("ratio"), names.format("gb_s"), names.format("floor_gb_s"))
    ours, floor = (num_bytes / GB / median_s(side) for side in zip(*pairs, strict=True))
    ratio = speed_ratio(pairs)
    figures = dict(zip(names, (ratio, ours, floor), strict=True))
    return Row(title, "GB/s", ours, floor, ratio, figures=figures)


def time_row(
    title: str, names: tuple[str, str, str], pairs: Sequence[Pair], *, ratio: float
) -> Row:
    """Return the row of times; `names` are those of kvray's, the bare one and `ratio`."""
    ours, floor = (1000 * median_s(side) for side in zip(*pairs, strict=True))
    figures = dict(zip(names, (ours, floor, ratio), strict=True))
    return Row(title, "ms", ours, floor, ratio, figures=figures)


def cpu_row(title: str, names: tuple[str, str], pairs: Sequence[Pair], *, num_bytes: int) -> Row:
    """Return the row of the CPU seconds for each GB; `names` are kvray's and the bare work's."""
    ours, floor = (
        statistics.median(one.cpu_s for one in side) / (num_bytes / GB)
        for side in zip(*pairs, strict=True)
    )
    figures = dict(zip(names, (ours, floor), strict=True))
    return Row(title, "s/GB", ours, floor, ours / floor if floor else None, figures=figures)


def value_row(title: str, unit: str, value: float, name: str) -> Row:
    """Return a row without bare work."""
    return Row(title, unit, value, figures={name: value})


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
    """Return the rows of median and slowest percent, beside bare hashing; and their ratio."""
    ours, floor = [pair.ours for pair in pairs], [pair.floor for pair in pairs]
    p50, p99, bare = (1000 * s for s in (median_s(ours), percentile_s(ours, 99), median_s(floor)))
    ratio, spread = time_ratio(pairs), {f"{name}_ms_p99": p99}
    figures = {f"{name}_ms_p50": p50, f"{name}_hash_ms_p50": bare, f"{name}_over_hash": ratio}
    first = Row(title, "ms", p50, bare, ratio, figures=figures)
    if not has_spread:
        return [first, Row("    99th percentile", "ms", p99, figures=spread)]
    spread[f"{name}_p99_over_p50"] = p99 / p50
    title = "    its 99th percentile, over its median"
    return [first, Row(title, "ms", p99, ratio=p99 / p50, figures=spread)]


def cores() -> str:
    """Return how many cores this machine has, in words."""
    return f"{psutil.cpu_count()} cores"


def _digits(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"
