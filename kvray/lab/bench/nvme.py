"""`kvray bench nvme`: demotions to and promotions from a disk, beside the bare transfers."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import secrets
import shutil
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvray.config import format_size, load_config
from kvray.errors import ConfigError, KVRayError
from kvray.identity.block import KEY_BYTES, BlockKey
from kvray.lab.bench.report import Row, bench_report, copy_row, cores, cpu_row
from kvray.lab.bench.runner import (
    LARGE_BYTES,
    SLOT_MIN,
    SMALL_BYTES,
    Duration,
    Pair,
    Runner,
    Timed,
    bench_spec,
    measure,
    median_s,
    reserve_all,
    timed,
)
from kvray.lab.report import Report
from kvray.store import ArenaOwner
from kvray.store.arena import key_index
from kvray.store.arena.layout import align
from kvray.store.arena.tables import Array
from kvray.store.machine.capacity import mount_of
from kvray.store.machine.pages import mapped_file
from kvray.store.nvme import NvmeSpec, NvmeStore
from kvray.store.nvme.record import RECORD
from kvray.store.nvme.transfers import IoThreads

_PATTERN_BYTES = 2**20
_SMALL_PAGE = 4096
_SPARE_BYTES = 64 * 2**20
"""Of the mount beside the blocks: the arena's tables, and whole huge pages."""
_TITLES = {"store": "store", "store_full": "    into a full tier", "retrieve": "retrieve"}
_TRIES = 3
_IN_MEMORY = ("tmpfs", "ramfs", "hugetlbfs")
_CLONE_NEWNS = 0x20000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_PRIVATE = 2, 4, 8, 0x4000, 0x40000
_MNT_DETACH = 2
_Call = Callable[[int, list[memoryview], int], int]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_libc.mount.argtypes = (*[ctypes.c_char_p] * 3, ctypes.c_ulong, ctypes.c_char_p)


class NvmeBench:
    """One arena of `num_bytes`, and blocks of one size that fill it; all ends with the run.

    It finds out first how the floor is fastest.
    """

    def __init__(self, num_bytes: int, arena_dir: Path, disk: Path, *, runner: Runner) -> None:
        self.num_bytes = num_bytes
        self._disk = runner.make_directory(disk)
        self._store: NvmeStore | None = None
        self._block_bytes = 0
        self._keys: list[BlockKey] = []
        directory = runner.make_directory(arena_dir)
        self._arena = runner.make_arena(directory, bench_spec(num_bytes))
        self._arena.join("bench")
        self._memory = self._arena.tables.data[:num_bytes]
        self._floor = BareDisk(self._disk / "floor", self._memory)
        runner.stack.callback(self._floor.close)
        runner.stack.callback(self._drop_store)
        # The size of the pages of which most of the mapped arena is made.
        file = mapped_file(Path("/proc/self/smaps").read_text(), directory / "arena")
        is_huge = file is not None and 2 * file.huge_bytes >= file.mapped_bytes
        self.page_bytes = file.huge_page_bytes if file and is_huge else _SMALL_PAGE
        self.is_direct = True
        self._fill()
        self.bare_stores, self.bare_retrieves = self._floor.fastest()

    def _drop_store(self) -> None:
        if self._store is not None:
            self.is_direct &= self._store.stats().is_direct
            self._store.close()
            shutil.rmtree(self._store.directory, ignore_errors=True)
            self._store = None

    def renew(self, block_bytes: int) -> None:
        """Make a store whose only file has room for one arena of blocks of that size.

        Nothing was ever written there, as in the floor's file.
        """
        self._drop_store()
        self._block_bytes = block_bytes
        stride = max(block_bytes, SLOT_MIN)
        # One slot more, for the block below: it makes the store create its file before any timing.
        payload = self.num_bytes + stride
        self._store = NvmeStore(
            self._disk / "tier",
            NvmeSpec(
                cluster_name="bench",
                capacity=payload + 2 * _SMALL_PAGE + align(payload // SLOT_MIN * RECORD.itemsize),
                segment=payload,
                slot_min=SLOT_MIN,
            ),
        )
        self._floor.renew()
        self._put(1)
        self.store(0)

    def put_new(self) -> None:
        """Fill the arena with the blocks of a chain that the store does not have."""
        self._put(self.num_bytes // self._block_bytes)

    def store(self, index: int) -> Duration:
        """Demote the arena's blocks, for good."""
        packed = key_index.pack_keys(self._keys)
        slots = key_index.find(self._arena.tables, packed, 0)
        stored = np.zeros(0, dtype=bool)

        def work() -> None:
            nonlocal stored
            demotion = self._tier.reserve(
                packed, slots, parent=None, depth=0, part=0, block_bytes=self._block_bytes
            )
            (stored,) = self._tier.write([demotion], self._arena.tables)
            self._tier.flush()

        duration = timed(work)
        _check_all(stored, "stored")
        return duration

    def store_into_full(self, index: int) -> Duration:
        """Demote blocks that the store lacks, so that each has to push another one out."""
        self.put_new()
        return self.store(index)

    def store_bare(self, index: int) -> Duration:
        """Write the arena's bytes to the floor's file."""
        return self._floor.store(self.bare_stores)

    def retrieve(self, index: int) -> Duration:
        """Promote the chain that was demoted last."""
        self._go_cold()
        packed = key_index.pack_keys(self._keys)
        sound = np.zeros(0, dtype=bool)

        def work() -> None:
            nonlocal sound
            made = reserve_all(self._arena, self._keys, block_bytes=self._block_bytes)
            got = self._tier.read(packed[made.rows], 0, self._arena.tables, made.slots)
            sound = got.sound
            if sound.all():
                self._arena.commit(made, got.checksums)

        duration = timed(work)
        _check_all(sound, "retrieved")
        return duration

    def retrieve_bare(self, index: int) -> Duration:
        """Read the floor's file into the arena's bytes."""
        self._go_cold()
        duration = self._floor.retrieve(self.bare_retrieves)
        starts = self._memory.view("<u8")[:: _SMALL_PAGE // 8]
        _check_all(starts != 0, "read bare")
        return duration

    @property
    def _tier(self) -> NvmeStore:
        assert self._store is not None
        return self._store

    def _go_cold(self) -> None:
        """Empty the arena, and drop both files from the page cache."""
        ArenaOwner(self._arena).clear()
        self._memory[:] = 0
        check_cold([self._floor.path, *sorted(self._tier.directory.glob("segment-*"))])

    def _put(self, num_blocks: int) -> None:
        ArenaOwner(self._arena).clear()
        self._fill()
        self._keys = [BlockKey(secrets.token_bytes(KEY_BYTES)) for _ in range(num_blocks)]
        made = reserve_all(self._arena, self._keys, block_bytes=self._block_bytes)
        self._arena.commit(made, self._arena.sums(made))

    def _fill(self) -> None:
        """Make all pages differ, and none of them zero: a disk might merge such pages."""
        chance = np.random.default_rng(self._memory.nbytes)
        pattern = chance.integers(1, 256, _PATTERN_BYTES, dtype="u1")
        for at in range(0, self._memory.nbytes, _PATTERN_BYTES):
            piece = self._memory[at : at + _PATTERN_BYTES]
            np.copyto(piece, pattern[: len(piece)])
            piece.view("<u8")[:: _SMALL_PAGE // 8] += np.uint64(at + 1)


def _check_all(done: Array, verb: str) -> None:
    if not len(done) or not done.all():
        raise KVRayError(
            f"Only {np.count_nonzero(done)} of {len(done)} blocks of the bench were {verb}; its"
            " figures would mean nothing. This is a defect, or the disk is failing."
        )


def run(
    runner: Runner,
    *,
    config: Path | None,
    block: Sequence[int] | None,
    repeat: int | None,
    quick: bool,
    disk: Path | None,
    huge_dir: Path | None,
) -> Report:
    """Measure with small pages, and with huge ones where there are any.

    `disk` is a directory on the disk, else the one for temporary files; `huge_dir` is in shared
    memory with huge pages, else one is mounted where this user may. The figures of the first of
    `block` have no size in their names.

    Raises:
        ConfigError: a directory cannot be used, or a block size does not fit.
        CapacityError: there is no room for the arena.
        KVRayError: the bytes did not arrive, or did not come from the disk.
    """
    settings = load_config(config)
    num_bytes, num_pairs = (16 * 2**20, repeat or 3) if quick else (256 * 2**20, repeat or 11)
    sizes = list(block or (LARGE_BYTES, SMALL_BYTES))
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
    return bench_report(
        rows,
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


class Transfers(NamedTuple):
    """How the floor moves its bytes."""

    num_bytes: int
    """Of each transfer."""
    num_threads: int

    def __str__(self) -> str:
        """Return it in words."""
        plural = "" if self.num_threads == 1 else "s"
        return f"{format_size(self.num_bytes)} by {self.num_threads} thread{plural}"


_MIB = 2**20
TRANSFERS = tuple(
    Transfers(mib * _MIB, num_threads)
    for mib, num_threads in ((4, 2), (4, 4), (16, 1), (16, 4), (64, 1), (64, 2), (256, 1))
)
"""Tried for the floor: from several transfers at a time to one that is as large as can be."""


class BareDisk:
    """A file as large as `memory`, which is written to it and read from it, one byte to one.

    `memory` begins on the boundary of a page and has whole pages. `renew` makes the file.
    """

    def __init__(self, path: Path, memory: Array) -> None:
        self.path = path
        self._memory = memory
        self._fd = -1
        self._threads: dict[int, IoThreads] = {}

    def renew(self) -> None:
        """Make a file that has its room on the disk and in which nothing was ever written.

        Raises:
            ConfigError: its file system has no room, or refuses direct I/O.
        """
        self._drop()
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_DIRECT
        try:
            self._fd = os.open(self.path, flags, 0o600)
            os.posix_fallocate(self._fd, 0, self._memory.nbytes)
            os.fsync(self._fd)
        except OSError as error:
            raise _refusal(self.path.parent, error) from None

    def store(self, transfers: Transfers) -> Duration:
        """Write all of the memory to the file, for good."""

        def work() -> None:
            self._move(os.pwritev, transfers)
            os.fdatasync(self._fd)

        return timed(work)

    def retrieve(self, transfers: Transfers) -> Duration:
        """Read all of the file into the memory."""
        return timed(lambda: self._move(os.preadv, transfers))

    def fastest(self) -> tuple[Transfers, Transfers]:
        """Return the transfers whose stores and retrieves are fastest here, by their medians."""
        size = self._memory.nbytes
        tried = [one for one in TRANSFERS if one.num_bytes <= size] or [Transfers(size, 1)]
        stores, retrieves = defaultdict(list), defaultdict(list)
        for one in tried * _TRIES:
            self.renew()
            stores[one].append(self.store(one))
            retrieves[one].append(self.retrieve(one))
        return (
            min(tried, key=lambda one: median_s(stores[one])),
            min(tried, key=lambda one: median_s(retrieves[one])),
        )

    def close(self) -> None:
        """Remove the file and end the threads. Twice is fine."""
        for threads in self._threads.values():
            threads.close()
        self._threads.clear()
        self._drop()

    def _move(self, call: _Call, transfers: Transfers) -> None:
        size, num_threads = transfers
        if num_threads not in self._threads:
            self._threads[num_threads] = IoThreads(num_threads)
        starts = range(0, self._memory.nbytes, size)
        self._threads[num_threads].run([partial(self._move_one, call, at, size) for at in starts])

    def _move_one(self, call: _Call, at: int, size: int) -> None:
        end = min(at + size, self._memory.nbytes)
        while at < end:
            done = call(self._fd, [self._memory[at:end].data], at)
            if not done:
                raise KVRayError(f"{self.path} is shorter than the bench has made it.")
            at += done

    def _drop(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        self.path.unlink(missing_ok=True)


def check_disk(directory: Path) -> None:
    """Make sure that direct I/O reaches a disk in `directory`.

    Raises:
        ConfigError: it is kept in memory, refuses direct I/O, or cannot be written to.
    """
    try:
        mount = mount_of(directory)
        if mount is not None and mount.kind in _IN_MEMORY:
            raise ConfigError(
                f"{directory} is kept in memory ({mount.kind}), where no direct I/O reaches a disk;"
                " give a directory on a disk with --dir."
            )
        fd = os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        try:
            with mmap.mmap(-1, mmap.PAGESIZE) as page:
                os.pwrite(fd, page, 0)
        finally:
            os.close(fd)
    except OSError as error:
        raise _refusal(directory, error) from None


def check_cold(paths: Sequence[Path]) -> None:
    """Drop files from the page cache, and make sure that nothing of them is left there.

    Raises:
        KVRayError: something is, so that a retrieve would not come from the disk.
    """
    for path in paths:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            resident = resident_bytes(fd)
        finally:
            os.close(fd)
        if resident:
            raise KVRayError(
                f"{format_size(resident)} of {path} are still in the page cache, so a retrieve"
                " would not come from the disk; end other programs that use this file system."
            )


def resident_bytes(fd: int) -> int:
    """Return how much of a file the page cache has; it is open for reading and writing."""
    size = os.fstat(fd).st_size
    if not size:
        return 0
    pages = np.zeros(-(-size // mmap.PAGESIZE), dtype="u1")
    with mmap.mmap(fd, size) as mapping:
        # The view must go at once, or the mapping could not be closed.
        address = np.frombuffer(mapping, dtype="u1", count=1).ctypes.data
        if _libc.mincore(address, size, pages.ctypes.data):
            code = ctypes.get_errno()
            raise KVRayError(f"The page cache cannot be read ({os.strerror(code)}).")
    return int(np.count_nonzero(pages & 1)) * mmap.PAGESIZE


def mount_huge(directory: Path, *, size: int) -> None:
    """Mount a tmpfs of `size` bytes and huge pages over the empty `directory`.

    This thread gets a mount namespace of its own first, and so do the threads that it starts: the
    mount ends with the process, even if that is killed, and no other process ever sees it.

    Raises:
        ConfigError: this user, or this kernel, may not.
    """
    options = f"size={size},huge=advise,mode=700".encode()
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    if (
        _libc.unshare(_CLONE_NEWNS)
        or _libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
        or _libc.mount(b"kvray-bench", bytes(directory), b"tmpfs", flags, options)
    ):
        reason = os.strerror(ctypes.get_errno())
        raise ConfigError(
            f"No tmpfs with huge pages can be mounted here ({reason}); have root mount one, and"
            " name it with --arena-dir."
        )


def unmount(directory: Path) -> None:
    """Take the mount away; memory that is still mapped stays until it is unmapped."""
    _libc.umount2(bytes(directory), _MNT_DETACH)


def _refusal(directory: Path, error: OSError) -> ConfigError:
    if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
        return ConfigError(
            f"The file system of {directory} takes no direct I/O, so there is no floor to measure"
            " beside; give a directory on a disk with --dir."
        )
    return ConfigError(
        f"The bench cannot write its files in {directory} ({error.strerror}); give another"
        " directory with --dir."
    )
