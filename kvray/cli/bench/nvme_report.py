"""What a run of `kvray bench nvme` found, as a table and as one JSON object."""

import json
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import psutil
from rich.console import Console

from kvray import __version__
from kvray.cli.bench.pairs import Pair, Timing
from kvray.cli.bench.report import make_table
from kvray.cli.bench.results import GB, Result, Target, copy_result
from kvray.config import format_size

_LEAST_RATIO = 0.9
_CPU_MOST = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFound:
    """What was found with blocks of one size, pair by pair."""

    block_bytes: int
    store: Sequence[Pair]
    """Into files in which nothing was ever written."""
    store_full: Sequence[Pair]
    """Into a store where every block has to push another one out, and into a written file."""
    retrieve: Sequence[Pair]


@dataclass(frozen=True, slots=True, kw_only=True)
class PagesFound:
    """What was found with an arena of one kind of pages."""

    suffix: str
    """Of its figures' names."""
    page_bytes: int
    is_direct: bool
    store_setting: str
    """How the floor was fastest, in words."""
    retrieve_setting: str
    blocks: Sequence[BlockFound]


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmeFound:
    """What a run found."""

    pages: Sequence[PagesFound]
    num_bytes: int
    repeat: int
    directory: str
    no_huge_pages: str
    """Why there were none, in a sentence; "" where there were."""

    def rows(self) -> list[Result]:
        """Return the rows of the table."""
        return [
            row
            for pages in self.pages
            for index, block in enumerate(pages.blocks)
            for row in self._rows(pages, block, is_first=index == 0)
        ]

    def to_json(self) -> str:
        """Return all figures as one JSON object."""
        rows = self.rows()
        found: dict[str, object] = {}
        for row in rows:
            found |= {name: float(f"{value:.5g}") for name, value in row.figures.items()}
        for pages in self.pages:
            found |= {
                f"page_bytes{pages.suffix}": pages.page_bytes,
                f"floor_store{pages.suffix}": pages.store_setting,
                f"floor_retrieve{pages.suffix}": pages.retrieve_setting,
            }
        found |= {
            "missed": [row.title.strip() for row in rows if row.is_met is False],
            "no_huge_pages": self.no_huge_pages or None,
            "direct": all(pages.is_direct for pages in self.pages),
            "moved_bytes": self.num_bytes,
            "block_bytes": [block.block_bytes for block in self.pages[0].blocks],
            "pairs": self.repeat,
            "dir": self.directory,
            "cpu_cores": psutil.cpu_count(),
            "machine": platform.machine(),
            "version": __version__,
        }
        return json.dumps(found, indent=2)

    def print_all(self, console: Console) -> None:
        """Print the table, and what it is a table of."""
        rows = self.rows()
        console.print(make_table(rows))
        console.print(
            f"{format_size(self.num_bytes)} at a time between an arena and {self.directory},"
            f" {'past' if all(one.is_direct for one in self.pages) else 'through'} the page cache,"
            f" {self.repeat} pairs on {psutil.cpu_count()} cores. Ratios are medians over pairs:"
            " kvray's speed over the bare transfer's."
        )
        for pages in self.pages:
            console.print(
                f"Bare with {_words(pages)}: stores of {pages.store_setting}, retrieves of"
                f" {pages.retrieve_setting}."
            )
        if self.no_huge_pages:
            console.print(self.no_huge_pages)
        num_unmet = sum(row.is_met is False for row in rows)
        num_judged = sum(row.is_met is not None for row in rows)
        if num_unmet:
            console.print(f"[red]{num_unmet}[/] of {num_judged} targets are missed.")
        else:
            console.print(f"All {num_judged} targets are met.")

    def _rows(self, pages: PagesFound, block: BlockFound, *, is_first: bool) -> list[Result]:
        size = format_size(block.block_bytes)
        end = ("" if is_first else f"_{size.lower()}") + pages.suffix
        where = f"{size} blocks, {_words(pages)}"
        kinds = (
            ("store", f"store, {where}", block.store),
            ("store_full", "    into a full tier", block.store_full),
            ("retrieve", f"retrieve, {where}", block.retrieve),
        )
        rows = [
            copy_result(
                title if title[0] != " " else f"{title}, {where}",
                f"nvme_{name}_{{}}{end}",
                pairs,
                num_bytes=self.num_bytes,
                least=_LEAST_RATIO,
            )
            for name, title, pairs in kinds
        ]
        return [*rows, self._cpu_row(block, end, where)]

    def _cpu_row(self, block: BlockFound, end: str, where: str) -> Result:
        """Return the row of the CPU of a store and a retrieve, for each GB that they move."""
        names = ("store", "store_full", "retrieve")
        figures: dict[str, float] = {}
        for name, pairs in zip(names, (block.store, block.store_full, block.retrieve), strict=True):
            ours = self._cpu_s_per_gb([pair.ours for pair in pairs])
            floor = self._cpu_s_per_gb([pair.floor for pair in pairs])
            figures |= {
                f"nvme_{name}_cpu_s_per_gb{end}": ours,
                f"nvme_{name}_floor_cpu_s_per_gb{end}": floor,
            }
        both, bare = (
            (figures[f"nvme_store_{kind}{end}"] + figures[f"nvme_retrieve_{kind}{end}"]) / 2
            for kind in ("cpu_s_per_gb", "floor_cpu_s_per_gb")
        )
        return Result(
            title=f"    CPU time of both, {where}",
            unit="s/GB",
            ours=both,
            floor=bare,
            ratio=None,
            target=Target(limit=_CPU_MOST, is_least=False),
            judged=both,
            figures={
                f"nvme_cpu_s_per_gb{end}": both,
                f"nvme_floor_cpu_s_per_gb{end}": bare,
                **figures,
            },
        )

    def _cpu_s_per_gb(self, timings: Sequence[Timing]) -> float:
        return statistics.median(one.cpu_s for one in timings) / (self.num_bytes / GB)


def _words(pages: PagesFound) -> str:
    return f"{format_size(pages.page_bytes)} pages"
