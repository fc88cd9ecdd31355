"""What `kvray bench connector` found: rows of a table, or one JSON object."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import psutil
from rich.console import Console

from kvray import __version__
from kvray.cli.bench.connector_cases import Taken
from kvray.cli.bench.pairs import Timing, median_s, percentile_s
from kvray.cli.bench.report import make_table
from kvray.cli.bench.results import Result, Target
from kvray.cli.bench.scale import SHORT_TOKENS, TOKENS_PER_BLOCK
from kvray.config import format_size

_BYTES_MOST = 8.0
_STEPS = {
    "match": "    of it: match and lease",
    "plan": "    of it: plan of the pass",
    "finish": "    of it: end of the request",
    "pickle": "besides: pickling the metadata",
    "load": "besides: start_load_kv without copies",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """All that a run found."""

    taken: Sequence[Taken]
    """The first one is the case that the targets are about."""
    small_metadata: dict[str, int]
    """Pickled bytes of metadata with nothing, and with one block."""
    block_bytes: int
    capacity: int

    def rows(self) -> list[Result]:
        """Return the rows of the table, those of the first case with what they are made of."""
        first, *others = self.taken
        rows = [*_case_rows(first), *_step_rows(first)]
        for taken in others:
            rows += _case_rows(taken)
        return rows + self._metadata_rows()

    def _metadata_rows(self) -> list[Result]:
        by_name = {taken.case.name: taken for taken in self.taken}
        blocks = SHORT_TOKENS // TOKENS_PER_BLOCK
        loaded, saved = (
            max(sample.meta_bytes for sample in by_name[name].samples)
            for name in ("leader", "leader_miss")
        )
        worst = max(loaded, saved) / blocks
        return [
            Result(
                title=f"metadata of {blocks} blocks, for each block and rank",
                unit="bytes",
                ours=worst,
                floor=None,
                ratio=None,
                target=Target(limit=_BYTES_MOST, is_least=False),
                judged=worst,
                figures={
                    "metadata_bytes_per_block_rank": worst,
                    "metadata_bytes_load": loaded,
                    "metadata_bytes_save": saved,
                },
            ),
            *(
                _plain_row(f"metadata, {title}", "bytes", self.small_metadata[name], figure)
                for name, title, figure in (
                    ("empty", "nothing to load or save", "metadata_bytes_empty"),
                    ("one_block", "one block", "metadata_bytes_one_block"),
                )
            ),
        ]

    def to_json(self) -> str:
        """Return all figures as one JSON object."""
        rows = self.rows()
        found: dict[str, object] = {}
        for row in rows:
            found |= {name: float(f"{value:.5g}") for name, value in row.figures.items()}
        main = self.taken[0]
        found |= {
            "missed": [row.title.strip() for row in rows if row.is_met is False],
            "missed_requests": {taken.case.name: taken.num_missed for taken in self.taken},
            "requests": len(main.samples),
            "gc_runs": len(main.collections_s),
            "gc_ms_max": round(1000 * max(main.collections_s, default=0.0), 4),
            "block_bytes": self.block_bytes,
            "capacity_bytes": self.capacity,
            "cpu_cores": psutil.cpu_count(),
            "machine": platform.machine(),
            "version": __version__,
        }
        return json.dumps(found, indent=2)

    def print_all(self, console: Console) -> None:
        """Print the table, and what it is a table of."""
        rows, main = self.rows(), self.taken[0]
        console.print(make_table(rows))
        longest_ms = 1000 * max(main.collections_s, default=0.0)
        missed = {taken.case.title: taken.num_missed for taken in self.taken if taken.num_missed}
        console.print(
            f"Medians over {len(main.samples)} requests of the leader's time for one; blocks of"
            f" {format_size(self.block_bytes)} in an arena of {format_size(self.capacity)}, on"
            f" {psutil.cpu_count()} cores. The bare work is hashing the prompt alone. Python's"
            f" garbage collector ran {len(main.collections_s)} times in the first case, for at"
            f" most {longest_ms:.2g} ms."
        )
        for title, count in missed.items():
            console.print(f"{count} requests found the arena busy: {title}.")
        num_unmet = sum(row.is_met is False for row in rows)
        num_judged = sum(row.is_met is not None for row in rows)
        if num_unmet:
            console.print(f"[red]{num_unmet}[/] of {num_judged} targets are missed.")
        else:
            console.print(f"All {num_judged} targets are met.")


def _case_rows(taken: Taken) -> list[Result]:
    """Return the row of a case's median, and that of its slowest percent."""
    case = taken.case
    ours = [Timing(seconds=sample.leader_s) for sample in taken.samples]
    floor = [Timing(seconds=sample.hash_s) for sample in taken.samples]
    p50, p99, bare = 1000 * median_s(ours), 1000 * percentile_s(ours, 99), 1000 * median_s(floor)
    ratio = statistics.median(sample.leader_s / sample.hash_s for sample in taken.samples)
    return [
        Result(
            title=case.title,
            unit="ms",
            ours=p50,
            floor=bare,
            ratio=ratio,
            target=_at_most(case.most_p50),
            judged=p50,
            figures={
                f"{case.name}_ms_p50": p50,
                f"{case.name}_hash_ms_p50": bare,
                f"{case.name}_over_hash": ratio,
            },
        ),
        Result(
            title="    99th percentile",
            unit="ms",
            ours=p99,
            floor=None,
            ratio=None,
            target=_at_most(case.most_p99),
            judged=p99,
            figures={f"{case.name}_ms_p99": p99},
        ),
    ]


def _step_rows(taken: Taken) -> list[Result]:
    """Return what the leader's time is made of, and what comes on top of it, as medians."""
    return [
        _plain_row(
            title,
            "ms",
            1000 * statistics.median(sample.calls.get(name, 0.0) for sample in taken.samples),
            f"{taken.case.name}_{name}_ms_p50",
        )
        for name, title in _STEPS.items()
    ]


def _plain_row(title: str, unit: str, value: float, figure: str) -> Result:
    return Result(
        title=title,
        unit=unit,
        ours=value,
        floor=None,
        ratio=None,
        target=None,
        judged=None,
        figures={figure: value},
    )


def _at_most(limit: float | None) -> Target | None:
    return None if limit is None else Target(limit=limit, is_least=False)
