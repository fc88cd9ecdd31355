"""`kvray bench nvme`: demotions to a disk and promotions, beside fio where there is one."""

import json
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from kvray.config import format_size, load_config
from kvray.errors import ConfigError, KVRayError
from kvray.identity.block import KEY_BYTES, BlockKey
from kvray.lab.bench.report import Row, bench_report, copy_row, cores, cpu_row, value_row
from kvray.lab.report import Report
from kvray.lab.runner import (
    LARGE_BYTES,
    SLOT_MIN,
    SMALL_BYTES,
    Duration,
    Pair,
    Runner,
    Timed,
    bench_spec,
    measure,
    require_room,
    reserve_all,
    timed,
)
from kvray.store import ArenaOwner
from kvray.store.arena import key_index
from kvray.store.arena.layout import align
from kvray.store.arena.tables import Array
from kvray.store.machine.capacity import mount_of
from kvray.store.machine.pages import mapped_file
from kvray.store.nvme import NvmeSpec, NvmeStore
from kvray.store.nvme.record import RECORD

_PATTERN_BYTES = 2**20
_SMALL_PAGE = 4096
_TITLES = {"store": "store", "store_full": "    into a full tier", "retrieve": "retrieve"}
_FIO = (
    *("fio", "--name=bare", "--thread", "--output-format=json"),
    *("--ioengine=libaio", "--iodepth=4", "--bs=16m", "--direct=1", "--end_fsync=1"),
)
_FIO_TIMEOUT_S = 600.0


def run(
    runner: Runner,
    *,
    config: Path | None,
    block: Sequence[int] | None,
    repeat: int | None,
    quick: bool,
    disk: Path | None,
) -> Report:
    """Measure an arena under arena.dir, and `disk`, a directory, else the one of temporary files.

    The figures of the first of `block` have no size in their names. KVRayError: a directory or a
    block size cannot be used, the bytes did not arrive past the page cache, or fio failed.
    """
    settings = load_config(config)
    num_bytes, num_pairs = (16 * 2**20, repeat or 3) if quick else (256 * 2**20, repeat or 11)
    sizes = list(block or (LARGE_BYTES, SMALL_BYTES))
    disk = disk or Path(tempfile.gettempdir())
    _check(disk, num_bytes, sizes)
    runner.show("Starting", total=len(sizes) * len(_TITLES))
    bench = _Bench(num_bytes, settings.arena.dir, disk, runner=runner)
    rows: list[Row] = []
    for block_bytes in sizes:
        size = format_size(block_bytes)
        end = "" if block_bytes == sizes[0] else f"_{size.lower()}"
        pairs = bench.take(block_bytes, num_pairs)
        rows += _rows(pairs, num_bytes, end, f"{size} blocks", has_floor=bench.has_fio)
    floor = (
        "Ratios are medians over pairs: kvray's speed over that of fio."
        if bench.has_fio
        else "Install fio, and it is measured beside that."
    )
    return bench_report(
        rows,
        note=f"{format_size(num_bytes)} at a time between an arena with pages of"
        f" {format_size(bench.page_bytes)} and {disk}, past the page cache, {num_pairs} times on"
        f" {cores()}. {floor}",
        facts={
            "page_bytes": bench.page_bytes,
            "fio": bench.has_fio,
            "moved_bytes": num_bytes,
            "block_bytes": sizes,
            "pairs": num_pairs,
            "dir": str(disk),
        },
    )


def _check(disk: Path, num_bytes: int, sizes: Sequence[int]) -> None:
    """Raise ConfigError unless blocks fit, and `disk` is on a disk; CapacityError: no room."""
    for size in sizes:
        if not SLOT_MIN <= size <= num_bytes or num_bytes % size or size % 4096:
            raise ConfigError(
                f"Blocks of {format_size(size)} cannot be measured: give a multiple of 4 KiB from"
                f" {format_size(SLOT_MIN)} on that divides {format_size(num_bytes)}."
            )
    try:
        # Two files, and those of the next pair before these are gone.
        require_room(4 * num_bytes, shutil.disk_usage(disk).free, str(disk), "give another --dir")
    except OSError as error:
        raise ConfigError(
            f"The bench cannot write its files in {disk} ({error.strerror}); give another"
            " directory with --dir."
        ) from None
    mount = mount_of(disk)
    if mount is not None and mount.is_memory:
        raise ConfigError(
            f"{disk} is kept in memory ({mount.kind}), where no direct I/O reaches a disk;"
            " give a directory on a disk with --dir."
        )


def _rows(
    pairs: dict[str, list[Pair]], num_bytes: int, end: str, where: str, *, has_floor: bool
) -> list[Row]:
    """Return the rows of blocks of one size; `end` is the end of their figures' names."""
    copies, cpu = list[Row](), list[Row]()
    for name, title in _TITLES.items():
        names = f"nvme_{name}_{{}}{end}"
        row = copy_row(f"{title}, {where}", names, pairs[name], num_bytes=num_bytes)
        cpu_names = names.format("cpu_s_per_gb"), names.format("floor_cpu_s_per_gb")
        spent = cpu_row(f"CPU time: {title.strip()}", cpu_names, pairs[name], num_bytes=num_bytes)
        for rows, one, figure in ((copies, row, names.format("gb_s")), (cpu, spent, cpu_names[0])):
            rows.append(one if has_floor else value_row(one.title, one.unit, one.ours, figure))
    return copies + cpu


class _Bench:
    """One arena of `num_bytes`, and blocks of one size that fill it; all ends with the run."""

    def __init__(self, num_bytes: int, arena_dir: Path, disk: Path, *, runner: Runner) -> None:
        self.has_fio = shutil.which(_FIO[0]) is not None
        self._runner = runner
        self._num_bytes = num_bytes
        self._disk = runner.make_directory(disk, "--dir")
        self._floor = self._disk / "floor"
        self._tier: NvmeStore
        self._block_bytes = 0
        self._keys: list[BlockKey] = []
        directory = runner.make_directory(arena_dir)
        self._arena = runner.make_arena(directory, bench_spec(num_bytes))
        self._arena.join("bench")
        self._memory = self._arena.tables.data[:num_bytes]
        self._tier_stack = runner.stack.enter_context(ExitStack())
        # The size of the pages of which most of the mapped arena is made.
        file = mapped_file(Path("/proc/self/smaps").read_text(), directory / "arena")
        is_huge = file is not None and 2 * file.huge_bytes >= file.mapped_bytes
        self.page_bytes = file.huge_page_bytes if file and is_huge else _SMALL_PAGE

    def take(self, block_bytes: int, repeat: int) -> dict[str, list[Pair]]:
        size, stores = format_size(block_bytes), []
        self._runner.show(f"Storing blocks of {size} into an empty tier")
        for index in range(repeat):  # both sides have new files in every pair
            with self._runner.interrupts.held():
                self._floor.unlink(missing_ok=True)
                self._renew(block_bytes)
                self._put(self._num_bytes // block_bytes)
            stores += self._measure(1, self._demote, "write", first=index)
        self._runner.advance()
        self._runner.show(f"Storing blocks of {size} into a full tier")
        full = self._measure(repeat, self._demote_others, "write")
        self._runner.advance()
        self._runner.show(f"Retrieving blocks of {size}")
        retrieves = self._measure(repeat, self._promote, "read")
        self._runner.advance()
        return {"store": stores, "store_full": full, "retrieve": retrieves}

    def _measure(self, count: int, work: Timed, verb: str, *, first: int = 0) -> list[Pair]:
        """Return pairs of `work` and fio; without fio both sides of a pair are kvray's."""

        def ours(index: int) -> Duration:
            # A signal that is raised inside the store would leave its lock taken.
            with self._runner.interrupts.held():
                return work(index)

        if not self.has_fio:
            return [Pair(one, one) for one in map(ours, range(first, first + count))]
        return measure(count, ours=ours, floor=lambda _: self._fio(verb), first=first)

    def _fio(self, verb: str) -> Duration:
        """Have fio write as many bytes to a file, for good, or read it, past the page cache."""
        with self._runner.interrupts.held():
            done = subprocess.run(
                [*_FIO, f"--filename={self._floor}", f"--size={self._num_bytes}", f"--rw={verb}"],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
                timeout=_FIO_TIMEOUT_S,
                start_new_session=True,  # Ctrl-C is for this process
            )
        if done.returncode:
            raise KVRayError(f"fio failed: {' '.join(done.stderr.split())[-500:]}")
        job = json.loads(done.stdout)["jobs"][0]
        cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
        return Duration(job[verb]["io_bytes"] / job[verb]["bw_bytes"], cpu_s)

    def _renew(self, block_bytes: int) -> None:
        """Make a store whose only file, never written to, has room for one arena of such blocks."""
        self._tier_stack.close()
        self._block_bytes = block_bytes
        stride = max(block_bytes, SLOT_MIN)
        # One slot more, for the block below: it makes the store create its file before any timing.
        payload = self._num_bytes + stride
        self._tier = NvmeStore(
            self._disk / "tier",
            NvmeSpec(
                cluster_name="bench",
                capacity=payload + 2 * _SMALL_PAGE + align(payload // SLOT_MIN * RECORD.itemsize),
                segment=payload,
                slot_min=SLOT_MIN,
            ),
        )
        self._tier_stack.callback(shutil.rmtree, self._tier.directory, ignore_errors=True)
        self._tier_stack.callback(self._tier.close)
        self._put(1)
        self._demote(0)
        if not self._tier.stats().is_direct:
            raise ConfigError(
                f"The file system of {self._disk} takes no direct I/O, so a retrieve would not come"
                " from the disk; give a directory on a disk with --dir."
            )

    def _demote(self, index: int) -> Duration:
        slots = key_index.find(self._arena.tables, key_index.pack_keys(self._keys), 0)
        stored = np.zeros(0, dtype=bool)

        def work() -> None:
            nonlocal stored
            demotion = self._tier.reserve(self._arena.tables, slots)
            (stored,) = self._tier.write([demotion], self._arena.tables)
            self._tier.flush()

        duration = timed(work)
        _check_all(stored, "stored")
        return duration

    def _demote_others(self, index: int) -> Duration:
        """Demote blocks that the store lacks, so that each has to push another one out."""
        self._put(self._num_bytes // self._block_bytes)
        return self._demote(index)

    def _promote(self, index: int) -> Duration:
        """Promote the chain that was demoted last."""
        ArenaOwner(self._arena).clear()
        self._memory[:] = 0
        packed = key_index.pack_keys(self._keys)
        valid = np.zeros(0, dtype=bool)

        def work() -> None:
            nonlocal valid
            made = reserve_all(self._arena, self._keys, block_bytes=self._block_bytes)
            valid, sums = self._tier.read(packed[made.rows], 0, self._arena.tables, made.slots)
            if valid.all():
                self._arena.commit(made, sums)

        duration = timed(work)
        _check_all(valid, "retrieved")
        return duration

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
