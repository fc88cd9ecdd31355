"""Devices that fail, file systems that are full or take no direct I/O, and short transfers."""

import errno
import fcntl
import logging
import os
import resource
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from kvray.errors import CapacityError, TierError
from kvray.store.arena.layout import Array
from kvray.store.nvme import NvmeStore, writer
from kvray.store.nvme import disk as disk_module
from kvray.store.nvme.disk import Disk, DiskFile
from tests.unit.store.invariants import check_invariants
from tests.unit.store.nvme.small_store import SEGMENT, SHAPE, Reopen, demote, present, promote, spec
from tests.unit.store.small_arena import SLOT, chain


class FaultyDisk(Disk):
    def __init__(self) -> None:
        super().__init__()
        self.bad_reads: set[int] = set()
        """Bytes of a file; a transfer that has one of them fails."""
        self.fails_writes = self.fails_syncs = self.fails_records = False
        self.free: int | None = None

    def free_bytes(self, directory: Path) -> int:
        return super().free_bytes(directory) if self.free is None else self.free

    def _open(self, path: Path, flags: int) -> DiskFile:
        return _FaultyFile(path, super()._open(path, flags)._fd, self)


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


@pytest.fixture
def store(reopen: Reopen, disk: FaultyDisk) -> NvmeStore:
    """A store of 4 segments on `disk`."""
    return reopen(disk=disk)


class _FaultyFile(DiskFile):
    _disk: FaultyDisk

    def read(self, buffers: Sequence[Array], offset: int) -> None:
        end = offset + sum(one.nbytes for one in buffers)
        if any(offset <= bad < end for bad in self._disk.bad_reads):
            raise TierError("read error")
        super().read(buffers, offset)

    def write(self, buffers: Sequence[Array], offset: int) -> None:
        is_record = 4096 <= offset < SHAPE.payload_offset
        if self._disk.fails_writes or (self._disk.fails_records and is_record):
            raise TierError("write error")
        super().write(buffers, offset)

    def sync(self) -> None:
        if self._disk.fails_syncs:
            raise TierError("sync error.")
        super().sync()


def test_a_block_that_the_device_refuses_is_tried_once_an_opening(store, reopen, disk):
    keys = chain(8)
    demote(store, keys)
    disk.bad_reads.add(SHAPE.payload_offset + 3 * SLOT + 77)
    assert promote(store, keys).tolist() == [True] * 3 + [False] + [True] * 4
    assert (store.stats().unreadable, store.stats().corrupt, present(store, keys)) == (1, 0, 7)
    demote(store, keys)
    assert promote(store, keys).all(), "it was written to another place"
    store.close()
    disk.bad_reads.clear()
    store = reopen()
    assert (store.report.blocks, store.report.duplicates) == (8, 1)
    assert promote(store, keys).all()


@pytest.mark.parametrize("at", [0, 4096])
def test_a_start_that_failed_can_be_tried_again(reopen, at, disk):
    store, keys = reopen(), chain(20)
    demote(store, keys)
    store.close()
    disk.bad_reads.add(at)
    with pytest.raises(TierError, match="read error"):
        reopen(disk=disk)
    assert promote(reopen(), keys).all()


@pytest.mark.parametrize("fault", ["fails_writes", "fails_records", "fails_syncs"])
def test_write_that_fails_stores_nothing(store, reopen, fault, disk):
    kept, lost = chain(5, seed="kept"), chain(5, seed="lost")
    demote(store, kept)
    setattr(disk, fault, True)
    with pytest.raises(TierError, match="error"):
        demote(store, lost)
    assert (present(store, kept), present(store, lost)) == (5, 0)
    assert promote(store, kept).all()
    check_invariants(store.tables)
    setattr(disk, fault, False)
    store = reopen() if fault == "fails_syncs" else store
    assert present(store, lost) == 0
    assert demote(store, lost).all(), "it goes on"
    store.flush()
    again = reopen()
    assert promote(again, kept + lost).all()


def test_nothing_is_acknowledged_after_a_failed_sync(store, disk):
    """The kernel tells of a failed sync once, and then holds what it lost for written."""
    keys = chain(5)
    demote(store, keys)
    disk.fails_syncs = True
    with pytest.raises(TierError, match="sync error"):
        store.flush()
    disk.fails_syncs = False
    for call in (store.flush, lambda: demote(store, chain(1, seed="x"))):
        with pytest.raises(TierError, match="restart it when"):
            call()
    assert promote(store, keys).all()


def test_full_disk_ends_growth_but_not_service(reopen, caplog, disk, monkeypatch):
    monkeypatch.setattr(writer, "_RETRY_S", 0.0)
    store = reopen(spec(num_segments=8, free_reserve=10**6), disk=disk)
    old = chain(16, seed="old")
    demote(store, old)
    disk.free = 10**6 + SEGMENT
    caplog.clear()
    assert not demote(store, chain(5, seed="none")).any()
    assert "to stay free" in caplog.text
    assert store.stats().segments_without_room == 7
    assert promote(store, old).all()
    new = chain(5, seed="new")
    assert demote(store, new).all(), "from now on others are evicted"
    assert (present(store, old), store.stats().segments) == (11, 1)
    assert writer.num_closed(store.tables)
    disk.free = None
    demote(store, chain(1, seed="one"))
    assert store.stats().segments_without_room == 0
    assert demote(store, chain(20, seed="two")).all()
    assert store.stats().segments == 3


def test_half_made_files_are_removed_and_a_limit_on_their_size_is_no_room(store, directory, disk):
    disk.fails_writes = True
    with pytest.raises(TierError, match="write error"):
        demote(store, chain(3))
    assert not list(directory.glob("segment-*"))
    disk.fails_writes = False
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
    try:
        assert not demote(store, chain(3)).any()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(directory.glob("segment-*"))


@pytest.mark.parametrize("at_open", [True, False])
def test_refused_direct_io_is_done_without_and_told_once(reopen, monkeypatch, caplog, at_open):
    """As the kernel refuses O_DIRECT for some file systems at open and for others later."""

    def refuse(call, flags_of):  # type: ignore[no-untyped-def]
        def refusing(first, second, *more):  # type: ignore[no-untyped-def]
            if flags_of(first, second) & os.O_DIRECT:
                raise OSError(errno.EINVAL, "Invalid argument")
            return call(first, second, *more)

        monkeypatch.setattr(disk_module.os, call.__name__, refusing)

    if at_open:
        refuse(os.open, lambda path, flags: flags)
    for call in (os.pwritev, os.preadv):
        refuse(call, lambda fd, buffers: fcntl.fcntl(fd, fcntl.F_GETFL))
    caplog.set_level(logging.WARNING)
    store, keys = reopen(), chain(30)
    assert demote(store, keys).all()
    assert promote(store, keys).all()
    store.flush()
    assert not store.stats().is_direct
    assert caplog.text.count("no direct I/O") == 1


def test_short_transfers_are_carried_on(reopen, monkeypatch):
    def short(call):  # type: ignore[no-untyped-def]
        return lambda fd, buffers, offset: call(fd, [buffers[0][:4096]], offset)

    for call in (os.pwritev, os.preadv):
        monkeypatch.setattr(disk_module.os, call.__name__, short(call))
    store, keys = reopen(), chain(12)
    assert demote(store, keys).all()
    assert promote(store, keys).all()


@pytest.mark.parametrize(
    ("call", "code", "error", "said"),
    [
        ("pwritev", errno.ENOSPC, CapacityError, r"file cannot be written .* free room"),
        ("pwritev", errno.EIO, TierError, r"file cannot be written .*dmesg"),
        ("preadv", errno.EIO, TierError, r"file cannot be read .*dmesg"),
    ],
)
def test_errors_say_what_to_do(directory, monkeypatch, call, code, error, said):
    file = Disk().create(directory / "file", 8192)
    failing = Mock(side_effect=OSError(code, os.strerror(code)))
    monkeypatch.setattr(disk_module.os, call, failing)
    with pytest.raises(error, match=said):
        (file.write if call == "pwritev" else file.read)([np.zeros(4096, dtype="u1")], 0)
    file.close()


def test_a_directory_that_cannot_be_listed_is_its_device_s_fault(reopen, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Path, "glob", fail)
    monkeypatch.setattr(Path, "iterdir", fail)
    with pytest.raises(TierError, match="cannot be listed"):
        reopen()
