"""The log lines of a node's parts, out of the files that Ray keeps of its workers' output."""

import contextlib
import os
import re
from collections.abc import Iterator, Set
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

_FORM = re.compile(
    r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) ([A-Z]+) kvray\S* ([\w.-]+)/(kvray-[\w-]+):? (.*)"
)
"""The form of `log_lines.Lines`."""
_MARK = re.compile(r":(actor_name|job_id|task_name):")  # Ray's own, for its dashboard
_FILES = "worker-*.err*"  # with those that Ray has rotated, `worker-ID.err.1`
_READ_MAX = 2**20
"""Bytes that one reading takes of a file, its last ones: some 8,000 lines."""
_LINES_MAX = 200
"""Lines of an entry: those after the first are a traceback, or the words of a library."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEntry:
    """One event in the log of a part; a traceback is in the lines of its text after the first."""

    time_s: float
    """Seconds since the epoch: nodes may have different time zones."""
    level: str
    tier: str
    part: str
    text: str = ""


class LogFiles:
    """The entries of some parts of a tier in a directory of Ray's logs, each given once."""

    def __init__(self, directory: Path, *, tier: str, parts: Set[str]) -> None:
        """Look for actors named `parts` of the tier of that name."""
        self._directory = directory
        self._tier = tier
        self._parts = parts
        # Inode -> how far it has been read, and its last entry: Ray renames a file that is full.
        self._places: dict[int, tuple[int, LogEntry | None]] = {}

    def read(self) -> list[LogEntry]:
        """Return what no call before has returned, in the order of its times."""
        before, self._places = self._places, {}
        found = []
        for path in self._directory.glob(_FILES):
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:  # Ray removes it
                status = os.fstat(file.fileno())
                offset, last = before.get(status.st_ino, (0, None))
                if offset > status.st_size:
                    offset, last = 0, None  # another file, with the inode of a removed one
                offset = max(offset, status.st_size - _READ_MAX)
                file.seek(offset)
                whole, newline, _ = file.read(_READ_MAX).rpartition(b"\n")
                entries = list(parse(whole.decode(errors="replace"), last))
                last = entries[-1] if entries else last
                self._places[status.st_ino] = offset + len(whole + newline), last
                found += entries
        wanted = (one for one in found if one.part in self._parts and one.tier == self._tier)
        return sorted(wanted, key=lambda one: one.time_s)


def parse(text: str, before: LogEntry | None = None) -> Iterator[LogEntry]:
    """Give the entries in some lines of a log.

    Lines without a time belong to the entry above them, at first to `before`, which is not given
    again. Nobody knows whose those above all entries are.
    """
    entry, lines = before, list[str]()
    for line in text.split("\n"):
        if found := _FORM.fullmatch(line):
            if entry is not None and lines:
                yield replace(entry, text="\n".join(lines))
            moment, level, tier, part, sentence = found.groups()
            time_s = datetime.strptime(moment, "%Y-%m-%d %H:%M:%S,%f").timestamp()
            entry, lines = LogEntry(time_s=time_s, level=level, tier=tier, part=part), [sentence]
        elif entry is not None and line and len(lines) < _LINES_MAX and not _MARK.match(line):
            lines.append(line)
    if entry is not None and lines:
        yield replace(entry, text="\n".join(lines))
