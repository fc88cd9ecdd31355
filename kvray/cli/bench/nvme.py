"""`kvray bench nvme`: demotions to and promotions from a disk, beside the bare transfers."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, TaskID

from kvray.cli.bench.bare_disk import check_disk
from kvray.cli.bench.huge_mount import mount_huge, unmount
from kvray.cli.bench.nvme_report import BlockFound, NvmeFound, PagesFound
from kvray.cli.bench.nvme_stage import NvmeStage
from kvray.cli.bench.pairs import Pair, measure
from kvray.cli.bench.stage import make_directory
from kvray.cli.interrupts import Interrupts
from kvray.cli.progress import counting_progress
from kvray.config import format_size
from kvray.errors import ConfigError

NUM_BYTES, QUICK_BYTES = 256 * 2**20, 16 * 2**20
REPEAT, QUICK_REPEAT = 11, 3
BLOCK_SIZES = (4 * 2**20, 128 * 2**10)

_SPARE_BYTES = 64 * 2**20
"""Of the mount beside the blocks: the arena's tables, and whole huge pages."""
_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmeBench:
    """What is to be measured, and where."""

    num_bytes: int
    """What one store or retrieve moves."""
    block_sizes: Sequence[int]
    """The first one's figures have no size in their names."""
    repeat: int
    disk: Path | None
    """A directory on a disk; None: the one for temporary files."""
    arena: Path
    """A directory in shared memory."""
    huge: Path | None
    """Likewise, with huge pages; None: mount one, where this user may."""

    def check(self) -> Path:
        """Return the directory on a disk.

        Raises:
            ConfigError: it is none, has no room, or a block size does not fit.
        """
        for size in self.block_sizes:
            if not 4096 <= size <= self.num_bytes or self.num_bytes % size or size % 4096:
                raise ConfigError(
                    f"Blocks of {format_size(size)} cannot be measured: give whole pages of 4 KiB"
                    f" of which {format_size(self.num_bytes)} are a multiple."
                )
        disk = self.disk or Path(tempfile.gettempdir())
        check_disk(disk)
        # Two files, and what the next pair's take before these are gone.
        needed, stat = 4 * self.num_bytes, os.statvfs(disk)
        if stat.f_bavail * stat.f_frsize < needed:
            raise ConfigError(
                f"The bench needs {format_size(needed)} in {disk} and"
                f" {format_size(stat.f_bavail * stat.f_frsize)} are free; name another directory"
                " with --dir."
            )
        return disk


def measure_nvme(bench: NvmeBench, *, console: Console, interrupts: Interrupts) -> NvmeFound:
    """Measure with small pages, and with huge ones where they are to be had.

    Raises:
        ConfigError: a directory cannot be used.
        CapacityError: there is no room for the arena.
        KVRayError: what was moved did not arrive, or did not come from the disk.
    """
    disk = bench.check()
    with interrupts.closing() as stack, counting_progress(console) as progress:
        huge, why_not = bench.huge, ""
        if huge is None:
            with interrupts.held():
                huge = make_directory(Path(tempfile.gettempdir()))
                stack.callback(shutil.rmtree, huge, ignore_errors=True)
                stack.callback(unmount, huge)
            try:
                mount_huge(huge, size=bench.num_bytes + _SPARE_BYTES)
            except ConfigError as error:
                huge, why_not = None, str(error)
        kinds = [("", bench.arena)] + ([("_huge", huge)] if huge else [])
        bar = progress.add_task("", total=len(kinds) * len(bench.block_sizes) * _STEPS)
        found = [
            _Run(bench, disk, progress, bar).take(suffix, arena, interrupts)
            for suffix, arena in kinds
        ]
    return NvmeFound(
        pages=found,
        num_bytes=bench.num_bytes,
        repeat=bench.repeat,
        directory=str(disk),
        no_huge_pages=why_not,
    )


class _Run:
    """The measurements with one kind of pages."""

    def __init__(self, bench: NvmeBench, disk: Path, progress: Progress, bar: TaskID) -> None:
        self._bench = bench
        self._disk = disk
        self._progress = progress
        self._bar = bar

    def take(self, suffix: str, arena: Path, interrupts: Interrupts) -> PagesFound:
        with interrupts.closing() as stack:
            with interrupts.held():
                directories = []
                for parent in (self._disk, arena):
                    directories.append(make_directory(parent))
                    stack.callback(shutil.rmtree, directories[-1], ignore_errors=True)
            self._progress.update(self._bar, description="Trying the disk")
            stage = NvmeStage(
                num_bytes=self._bench.num_bytes,
                arena_directory=directories[1],
                disk_directory=directories[0],
                stack=stack,
                interrupts=interrupts,
            )
            blocks = [self._measure(stage, size) for size in self._bench.block_sizes]
            return PagesFound(
                suffix=suffix,
                page_bytes=stage.page_bytes,
                is_direct=stage.is_direct,
                store_setting=str(stage.store_setting),
                retrieve_setting=str(stage.retrieve_setting),
                blocks=blocks,
            )

    def _measure(self, stage: NvmeStage, block_bytes: int) -> BlockFound:
        size, repeat = format_size(block_bytes), self._bench.repeat
        with self._step(f"Storing blocks of {size} into an empty tier"):
            store = measure_fresh(stage, block_bytes, repeat)
        with self._step(f"Storing blocks of {size} into a full tier"):
            store_full = measure(repeat, ours=stage.store_into_full, floor=stage.store_bare)
        with self._step(f"Retrieving blocks of {size}"):
            retrieve = measure(repeat, ours=stage.retrieve_ours, floor=stage.retrieve_bare)
        return BlockFound(
            block_bytes=block_bytes, store=store, store_full=store_full, retrieve=retrieve
        )

    @contextlib.contextmanager
    def _step(self, title: str) -> Iterator[None]:
        self._progress.update(self._bar, description=title)
        yield
        self._progress.advance(self._bar)


def measure_fresh(stage: NvmeStage, block_bytes: int, repeat: int) -> list[Pair]:
    """Return pairs of stores of which each has new files for both sides."""
    pairs = []
    for index in range(repeat):
        stage.renew(block_bytes)
        stage.put_new()
        # One pair; counted on, so that who goes first takes turns.
        pairs += measure(1, ours=stage.store_ours, floor=stage.store_bare, first=index)
    return pairs
