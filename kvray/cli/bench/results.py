"""What a run found: one row for each measurement, with the figures that it gives to the JSON."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvray.cli.bench.pairs import (
    Pair,
    Timing,
    median_s,
    percentile_s,
    speed_ratio,
    time_ratio,
)

GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a figure should be."""

    limit: float
    is_least: bool
    """Whether the limit is the least that will do; else it is the most."""

    def is_met(self, value: float) -> bool:
        """Return whether `value` will do."""
        return value >= self.limit if self.is_least else value <= self.limit

    def __str__(self) -> str:
        """Return it as people write it."""
        return f"{'≥' if self.is_least else '≤'} {self.limit:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One row: kvray, the floor, their ratio, and the figure that the target is about."""

    title: str
    unit: str
    ours: float
    floor: float | None
    ratio: float | None
    """kvray's speed over the floor's for copies; its time over the floor's for lookups."""
    target: Target | None
    judged: float | None
    """What the target is about: the ratio, unless the row says otherwise."""
    figures: dict[str, float]

    @property
    def is_met(self) -> bool | None:
        """Whether the target is met; None without one."""
        if self.target is None or self.judged is None:
            return None
        return self.target.is_met(self.judged)


def copy_result(
    title: str, name: str, pairs: Sequence[Pair], *, num_bytes: int, least: float
) -> Result:
    """Return the row of a copy.

    Args:
        title: for the table.
        name: of the figure, such as `store_{}_4mib`, with `ratio` or `gb_s` to be put in.
        pairs: kvray's copies and the bare ones.
        num_bytes: what each copies.
        least: the ratio that it should reach.
    """
    ours = num_bytes / GB / median_s([pair.ours for pair in pairs])
    floor = num_bytes / GB / median_s([pair.floor for pair in pairs])
    ratio = speed_ratio(pairs)
    figures = {
        name.format("ratio"): ratio,
        name.format("gb_s"): ours,
        name.format("floor_gb_s"): floor,
    }
    return Result(
        title=title,
        unit="GB/s",
        ours=ours,
        floor=floor,
        ratio=ratio,
        target=Target(limit=least, is_least=True),
        judged=ratio,
        figures=figures,
    )


def first_store_result(pairs: Sequence[Pair], *, num_bytes: int, least_gb_s: float) -> Result:
    """Return the row of the first store, whose target is a speed."""
    row = copy_result(
        "first store into a fresh arena", "first_store_{}", pairs, num_bytes=num_bytes, least=0
    )
    return Result(
        title=row.title,
        unit=row.unit,
        ours=row.ours,
        floor=row.floor,
        ratio=row.ratio,
        target=Target(limit=least_gb_s, is_least=True),
        judged=row.ours,
        figures=row.figures,
    )


def cpu_result(pairs: Sequence[Pair], *, num_bytes: int) -> Result:
    """Return the row of the CPU time that a retrieve takes, in seconds for each GB."""
    gigabytes = num_bytes / GB
    ours = median_s([Timing(seconds=pair.ours.cpu_s) for pair in pairs]) / gigabytes
    floor = median_s([Timing(seconds=pair.floor.cpu_s) for pair in pairs]) / gigabytes
    return Result(
        title="CPU time of a retrieve, 4 MiB blocks",
        unit="s/GB",
        ours=ours,
        floor=floor,
        ratio=ours / floor,
        target=None,
        judged=None,
        figures={"retrieve_cpu_s_per_gb": ours, "retrieve_floor_cpu_s_per_gb": floor},
    )


def lookup_results(
    title: str, name: str, pairs: Sequence[Pair], *, most: float | None, most_spread: float | None
) -> list[Result]:
    """Return the row of a lookup, and one of its slowest percent if that has a target.

    Args:
        title: for the table.
        name: start of its figures.
        pairs: kvray's lookups and the bare hashing.
        most: how many times the bare work it may take, in the median.
        most_spread: how many times its median its 99th percentile may be.
    """
    ours, floor = [pair.ours for pair in pairs], [pair.floor for pair in pairs]
    p50, p99, bare = (1000 * s for s in (median_s(ours), percentile_s(ours, 99), median_s(floor)))
    ratio = time_ratio(pairs)
    figures = {
        f"{name}_ms_p50": p50,
        f"{name}_ms_p99": p99,
        f"{name}_hash_ms_p50": bare,
        f"{name}_over_hash": ratio,
    }
    row = Result(
        title=title,
        unit="ms",
        ours=p50,
        floor=bare,
        ratio=ratio,
        target=None if most is None else Target(limit=most, is_least=False),
        judged=ratio,
        figures=figures,
    )
    if most_spread is None:
        return [row]
    slowest = Result(
        title="    its 99th percentile, over its median",
        unit="ms",
        ours=p99,
        floor=None,
        ratio=p99 / p50,
        target=Target(limit=most_spread, is_least=False),
        judged=p99 / p50,
        figures={f"{name}_p99_over_p50": p99 / p50},
    )
    return [row, slowest]
