"""What the scheduler's half knows of what its ranks hold; pure.

A rank *holds* blocks: it copies them from the arena into memory of its own and checks the copies.
vLLM is promised only what every rank holds, so no load can fail.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from kvray.engine.meta import PageIds, Place


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

    def hear(self, num_valid: Mapping[int, int], num_ranks: Mapping[int, int]) -> None:
        """Take answers: hold -> its leading blocks that `num_ranks` more ranks hold soundly."""
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
        """Return what the ranks are told with the coming pass: new holds, and dropped ones."""
        told = tuple(self._unsent), tuple(self._drops)
        self._unsent, self._drops = [], []
        return told

    def _make_room(self, asked: Asked) -> None:
        if asked.is_over and asked.is_answered:
            del self._asked[asked.hold.hold_id]
            self.room += asked.hold.num_blocks
