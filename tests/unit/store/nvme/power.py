"""A disk that notes every write and sync, and what a power loss may have left of them.

A drive keeps what was synced. Of what was written since, any sectors may have arrived, in any
order, each of them whole; of names that were given or taken since the directory was synced, any.
"""

import os
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvray.store.arena.layout import Array
from kvray.store.nvme.disk import Disk, DiskFile

SECTOR = 512
IO_THREADS = 3
"""Of the store: each may have a write under way."""

Event = tuple[Any, ...]


class RecordingDisk(Disk):
    """Does what is asked for, and notes it in `log`; others may note events of their own there."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Event] = []
        self._lock = threading.Lock()
        self._num_files = 0
        self._inodes: dict[str, int] = {}

    def note(self, *event: Any) -> None:
        with self._lock:
            self.log.append(event)

    def create(self, path: Path, size: int) -> DiskFile:
        made = super().create(path, size)
        assert isinstance(made, _RecordingFile)
        self.note("create", made.inode, path.name, size)
        return made

    def rename(self, source: Path, target: Path) -> None:
        self.note("rename", source.name, target.name)
        self._inodes[target.name] = self._inodes.pop(source.name)
        super().rename(source, target)

    def remove(self, path: Path) -> None:
        self.note("remove", path.name)
        self._inodes.pop(path.name, None)
        super().remove(path)

    def sync_directory(self, directory: Path) -> None:
        super().sync_directory(directory)
        self.note("sync_directory")

    def _open(self, path: Path, flags: int) -> DiskFile:
        plain = super()._open(path, flags)
        if flags & os.O_CREAT or path.name not in self._inodes:
            self._num_files += 1
            self._inodes[path.name] = self._num_files
        inode = self._inodes[path.name]
        if not flags & os.O_CREAT and not any(event[:2] == ("create", inode) for event in self.log):
            content = path.read_bytes()  # it was there before this disk
            self.note("create", inode, path.name, len(content))
            self.note("write", inode, 0, content)
            self.note("sync", inode)
            self.note("sync_directory")
        return _RecordingFile(plain, self, inode)


class _RecordingFile(DiskFile):
    def __init__(self, plain: DiskFile, disk: RecordingDisk, inode: int) -> None:
        super().__init__(plain.path, plain._fd, disk)
        self._recorder = disk
        self.inode = inode

    def write(self, buffers: Sequence[Array], offset: int) -> None:
        # Before it is done: from here on any part of it may have arrived.
        self._recorder.note("write", self.inode, offset, b"".join(one.tobytes() for one in buffers))
        super().write(buffers, offset)

    def sync(self) -> None:
        super().sync()
        self._recorder.note("sync", self.inode)


@dataclass
class _Inode:
    size: int
    durable: bytearray
    is_synced: bool = False
    pending: list[tuple[int, bytes]] = field(default_factory=list)


def after_power_loss(log: Sequence[Event], chance: random.Random, directory: Path) -> None:
    """Write to `directory` what a drive may hold if the power fails after the events of `log`."""
    inodes: dict[int, _Inode] = {}
    names: dict[str, int] = {}
    changes: list[Event] = []
    for event in log:
        kind, *args = event
        if kind == "create":
            inode, _, size = args
            inodes[inode] = _Inode(size, bytearray(size))
            changes.append(event)
        elif kind in ("rename", "remove"):
            changes.append(event)
        elif kind == "sync_directory":
            for change in changes:
                _apply(names, change)
            changes.clear()
        elif kind == "write":
            inode, offset, written = args
            inodes[inode].pending.append((offset, written))
        elif kind == "sync":
            one = inodes[args[0]]
            for offset, written in one.pending:
                one.durable[offset : offset + len(written)] = written
            one.pending.clear()
            one.is_synced = True
    for change in changes:
        if chance.random() < 0.5:
            _apply(names, change)
    share = chance.choice((0.0, 0.1, 0.5, 0.9, 1.0))
    for name, inode in names.items():
        (directory / name).write_bytes(_left_of(inodes[inode], chance, share))


def after_kill(log: Sequence[Event], chance: random.Random, directory: Path) -> None:
    """Write to `directory` what a process leaves that is killed after the events of `log`.

    All that it has written arrives in the end, but of the writes that were under way any sectors.
    """
    done = list(log)
    while done and done[-1][0] == "write" and len(log) - len(done) < IO_THREADS:
        done.pop()
    synced = [("sync", event[1]) for event in done if event[0] == "create"]
    late = log[len(done) :]
    after_power_loss([*done, *synced, ("sync_directory",), *late], chance, directory)


def _apply(names: dict[str, int], change: Event) -> None:
    kind, *args = change
    if kind == "create":
        names[args[1]] = args[0]
    elif kind == "rename":
        if args[0] in names:
            names[args[1]] = names.pop(args[0])
    else:
        names.pop(args[0], None)


def _left_of(inode: _Inode, chance: random.Random, share: float) -> bytes:
    left = bytearray(inode.durable)
    sectors = [
        (offset + at, written[at : at + SECTOR])
        for offset, written in inode.pending
        for at in range(0, len(written), SECTOR)
    ]
    chance.shuffle(sectors)
    for at, sector in sectors:
        if chance.random() < share:
            left[at : at + SECTOR] = sector
    if not inode.is_synced and chance.random() < 0.5:
        return bytes(left[: chance.randrange(inode.size)])
    return bytes(left)
