"""The prompts that used blocks, with a sample of their blocks that shows which ones return.

A few blocks of every prompt are watched, whether they stay in a tier or not. When a later prompt
uses one, it has returned, at an age that is the time since. From that `hazard` learns what blocks
are worth, by the turn of their conversation, the length of their prompt, how much of it was new,
and their own kind. The prompts seen so far, cut into equal shares, give
the classes of length; no length is written down here.
"""

import math

import numpy as np

from kvray.store.arena.layout import Array
from kvray.store.policy import hazard

TRUNK, OWN, LAST = range(3)
"""Kinds of blocks: shared by several conversations, of one, and the end of its prompt."""

WATCHED_MAX = 4
"""Blocks of one prompt that are watched at a time."""

_NONE = -1
_PROMPTS = 2**16
"""Prompts that are remembered."""
_TURNS = np.array([0, 1, 2, 3, 3, 4])
"""Turn -> its class; the last one for all later turns."""
_LENGTHS, _NEWS = 3, 2
"""Classes of length, and of new blocks."""
_FACTORS = (int(_TURNS[-1]) + 1, _LENGTHS, _NEWS, 3)
_LEARN_FIRST = 64
_LEARN_MOST = 512
_LEARN_SHARE = 0.05
"""Prompts from one lesson to the next: a share of those seen, within the bounds above."""


class Prompts:
    """Prompts by number, which only grows; single-threaded, no clock."""

    def __init__(self) -> None:
        self._count = 0
        self._time = np.zeros(_PROMPTS)
        columns = np.zeros((5, _PROMPTS), dtype=np.int64)
        self._turn, self._length, self._num_stored, self._num_new, self._class = columns
        # Of the blocks of each prompt that are watched: hits (_NONE: none is), depth, and after
        # how long it returned.
        self._hits = np.full((_PROMPTS, WATCHED_MAX), _NONE, dtype=np.int64)
        self._depth = np.zeros((_PROMPTS, WATCHED_MAX), dtype=np.int64)
        self._returned = np.full((_PROMPTS, WATCHED_MAX), np.inf)
        # Name -> the prompt that watches it, and in which place; name -> the prompt near whose end
        # it stands. And what a prompt has in these two.
        self._watchers: dict[int, tuple[int, int]] = {}
        self._ends: dict[int, int] = {}
        self._names: dict[int, list[int]] = {}
        # Prompts whose class is to be worked out again.
        self._changed: list[int] = []
        self._cuts = np.zeros(_LENGTHS - 1), np.zeros(_NEWS - 1)
        # Worth and chance by class and age; None before the first lesson.
        self._tables: tuple[Array, Array] | None = None
        self._learn_at = _LEARN_FIRST

    def begin(self, *, now: float) -> int:
        """Enter a prompt; return its number."""
        if self._count >= self._learn_at:
            self._learn(now)
        number, row = self._count, self._count % _PROMPTS
        self._count += 1
        if number >= _PROMPTS:
            self._forget(number - _PROMPTS)
            for column in (self._turn, self._length, self._num_stored, self._num_new, self._class):
                column[row] = 0
            self._hits[row] = _NONE
        self._time[row] = now
        return number

    def number_of(self, low_half: int) -> int:
        """Return the youngest prompt's number of that low half."""
        return self._count - low(self._count - low_half)

    def num_stored(self, number: int) -> int:
        """Return how many leading blocks of a prompt have been found or stored; -1: forgotten."""
        if number < self._count - _PROMPTS:
            return -1
        return int(self._num_stored[number % _PROMPTS])

    def use(self, number: int, names: list[int], *, now: float) -> int:
        """Note that a prompt uses blocks: the watched ones have returned.

        Returns how many leading ones of `names` are known to have been used before.
        """
        num_known = 0
        for name in self._watchers.keys() & names:
            watcher, place = self._watchers.pop(name)
            row = watcher % _PROMPTS
            self._returned[row, place] = now - self._time[row]
            num_known = max(num_known, names.index(name) + 1)
        for name in self._ends.keys() & names:
            row, before = number % _PROMPTS, self._ends[name] % _PROMPTS
            self._turn[row] = max(self._turn[row], self._turn[before] + 1)
            num_known = max(num_known, names.index(name) + 1)
        return num_known

    def measure(self, number: int, *, length: int, num_stored: int, num_new: int) -> None:
        """Note a prompt's blocks: all, those in the tier, and those that nobody knew."""
        row = number % _PROMPTS
        self._length[row] = max(length, self._length[row])
        self._num_stored[row], self._num_new[row] = num_stored, num_new
        self._changed.append(row)

    def watch(self, number: int, place: int, name: int, *, hits: int, depth: int) -> None:
        """Watch the block `name` of a prompt in place of the one in `place`, below WATCHED_MAX.

        It was found `hits` times before, and its place in the prompt is `depth`. If it is watched
        in another place, that ends.
        """
        row = number % _PROMPTS
        for before in self._names.get(number, ()):
            if self._watchers.get(before) == (number, place):
                del self._watchers[before]
        watcher, other = self._watchers.get(name, (_NONE, 0))
        if watcher == number:  # of two, one would never be seen to return
            self._hits[row, other] = _NONE
        self._watchers[name] = number, place
        self._names.setdefault(number, []).append(name)
        self._hits[row, place], self._depth[row, place] = hits, depth
        self._returned[row, place] = math.inf

    def end(self, number: int, name: int) -> None:
        """Note the block whose use shows that a prompt goes on with this one."""
        for before in self._names.get(number, ()):
            if self._ends.get(before) == number:
                del self._ends[before]
        self._ends[name] = number
        self._names.setdefault(number, []).append(name)

    def worth(self, numbers: Array, depths: Array, hits: Array, *, now: float) -> Array:
        """Return the worth of blocks, hits a second, f8; before the first lesson, their youth.

        `numbers` are the `low` halves of those of the prompts that used them last, `depths` their
        places there, and `hits` how often each was found since it was stored.
        """
        if self._tables is None:
            return self._time.take(numbers % _PROMPTS) - now
        return self._at(self._tables[0], numbers, depths, hits, now)

    def chance(self, numbers: Array, depths: Array, hits: Array, *, now: float) -> Array:
        """Return the probability of another use; 1 before the first lesson. As `worth`."""
        if self._tables is None:
            return np.ones(len(numbers))
        return self._at(self._tables[1], numbers, depths, hits, now)

    def _at(self, table: Array, numbers: Array, depths: Array, hits: Array, now: float) -> Array:
        """Return a table's values for blocks; 0 for those of forgotten prompts."""
        rows = (numbers % _PROMPTS).astype(np.int64)
        seconds = now - self._time.take(rows)
        found = hazard.at(table, self._classes(rows, depths, hits), seconds)
        found[np.uint32(low(self._count)) - numbers >= _PROMPTS] = 0.0
        return found

    def _learn(self, now: float) -> None:
        step = min(int(_LEARN_SHARE * self._count), _LEARN_MOST)
        self._learn_at = self._count + max(_LEARN_FIRST, step)
        rows = np.arange(min(self._count, _PROMPTS))
        self._cuts = _cuts(self._length[rows], _LENGTHS), _cuts(self._num_new[rows], _NEWS)
        self._classify(rows)
        self._changed.clear()
        row, place = np.nonzero(self._hits[rows] != _NONE)
        returned = self._returned[row, place]
        rates = hazard.rates_of(
            self._classes(row, self._depth[row, place], self._hits[row, place]),
            np.minimum(returned, now - self._time[row]),
            np.isfinite(returned),
            factors=_FACTORS,
        )
        self._tables = hazard.worth_of(rates), hazard.chance_of(rates)

    def _classify(self, rows: Array) -> None:
        lengths, news = self._cuts
        turn = _TURNS[np.minimum(self._turn[rows], len(_TURNS) - 1)]
        length = np.searchsorted(lengths, self._length[rows])
        new = np.searchsorted(news, self._num_new[rows])
        self._class[rows] = (turn * _LENGTHS + length) * _NEWS + new

    def _classes(self, rows: Array, depths: Array, hits: Array) -> Array:
        if self._changed:
            self._classify(np.array(self._changed))
            self._changed.clear()
        # The next turn of a conversation finds its blocks once more; other prompts add to that.
        kinds = np.where(hits > self._turn.take(rows), TRUNK, OWN)
        kinds[depths == self._length.take(rows) - 1] = LAST
        classes: Array = self._class.take(rows) * _FACTORS[-1] + kinds
        return classes

    def _forget(self, number: int) -> None:
        for name in self._names.pop(number, ()):
            if self._watchers.get(name, (_NONE, 0))[0] == number:
                del self._watchers[name]
            if self._ends.get(name) == number:
                del self._ends[name]


def low(number: int) -> int:
    """Return the low half of a number, which a block has: no prompt is remembered that long."""
    return number % 2**32


def _cuts(values: Array, classes: int) -> Array:
    """Return where `values` part into so many equal shares."""
    cuts: Array = np.quantile(values, np.arange(1, classes) / classes)
    return cuts
