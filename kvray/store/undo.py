"""The undo record of an arena: what stood where the section under way has written.

A section changes the tables in steps. Before a step overwrites anything that counts, the old
values are noted here, in the file itself, so that whoever takes the lock after a death can put
them back: a step happens whole or not at all, and undoing it costs what doing it has cost.

Why that holds, wherever the writer dies: an entry is complete before the count of entries covers
it, and covered before the first of its rows is overwritten. Putting back is the same whether it
is done once or, by somebody who died over it, half and then again. A death ends a process between
two instructions, and the next taker of the lock sees every store before that point.

Not noted is what nobody looks at any more or yet: the rows of a FREE slot or page, recency, and
counters that only grow. So a slot that a step frees must not be filled before the step is settled.
"""

from collections.abc import Collection, Mapping

from kvray.store.layout import UNDO_ENTRIES, Array, header_offset

TORN = 2**32
"""In place of the count: more was overwritten than could be noted. After a death in there, only
a rebuild brings the tables back."""

_WORD = 4
_COUNT = header_offset("undo_count") // 8


class UndoRecord:
    """One process's hand on the undo record; whoever uses it holds the arena's lock."""

    def __init__(
        self, columns: Mapping[str, Array], words: memoryview, entries: Array, log: Array
    ) -> None:
        """Note what is overwritten in `columns`.

        Args:
            columns: the one-dimensional columns of the tables; the same in every process.
            words: the header as u64, of which one is the count of entries.
            entries: rows of (column, rows, where its index starts in the log, where its values).
            log: u32 words.
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
        """Whether a step was begun and not settled: by this section, or by one that died."""
        return bool(self._words[_COUNT])

    def note(self, index: Array, names: Collection[str]) -> None:
        """Note what the rows `index` of the columns `names` hold, before they are overwritten.

        Every row is one of the table's, counted from its start.
        """
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
        """Note nothing more in this step: after a death in it only a rebuild helps."""
        self._words[_COUNT] = self._count = TORN

    def settle(self) -> None:
        """Make what was written since the last settlement stand."""
        if self._count:
            self._words[_COUNT] = self._count = self._used = 0

    def roll_back(self) -> bool:
        """Undo the step under way, whoever began it; False if it is torn or makes no sense."""
        count = self._words[_COUNT]
        self._count = self._used = 0  # of the next step, be it ours or not
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
        return self._used + words <= len(self._log) and self._count + num_columns <= UNDO_ENTRIES

    def _values(self, column: Array, at: int, rows: int) -> Array:
        """Return the place in the log of `rows` values of `column`."""
        end = at + -(-rows * column.itemsize // _WORD)
        return self._log[at:end].view(column.dtype)[:rows]

    def _is_sound(self, code: int, rows: int, start: int, at: int) -> bool:
        """Whether an entry can have been written by `note`."""
        if code >= len(self._columns) or start + rows > at or at + 2 * rows > len(self._log):
            return False
        return bool((self._log[start : start + rows] < len(self._columns[code])).all())


class NoUndo:
    """In place of an undo record, for tables of which nothing is left when their process dies.

    A step that is given up halfway cannot be undone.
    """

    is_open = False

    def note(self, index: Array, names: Collection[str]) -> None:
        """See `UndoRecord.note`; nothing is noted."""

    def settle(self) -> None:
        """See `UndoRecord.settle`."""

    def tear(self) -> None:
        """See `UndoRecord.tear`."""

    def roll_back(self) -> bool:
        """See `UndoRecord.roll_back`: it cannot."""
        return False
