"""The undo record of an arena: the old values of all that the present section overwrites.

A section changes the tables in steps. Before a step overwrites anything that counts, it notes the
old values here, in the file itself. The next taker of the lock after a death puts them back. So a
step happens whole or not at all, and undoing it costs as much as doing it.

Why that holds, wherever the writer dies: an entry is complete before the count of entries covers
it, and covered before the first of its rows is overwritten. To put values back half, and then
again, is the same as once. A death ends a process between two instructions, and the next taker of
the lock sees every store before that point.

Values that nobody reads now are not noted: the rows of a FREE slot or page, recency, and counters
that only grow. So a slot that a step frees must not be filled before the step is settled.
"""

from collections.abc import Collection, Mapping

from kvray.store.arena.layout import UNDO_ENTRIES, Array, header_offset

TORN = 2**32
"""In place of the count: the step was too large to note. After a death in it only a rebuild helps.
"""

_WORD = 4
_COUNT = header_offset("undo_count") // 8


class UndoRecord:
    """The undo record, as one process writes it; its user holds the arena's lock."""

    def __init__(
        self, columns: Mapping[str, Array], words: memoryview, entries: Array, log: Array
    ) -> None:
        """Note what is overwritten in `columns`, one-dimensional and the same in every process.

        `words` is the header as u64, of which one is the count of entries. A row of `entries` is
        (column, rows, where its index starts in the log, where its values); no entries: every step
        counts as torn. `log` has u32 words.
        """
        self._columns = list(columns.values())
        self._codes = {name: code for code, name in enumerate(columns)}
        self._words = words
        self._entries = entries
        self._log = log
        self._count = 0
        self._used = 0

    @property
    def is_open(self) -> bool:
        """Whether this section, or one that died, has begun a step and not settled it."""
        return bool(self._words[_COUNT])

    def begin(self) -> bool:
        """Begin a section; return whether another section has left its step open."""
        # An exception may have come before this process could note that somebody undid its step.
        self._count = self._used = 0
        return bool(self._words[_COUNT])

    def end(self, is_well: bool) -> None:
        """End a section: settle its step, or undo it."""
        if is_well:
            self.settle()
        else:
            self.roll_back()

    def note(self, index: Array, names: Collection[str]) -> None:
        """Note the rows `index`, counted from the table's start, of the columns `names`."""
        rows, start = len(index), self._used
        if not rows or self._count == TORN:
            return
        if not self._has_room(rows, len(names)):
            self.tear()
            return
        at = start + rows
        self._log[start:at] = index
        for name in names:
            code = self._codes[name]
            column = self._columns[code]
            at += at % 2  # columns of eight bytes a row are read and written aligned
            values = self._values(column, at, rows)
            column.take(index, out=values, mode="clip")  # the mode that writes to `out` directly
            self._entries[self._count] = code, rows, start, at
            self._count += 1
            at += -(-values.nbytes // _WORD)
        self._used = at
        self._words[_COUNT] = self._count

    def tear(self) -> None:
        """Stop noting in this step: after a death in it only a rebuild helps."""
        self._words[_COUNT] = self._count = TORN

    def settle(self) -> None:
        """Make all that was written since the last settlement final."""
        if self._count:
            self._words[_COUNT] = self._count = self._used = 0

    def roll_back(self) -> bool:
        """Undo the open step, whoever began it; False if it is torn or makes no sense."""
        count = self._words[_COUNT]
        self._count = self._used = 0  # this process has noted nothing of the next step
        if count > UNDO_ENTRIES:
            return False
        entries = self._entries[:count].tolist()
        if not all(self._is_sound(*entry) for entry in entries):
            self._words[_COUNT] = TORN
            return False
        for code, rows, start, at in reversed(entries):
            column = self._columns[code]
            column[self._log[start : start + rows]] = self._values(column, at, rows)
        self._words[_COUNT] = 0
        return True

    def _has_room(self, rows: int, num_columns: int) -> bool:
        words = rows + num_columns * (2 * rows + 1)
        has_entries = self._count + num_columns <= len(self._entries)
        return has_entries and self._used + words <= len(self._log)

    def _values(self, column: Array, at: int, rows: int) -> Array:
        end = at + -(-rows * column.itemsize // _WORD)
        return self._log[at:end].view(column.dtype)[:rows]

    def _is_sound(self, code: int, rows: int, start: int, at: int) -> bool:
        """Whether an entry can have been written by `note`."""
        if code >= len(self._columns) or start + rows > at or at + 2 * rows > len(self._log):
            return False
        return bool((self._log[start : start + rows] < len(self._columns[code])).all())
