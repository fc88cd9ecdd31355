"""What the scheduler's half knows of the holds of its ranks; pure."""

from dataclasses import dataclass
from itertools import count

from kvray.engine.meta import RankLeases
from kvray.vllm.metadata import Hold, HoldAnswers


@dataclass(slots=True, kw_only=True, eq=False)
class Asked:
    """Blocks of one request that every rank is to hold."""

    hold: Hold
    num_sound: int
    """Leading blocks of it that all ranks which have answered hold."""
    num_silent: int  # ranks that have not answered
    is_sent: bool = False
    is_over: bool = False  # it is loaded, or nobody wants it any more

    @property
    def is_answered(self) -> bool:
        """Whether every rank holds what it can."""
        return not self.num_silent

    @property
    def end(self) -> int:
        """Where the held blocks end, counted from the root of the prompt."""
        return self.hold.first + self.num_sound


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

    def begin(self, leased: RankLeases, *, first: int, stop: int) -> Asked | None:
        """Have leased blocks held from the coming pass on; None: there is no room for so many."""
        if stop - first > self.room:
            return None
        hold = Hold(next(self._ids), leased, first, stop)
        asked = Asked(hold=hold, num_sound=stop - first, num_silent=self._num_ranks)
        self._asked[hold.hold_id] = asked
        self._unsent.append(hold)
        self.room -= stop - first
        return asked

    def hear(self, answers: HoldAnswers) -> None:
        """Take what ranks have answered."""
        for hold_id, num_sound in answers.num_sound.items():
            asked = self._asked[hold_id]
            asked.num_silent -= answers.num_ranks[hold_id]
            asked.num_sound = min(asked.num_sound, num_sound)
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
            self.room += asked.hold.stop - asked.hold.first
