"""A shard's claim to be the one owner of its node's directory.

The owner has locks on two bytes of the owner file. OWNER_BYTE excludes all others. The place of the
other byte follows from the shard's name, so that a restarted shard recognises its earlier self.
Both locks end with their process.
"""

import contextlib
import hashlib
import json
import logging
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from kvray.actors.owner.ownership import NOTE_FILE, OWNER_FILE, make_directory, open_owner_file
from kvray.errors import ShardUnavailable
from kvray.store.machine import lockers
from kvray.store.machine.access import OWN_USER, Access
from kvray.store.machine.side_file import OWNER_BYTE, SideFile

_log = logging.getLogger("kvray.shard")

_WAIT_S = 20.0  # how long another owner may take to end
_GRACE_S = 2.0  # how long an earlier self may take to end in order, before it is ended
_NAME_BYTES = 2**32  # the byte of a shard's name is one of 2**48 from here on


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The owner of a directory; name and time are None if its note cannot be read."""

    shard: str | None
    pid: int
    since: float | None  # seconds since 1970

    def __str__(self) -> str:
        if self.shard is None or self.since is None:
            return f"Process {self.pid}"
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"Shard {self.shard} (process {self.pid}, since {since})"

    def keeps(self, directory: Path) -> str:
        """Return the sentence that refuses `directory` to another shard."""
        return (
            f"{self} owns {directory}; end its tier with `kvray down`, under the TMPDIR or with the"
            " --address that it was started with, or choose another cluster_name or arena.dir. If"
            f" its Ray node is gone, end process {self.pid} on this machine."
        )


class Claim:
    """One shard's claim to a directory: tried until it succeeds, then held for life."""

    def __init__(self, directory: Path, shard: str, access: Access = OWN_USER) -> None:
        """Claim `directory`, which `access` may use, for a shard; its patience begins now."""
        self._directory = directory
        self._shard = shard
        self._access = access
        name = hashlib.sha256(shard.encode()).digest()
        self._name_byte = _NAME_BYTES + int.from_bytes(name[:6], "little")
        self._began = time.monotonic()
        self._has_ended_one = False
        self._file: SideFile | None = None

    def attempt(self) -> bool:
        """Try once to become the owner; False: try again soon.

        The latest shard of a name is the only one. So it ends an earlier self that still has the
        lock after a while, because it is frozen or Ray has lost it. ShardUnavailable: another shard
        goes on owning the directory.
        """
        make_directory(self._directory, self._access)
        file = open_owner_file(self._directory)
        if file is None:
            return False
        if file.try_lock(OWNER_BYTE):
            if file.is_current():
                self._take(file)
                return True
            file.unlock(OWNER_BYTE)  # the last owner removed the file while it ended
            return False
        waited = time.monotonic() - self._began
        if waited > _WAIT_S and (owner := owner_of(self._directory)) is not None:
            raise ShardUnavailable(owner.keeps(self._directory))
        if waited > _GRACE_S and not self._has_ended_one:
            self._has_ended_one = _end_earlier_self(file, self._name_byte, self._shard)
            if self._has_ended_one:  # which takes a while to let go of a large arena
                self._began = time.monotonic()
        return False

    def renew(self) -> bool:
        """Return whether the directory is still ours; replace a removed owner file."""
        if self._file is None or self._file.is_current():
            return self._file is not None
        make_directory(self._directory, self._access)
        file = open_owner_file(self._directory)
        if file is None or not file.try_lock(OWNER_BYTE):
            return False
        self._take(file)
        return True

    def release(self) -> None:
        """Give the directory up. Twice is fine."""
        file, self._file = self._file, None
        if file is not None:
            file.unlock(self._name_byte)
            file.unlock(OWNER_BYTE)

    def _take(self, file: SideFile) -> None:
        file.try_lock(self._name_byte)
        self._file = file
        owner = Owner(shard=self._shard, pid=os.getpid(), since=time.time())
        with contextlib.suppress(OSError):  # hugetlbfs knows no write
            note = self._directory / NOTE_FILE
            note.write_text(json.dumps(asdict(owner)) + "\n")
            note.chmod(0o600)


def owner_of(directory: Path) -> Owner | None:
    """Return who owns `directory` now; None if nobody does. Makes no file."""
    try:
        pid = SideFile.at(directory / OWNER_FILE, create=False).holder_of(OWNER_BYTE)
    except OSError:
        return None
    if pid is None:
        return None
    with contextlib.suppress(OSError, ValueError, TypeError, OverflowError, RecursionError):
        owner = Owner(**json.loads((directory / NOTE_FILE).read_text()))
        if owner.pid == pid:  # else an earlier owner wrote the note
            str(owner)  # raises for a note of other types, which no owner writes
            return owner
    return Owner(shard=None, pid=pid, since=None)


def _end_earlier_self(file: SideFile, name_byte: int, shard: str) -> bool:
    """Kill the process that owns the directory under this shard's own name, if one does.

    `lockers.end` can hit nobody else: a process that just gave up both locks is that earlier self.
    """
    pid = file.holder_of(OWNER_BYTE)
    if not pid or pid == os.getpid():  # 0: a process of another container, out of reach
        return False
    if not lockers.end(pid, lambda: file.lockers(pid).keys() >= {OWNER_BYTE, name_byte}):
        return False
    _log.warning("%s: ended process %d, an earlier self that still owned the arena", shard, pid)
    return True
