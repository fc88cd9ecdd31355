"""`kvray bench nvme`: demotions to and promotions from a disk, beside the bare transfers."""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvray.config import format_size, load_config
from kvray.errors import ConfigError
from kvray.lab.bench.bare_disk import check_disk, mount_huge, unmount
from kvray.lab.bench.nvme_store import NvmeBench
from kvray.lab.bench.report import Report, Row, copy_row, cores, cpu_row
from kvray.lab.bench.runner import (
    LARGE_BYTES,
    SMALL_BYTES,
    Duration,
    Pair,
    Runner,
    Timed,
    measure,
    parse_option,
)

_SPARE_BYTES = 64 * 2**20
"""Of the mount beside the blocks: the arena's tables, and whole huge pages."""
_TITLES = {"store": "store", "store_full": "    into a full tier", "retrieve": "retrieve"}


def run(
    runner: Runner,
    *,
    config: Path | None,
    blocks: Sequence[str],
    repeat: int | None,
    quick: bool,
    disk: Path | None,
    huge_dir: Path | None,
) -> Report:
    """Measure with small pages, and with huge ones where there are any.

    `disk` is a directory on the disk, else the one for temporary files; `huge_dir` is in shared
    memory with huge pages, else one is mounted where this user may. The figures of the first of
    `blocks` have no size in their names.

    Raises:
        ConfigError: a directory cannot be used, or a block size does not fit.
        CapacityError: there is no room for the arena.
        KVRayError: the bytes did not arrive, or did not come from the disk.
    """
    settings = load_config(config)
    num_bytes, num_pairs = (16 * 2**20, repeat or 3) if quick else (256 * 2**20, repeat or 11)
    sizes = [parse_option("--block", text) for text in blocks] or [LARGE_BYTES, SMALL_BYTES]
    disk = disk or Path(tempfile.gettempdir())
    _check(disk, num_bytes, sizes)
    why_not = ""
    if huge_dir is None:
        huge_dir = runner.make_directory(Path(tempfile.gettempdir()))
        runner.stack.callback(unmount, huge_dir)
        try:
            mount_huge(huge_dir, size=num_bytes + _SPARE_BYTES)
        except ConfigError as error:
            huge_dir, why_not = None, str(error)
    kinds = [("", settings.arena.dir)] + ([("_huge", huge_dir)] if huge_dir else [])
    runner.show("Starting", total=len(kinds) * len(sizes) * 3)
    rows: list[Row] = []
    facts: dict[str, Any] = {"direct": True}
    floors = ""
    for suffix, directory in kinds:
        with runner.scope() as scope:
            scope.show("Trying the disk")
            bench = NvmeBench(num_bytes, directory, disk, runner=scope)
            pages = f"{format_size(bench.page_bytes)} pages"
            for block_bytes in sizes:
                size = format_size(block_bytes)
                name = "" if block_bytes == sizes[0] else f"_{size.lower()}"
                pairs = _take(bench, block_bytes, num_pairs, scope)
                rows += _rows(pairs, num_bytes, name + suffix, f"{size} blocks, {pages}")
            facts |= {
                f"page_bytes{suffix}": bench.page_bytes,
                f"floor_store{suffix}": str(bench.bare_stores),
                f"floor_retrieve{suffix}": str(bench.bare_retrieves),
                "direct": facts["direct"] and bench.is_direct,
            }
            floors += (
                f"\nBare with {pages}: stores of {bench.bare_stores}, retrieves of"
                f" {bench.bare_retrieves}."
            )
    return Report(
        rows=rows,
        note=f"{format_size(num_bytes)} at a time between an arena and {disk},"
        f" {'past' if facts['direct'] else 'through'} the page cache, {num_pairs} pairs on"
        f" {cores()}. Ratios are medians over pairs: kvray's speed over the bare transfer's."
        + floors
        + (f"\n{why_not}" if why_not else ""),
        facts={
            **facts,
            "no_huge_pages": why_not or None,
            "moved_bytes": num_bytes,
            "block_bytes": sizes,
            "pairs": num_pairs,
            "dir": str(disk),
        },
    )


def _check(disk: Path, num_bytes: int, sizes: Sequence[int]) -> None:
    for size in sizes:
        if not 4096 <= size <= num_bytes or num_bytes % size or size % 4096:
            raise ConfigError(
                f"Blocks of {format_size(size)} cannot be measured: give a multiple of 4 KiB that"
                f" divides {format_size(num_bytes)}."
            )
    check_disk(disk)
    # Two files, and those of the next pair before these are gone.
    needed, free = 4 * num_bytes, shutil.disk_usage(disk).free
    if free < needed:
        raise ConfigError(
            f"The bench needs {format_size(needed)} in {disk} and {format_size(free)} are free;"
            " name another directory with --dir."
        )


def _take(bench: NvmeBench, block_bytes: int, repeat: int, runner: Runner) -> dict[str, list[Pair]]:
    """Return the pairs of `store`, `store_full` and `retrieve` with blocks of one size."""
    size, stores = format_size(block_bytes), []

    def held(step: Timed) -> Timed:
        """Hold signals back: one that is raised inside the store would leave its lock taken."""

        def timed_step(index: int) -> Duration:
            with runner.interrupts.held():
                return step(index)

        return timed_step

    store_bare = held(bench.store_bare)
    runner.show(f"Storing blocks of {size} into an empty tier")
    for index in range(repeat):  # both sides have new files in every pair
        with runner.interrupts.held():
            bench.renew(block_bytes)
            bench.put_new()
        stores += measure(1, ours=held(bench.store), floor=store_bare, first=index)
    runner.advance()
    runner.show(f"Storing blocks of {size} into a full tier")
    full = measure(repeat, ours=held(bench.store_into_full), floor=store_bare)
    runner.advance()
    runner.show(f"Retrieving blocks of {size}")
    retrieves = measure(repeat, ours=held(bench.retrieve), floor=held(bench.retrieve_bare))
    runner.advance()
    return {"store": stores, "store_full": full, "retrieve": retrieves}


def _rows(pairs: dict[str, list[Pair]], num_bytes: int, end: str, where: str) -> list[Row]:
    """Return the rows of blocks of one size; `end` is the end of their figures' names."""
    rows, cpu = [], {}
    for name, title in _TITLES.items():
        names = f"nvme_{name}_{{}}{end}"
        rows.append(copy_row(f"{title}, {where}", names, pairs[name], num_bytes=num_bytes))
        cpu_names = (names.format("cpu_s_per_gb"), names.format("floor_cpu_s_per_gb"))
        cpu[name] = cpu_row("", cpu_names, pairs[name], num_bytes=num_bytes)
    both = cpu["store"], cpu["retrieve"]
    ours = statistics.mean(row.ours for row in both)
    floor = statistics.mean(row.floor or 0.0 for row in both)
    figures = {f"nvme_cpu_s_per_gb{end}": ours, f"nvme_floor_cpu_s_per_gb{end}": floor}
    for row in cpu.values():
        figures |= row.figures
    title = f"    CPU time of both, {where}"
    return [*rows, Row(title=title, unit="s/GB", ours=ours, floor=floor, figures=figures)]
