"""What ranks hold: copies of leased blocks in memory of their own, checked before the promise.

Nobody else can write that memory. So what was valid when it was checked is what the pass gets, and
neither a flipped bit of the arena nor a lost lease is met after the promise. vLLM is promised only
what every rank holds, so no load can fail.

`HeldBlocks` is a rank's end; `Holds`, which is pure, is what the scheduler's half knows of them.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from kvray.engine.cache_layout import Part
from kvray.engine.device.gpu import Pool
from kvray.engine.device.pool import Load, Ticket
from kvray.engine.meta import PageIds, Place
from kvray.engine.shared_state import SharedState
from kvray.errors import LayoutMismatch, LeaseExpired
from kvray.store.arena.tables import Array

_CLOSE_S = 0.3
"""What an end waits here for one copy: with the two seconds of the tier's end nobody notices it."""


class Hold(NamedTuple):
    """Leased blocks that every rank is to hold, and to answer for."""

    hold_id: int  # never given twice
    leased: tuple[Place, ...]  # each rank ends its lease when it has copied
    first: int  # the first block to hold, counted from the root of the prefix
    stop: int

    @property
    def num_blocks(self) -> int:
        """How many blocks each rank is to hold."""
        return self.stop - self.first


class HeldLoad(NamedTuple):
    """Held blocks to be copied into the pool before the pass; the hold is over then."""

    hold_id: int
    skip: int  # leading blocks of the hold that vLLM has itself
    pages: PageIds


@dataclass(slots=True, kw_only=True, eq=False)
class Asked:
    """Blocks of one request that every rank is to hold."""

    hold: Hold
    num_valid: int
    """Leading blocks of it that all ranks which have answered hold."""
    num_silent: int  # ranks that have not answered
    is_over: bool = False  # it is loaded, or nobody wants it any more

    @property
    def is_answered(self) -> bool:
        """Whether every rank holds what it can."""
        return not self.num_silent

    @property
    def end(self) -> int:
        """Where the held blocks end, counted from the root of the prompt."""
        return self.hold.first + self.num_valid


class Holds:
    """All holds of one engine; used by the thread of vLLM's scheduler.

    Ranks keep what they hold in memory of a fixed size, which this counts for them: they can take
    whatever it lets them be asked for.
    """

    def __init__(self, *, num_ranks: int, num_blocks: int) -> None:
        """Each of `num_ranks` ranks has room for `num_blocks` blocks."""
        self.capacity = self.room = num_blocks
        self._num_ranks = num_ranks
        self._ids = count()
        self._asked: dict[int, Asked] = {}
        """Those that take room, by their id."""
        self._unsent: list[Hold] = []
        self._drops: list[int] = []

    def begin(self, leased: tuple[Place, ...], *, first: int, stop: int) -> Asked | None:
        """Have leased blocks held from the coming pass on; None: there is no room for so many."""
        hold = Hold(next(self._ids), leased, first, stop)
        if hold.num_blocks > self.room:
            return None
        asked = Asked(hold=hold, num_valid=hold.num_blocks, num_silent=self._num_ranks)
        self._asked[hold.hold_id] = asked
        self._unsent.append(hold)
        self.room -= hold.num_blocks
        return asked

    def take_answers(self, num_valid: Mapping[int, int], num_ranks: Mapping[int, int]) -> None:
        """Take answers: hold -> its leading blocks that `num_ranks` more ranks hold."""
        for hold_id, valid in num_valid.items():
            asked = self._asked[hold_id]
            asked.num_silent -= num_ranks[hold_id]
            asked.num_valid = min(asked.num_valid, valid)
            self._make_room(asked)

    def drop(self, asked: Asked) -> None:
        """Have the ranks let go of a hold that is not loaded; whoever leased its blocks ends that.

        Its room comes back once no rank copies into it.
        """
        asked.is_over = True
        if asked.hold in self._unsent:
            self._unsent.remove(asked.hold)
            asked.num_silent = 0
        else:
            self._drops.append(asked.hold.hold_id)
        self._make_room(asked)

    def loaded(self, asked: Asked) -> None:
        """Note that the coming pass loads from a hold, which ends it."""
        asked.is_over = True
        self._make_room(asked)

    def take(self) -> tuple[tuple[Hold, ...], tuple[int, ...]]:
        """Return what goes to the ranks with the coming pass: new holds, and dropped ones."""
        sent = tuple(self._unsent), tuple(self._drops)
        self._unsent, self._drops = [], []
        return sent

    def _make_room(self, asked: Asked) -> None:
        if asked.is_over and asked.is_answered:
            del self._asked[asked.hold.hold_id]
            self.room += asked.hold.num_blocks


@dataclass(slots=True, kw_only=True)
class _Held:
    hold: Hold
    rows: Array  # of the memory, one a block
    is_ours: bool
    """Whether its blocks are of this rank's pool."""
    num_valid: int | None = None  # None: it is being copied
    is_dropped: bool = False


class HeldBlocks:
    """One rank's; used by the thread that runs the model.

    A thread of its own copies. What crosses: a hold that is to be copied, whose rows are that
    thread's until it comes back, and how many of its blocks are valid.
    """

    def __init__(self, shared: SharedState, pool: Pool, part: Part, *, num_blocks: int) -> None:
        """Have room for `num_blocks` blocks of the rank's part."""
        self._shared = shared
        self._pool = pool
        self._part = part
        self._rows = pool.make_room(num_blocks * part.block_bytes).reshape(num_blocks, -1)
        self._free = list(range(num_blocks))
        """Rows, the last of them used next: what was touched is used again first."""
        self._free.reverse()
        self._held: dict[int, _Held] = {}
        self._landing: list[tuple[Ticket, Array]] = []
        self._wanted: SimpleQueue[_Held | None] = SimpleQueue()
        self._copied: SimpleQueue[tuple[int, int]] = SimpleQueue()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="kvray-hold", daemon=True)
        self._thread.start()

    def begin(self, holds: Sequence[Hold], drops: Sequence[int], *, are_ours: bool) -> None:
        """Begin to hold blocks, and let go of others; the scheduler's half knows what fits.

        `are_ours`: the blocks are of this rank's pool; of others it holds none.
        """
        for hold_id in drops:
            self._held[hold_id].is_dropped = True
            self._let_go(hold_id)
        for hold in holds:
            rows = self._take_rows(hold.num_blocks)
            self._held[hold.hold_id] = _Held(hold=hold, rows=rows, is_ours=are_ours)
            self._wanted.put(self._held[hold.hold_id])

    def answers(self) -> dict[int, int]:
        """Return hold -> how many of its first blocks are held, of those copied since last time."""
        found: dict[int, int] = {}
        while not self._copied.empty():
            hold_id, num_valid = self._copied.get()
            found[hold_id] = self._held[hold_id].num_valid = num_valid
            self._let_go(hold_id)
        return found

    def load(self, one: HeldLoad, stream: Any) -> None:
        """Copy held blocks to their pages, which the pass of `stream` waits for; ends the hold.

        LeaseExpired: they are not held. The pass counts on them, so the engine must not go on.
        """
        held, count = self._held.pop(one.hold_id, None), one.pages.num_blocks
        if held is None or one.skip + count > (held.num_valid or 0):
            raise LeaseExpired(
                f"The scheduler has promised {count} blocks that this rank does not hold; report"
                " this with vLLM's version."
            )
        rows = held.rows[one.skip : one.skip + count]
        ticket = self._pool.load_held(self._rows, Load(self._part, rows, one.pages.ids()), stream)
        self._landing.append((ticket, held.rows))
        self._shared.figures.totals["loaded_blocks"] += count

    def close(self) -> None:
        """End the thread after its present copy. Twice is fine.

        Leases of what it has not copied end with this process's place in the arena.
        """
        self._is_closing = True
        self._wanted.put(None)
        self._thread.join(_CLOSE_S)

    def _let_go(self, hold_id: int) -> None:
        """Take the rows of a hold back, once it is dropped and no longer being copied."""
        held = self._held[hold_id]
        if held.is_dropped and held.num_valid is not None:
            self._free += reversed(self._held.pop(hold_id).rows.tolist())

    def _take_rows(self, count: int) -> Array:
        while self._landing and (len(self._free) < count or self._landing[0][0].done()):
            ticket, rows = self._landing.pop(0)
            ticket.wait()
            self._free += reversed(rows.tolist())
        assert count <= len(self._free), "the scheduler's half counts as this one does"
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return np.array(taken[::-1], dtype=np.int64)

    def _run(self) -> None:
        while (held := self._wanted.get()) is not None:
            num_valid = 0
            if not (held.is_dropped or self._is_closing):
                with self._shared.boundary.around("a load"):
                    num_valid = self._copy(held)
            self._copied.put((held.hold.hold_id, num_valid))

    def _copy(self, held: _Held) -> int:
        """Copy a hold's blocks; return how many of the first are valid. Its lease ends."""
        hold = held.hold
        arena_id, lease = hold.leased[self._shared.args.part_rank]
        arena = self._shared.link.arena_named(arena_id)
        if arena is None:
            raise LeaseExpired(f"Arena {arena_id}, of which blocks were leased, is gone.")
        try:
            if not held.is_ours:
                raise LayoutMismatch(
                    "The leader leased blocks of another namespace than this rank's pool; give"
                    " every rank the same engine arguments."
                )
            places = slice(hold.first, hold.stop)
            valid = arena.read_valid(lease, places, self._rows, held.rows)
        finally:
            self._shared.release_leases(arena, lease)
        return len(valid) if valid.all() else int(valid.argmin())
