"""`kvray bench nvme`: demotions to and promotions from a disk, beside the bare transfers."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvray.config import format_size
from kvray.errors import ConfigError
from kvray.lab.bench.bare_disk import check_disk, mount_huge, unmount
from kvray.lab.bench.nvme_store import NvmeBench
from kvray.lab.bench.report import Report, Row, copy_row, cores, cpu_row
from kvray.lab.bench.runner import Pair, Runner, measure

BLOCK_SIZES = (4 * 2**20, 128 * 2**10)

_SPARE_BYTES = 64 * 2**20
"""Of the mount beside the blocks: the arena's tables, and whole huge pages."""
_LEAST_RATIO = 0.9
_CPU_MOST = 0.1

Pairs = dict[str, list[Pair]]
"""Pairs of each of `store`, `store_full` and `retrieve`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmeScale:
    """How much is measured, and where."""

    num_bytes: int
    """Bytes of one store or retrieve."""
    block_sizes: Sequence[int]
    """The first one's figures have no size in their names."""
    repeat: int
    disk: Path
    arena_dir: Path
    """A directory in shared memory."""
    huge_dir: Path | None
    """Likewise, with huge pages; None: mount one, where this user may."""

    @classmethod
    def fit(
        cls,
        block_sizes: Sequence[int],
        *,
        repeat: int | None,
        quick: bool,
        disk: Path | None,
        arena_dir: Path,
        huge_dir: Path | None,
    ) -> NvmeScale:
        """Return the scale for these options; `disk` is TMPDIR unless it is given."""
        return cls(
            num_bytes=16 * 2**20 if quick else 256 * 2**20,
            block_sizes=block_sizes or BLOCK_SIZES,
            repeat=repeat or (3 if quick else 11),
            disk=disk or Path(tempfile.gettempdir()),
            arena_dir=arena_dir,
            huge_dir=huge_dir,
        )

    def check(self) -> None:
        """Make sure that this can be measured.

        Raises:
            ConfigError: the disk is none or has no room, or a block size does not fit.
        """
        for size in self.block_sizes:
            if not 4096 <= size <= self.num_bytes or self.num_bytes % size or size % 4096:
                raise ConfigError(
                    f"Blocks of {format_size(size)} cannot be measured: give whole pages of 4 KiB"
                    f" of which {format_size(self.num_bytes)} are a multiple."
                )
        check_disk(self.disk)
        # Two files, and those of the next pair before these are gone.
        needed, stat = 4 * self.num_bytes, os.statvfs(self.disk)
        free = stat.f_bavail * stat.f_frsize
        if free < needed:
            raise ConfigError(
                f"The bench needs {format_size(needed)} in {self.disk} and {format_size(free)} are"
                " free; name another directory with --dir."
            )


def measure_nvme(scale: NvmeScale, *, runner: Runner) -> Report:
    """Measure with small pages, and with huge ones where there are any.

    Raises:
        ConfigError: a directory cannot be used.
        CapacityError: there is no room for the arena.
        KVRayError: the bytes did not arrive, or did not come from the disk.
    """
    scale.check()
    huge_dir, why_not = scale.huge_dir, ""
    if huge_dir is None:
        huge_dir = runner.make_directory(Path(tempfile.gettempdir()))
        runner.stack.callback(unmount, huge_dir)
        try:
            mount_huge(huge_dir, size=scale.num_bytes + _SPARE_BYTES)
        except ConfigError as error:
            huge_dir, why_not = None, str(error)
    kinds = [("", scale.arena_dir)] + ([("_huge", huge_dir)] if huge_dir else [])
    runner.show("Starting", total=len(kinds) * len(scale.block_sizes) * 3)
    rows: list[Row] = []
    facts: dict[str, Any] = {"direct": True}
    settings = []
    for suffix, arena_dir in kinds:
        with runner.scope() as scope:
            scope.show("Trying the disk")
            bench = NvmeBench(scale.num_bytes, arena_dir, scale.disk, runner=scope)
            pages = f"{format_size(bench.page_bytes)} pages"
            for block_bytes in scale.block_sizes:
                size = format_size(block_bytes)
                is_first = block_bytes == scale.block_sizes[0]
                end = ("" if is_first else f"_{size.lower()}") + suffix
                pairs = _take(bench, block_bytes, scale.repeat, scope)
                rows += _rows(pairs, scale.num_bytes, end, f"{size} blocks, {pages}")
            facts |= {
                f"page_bytes{suffix}": bench.page_bytes,
                f"floor_store{suffix}": str(bench.bare_stores),
                f"floor_retrieve{suffix}": str(bench.bare_retrieves),
                "direct": facts["direct"] and bench.is_direct,
            }
            settings.append(
                f"\nBare with {pages}: stores of {bench.bare_stores}, retrieves of"
                f" {bench.bare_retrieves}."
            )
    return Report(
        rows=rows,
        note=f"{format_size(scale.num_bytes)} at a time between an arena and {scale.disk},"
        f" {'past' if facts['direct'] else 'through'} the page cache, {scale.repeat} pairs on"
        f" {cores()}. Ratios are medians over pairs: kvray's speed over the bare transfer's."
        + "".join(settings)
        + (f"\n{why_not}" if why_not else ""),
        facts={
            **facts,
            "no_huge_pages": why_not or None,
            "moved_bytes": scale.num_bytes,
            "block_bytes": list(scale.block_sizes),
            "pairs": scale.repeat,
            "dir": str(scale.disk),
        },
    )


def _take(bench: NvmeBench, block_bytes: int, repeat: int, runner: Runner) -> Pairs:
    """Measure with blocks of one size."""
    size, pairs = format_size(block_bytes), Pairs()
    runner.show(f"Storing blocks of {size} into an empty tier")
    pairs["store"] = []
    for index in range(repeat):  # both sides have new files in every pair
        bench.renew(block_bytes)
        bench.put_new()
        pairs["store"] += measure(1, ours=bench.store, floor=bench.store_bare, first=index)
    runner.advance()
    runner.show(f"Storing blocks of {size} into a full tier")
    pairs["store_full"] = measure(repeat, ours=bench.store_into_full, floor=bench.store_bare)
    runner.advance()
    runner.show(f"Retrieving blocks of {size}")
    pairs["retrieve"] = measure(repeat, ours=bench.retrieve, floor=bench.retrieve_bare)
    runner.advance()
    return pairs


def _rows(pairs: Pairs, num_bytes: int, end: str, where: str) -> list[Row]:
    """Return the rows of blocks of one size; `end` is the end of their figures' names."""
    titles = {"store": "store", "store_full": "    into a full tier", "retrieve": "retrieve"}
    rows = [
        copy_row(
            f"{title}, {where}",
            f"nvme_{name}_{{}}{end}",
            pairs[name],
            num_bytes=num_bytes,
            least=_LEAST_RATIO,
        )
        for name, title in titles.items()
    ]
    cpu = {
        name: cpu_row(
            "",
            (f"nvme_{name}_cpu_s_per_gb{end}", f"nvme_{name}_floor_cpu_s_per_gb{end}"),
            pairs[name],
            num_bytes=num_bytes,
        )
        for name in titles
    }
    ours = (cpu["store"].ours + cpu["retrieve"].ours) / 2
    floor = ((cpu["store"].floor or 0) + (cpu["retrieve"].floor or 0)) / 2
    figures = {f"nvme_cpu_s_per_gb{end}": ours, f"nvme_floor_cpu_s_per_gb{end}": floor}
    for row in cpu.values():
        figures |= row.figures
    both = Row(
        title=f"    CPU time of both, {where}",
        unit="s/GB",
        ours=ours,
        floor=floor,
        figures=figures,
        is_met=ours <= _CPU_MOST,
    )
    return [*rows, both]
