"""A publisher's batches in order, whatever is lost, repeated or begun again on the way; pure.

The caller hands over what it receives, and asks for a replay from `replay_from` when that is a
number. Each question begins with the last batch that is known: if the publisher has another one
there, it has restarted, and all is asked again.
"""

from collections import deque

from xxhash import xxh3_64_intdigest

from kvray.errors import TransferError
from kvray.events.message import AllBlocksCleared, Batch, unpack
from kvray.events.pool_content import PoolContent

_FAILURES_MAX = 3
"""Replays in a row that break off before what is missing counts as lost."""


class Reception:
    """What one publisher has sent, applied to a `PoolContent`."""

    def __init__(
        self, content: PoolContent, *, can_replay: bool, pending_max: int, pending_bytes: int
    ) -> None:
        """Begin with a question for all, where the publisher answers such.

        So many batches, of so many bytes, may wait for the end of a replay; of more the oldest are
        lost.
        """
        self.content = content
        self.num_applied = 0
        self.num_gaps = 0
        self.num_lost = 0
        """Gaps that no replay filled: the content began again without what was before."""
        self._can_replay = can_replay
        self._next = 0
        self._last: int | None = None
        """Digest of the batch before `_next`; None: there is none, or it is not known."""
        self._pending: deque[tuple[int, bytes]] = deque()
        self._pending_size = 0
        self._pending_max, self._pending_bytes = pending_max, pending_bytes
        self._is_due = can_replay
        self._is_replaying = False
        self._failures = 0
        self._may_be_other = False
        """Whether the connection was lost and no replay has shown since who is there."""
        # Of the replay under way: whether it has brought nothing yet, whether it stores everything
        # again, with any numbers, whether the publisher has restarted, and what it had sent before.
        self._is_first = True
        self._is_snapshot = False
        self._is_other = False
        self._known = -1

    @property
    def replay_from(self) -> int | None:
        """The first number to ask for; None: there is nothing to ask now."""
        if not self._is_due or self._is_replaying:
            return None
        return max(0, self._next - 1)

    def live(self, number: int, payload: bytes) -> None:
        """Take a batch as it was published."""
        if self._is_due or self._is_replaying:
            self._wait(number, payload)
        elif number == self._next:
            self._apply(number, payload, _read(payload))
        elif self._can_replay:
            self.num_gaps += number > self._next
            self._is_due = True
            self._wait(number, payload)
        else:
            self.num_gaps += number > self._next > 0
            self._lose(number, payload, _read(payload))

    def interrupted(self) -> None:
        """Note that the connection was lost: the publisher may be another one when it is back."""
        self._drop_pending()
        if self._is_replaying:
            self._is_other = True
            return
        self._may_be_other = True
        self.check()
        if self._last is None or not self._can_replay:  # there is nothing to tell it by
            self._forget()

    def check(self) -> None:
        """Have the publisher asked whether the last batch known is its last."""
        self._is_due = self._can_replay

    def replay_begun(self) -> None:
        """Note that `replay_from` was asked for."""
        self._is_due, self._is_replaying = False, True
        self._is_first, self._is_snapshot, self._is_other = True, False, False
        self._known = self._pending[-1][0] if self._pending else -1

    def replayed(self, number: int, payload: bytes) -> None:
        """Take a batch of a replay."""
        if number < 0 or self._is_other:
            return  # the first is a header, which some publishers send before a snapshot
        is_first, self._is_first = self._is_first, False
        batch = _read(payload)
        begins = batch is not None and isinstance(next(iter(batch.events), None), AllBlocksCleared)
        if is_first:
            if number == self._next - 1 and self._last == xxh3_64_intdigest(payload):
                return
            self._is_snapshot = begins
            self._is_other = not begins and number == self._next - 1 and self._last is not None
        if self._is_other:
            return
        is_next = number == self._next and not is_first
        if self._is_snapshot or is_next or (begins and number >= self._next):
            self._apply(number, payload, batch)
            if self._is_snapshot:
                self._last = None  # its batches are others than those that had these numbers
        elif number >= self._next:
            self._lose(number, payload, batch)

    def replay_over(self) -> None:
        """Note a replay's end, and take what came meanwhile."""
        self._is_replaying, self._failures, self._may_be_other = False, 0, False
        if self._is_other or (self._is_first and self._next > 0):
            self._begin_again()
        if not self._is_due:
            self._take_pending()

    def replay_failed(self) -> None:
        """Note that a replay broke off or could not begin; it is asked for again, a few times.

        Then nobody knows what the content of a publisher that may be another one is worth.
        """
        if not (self._is_due or self._is_replaying):
            return
        self._is_replaying, self._is_due = False, True
        if self._is_other:
            self._begin_again()
        self._failures += 1
        if self._failures >= _FAILURES_MAX:
            if self._may_be_other:
                self._forget()
            self.replay_begun()
            self._is_first = False
            self.replay_over()

    def _wait(self, number: int, payload: bytes) -> None:
        if self._pending and number <= self._pending[-1][0]:
            self._drop_pending()  # those before are of a publisher that has ended
        self._pending.append((number, payload))
        self._pending_size += len(payload)
        while len(self._pending) > self._pending_max or self._pending_size > self._pending_bytes:
            self._pop_pending()

    def _pop_pending(self) -> tuple[int, bytes]:
        number, payload = self._pending.popleft()
        self._pending_size -= len(payload)
        return number, payload

    def _drop_pending(self) -> None:
        self._pending.clear()
        self._pending_size = 0

    def _take_pending(self) -> None:
        while self._pending:
            number, payload = self._pending[0]
            if number > max(self._next, self._known):
                self._is_due = True  # a gap that the publisher has not been asked about
                return
            self._pop_pending()
            if number == self._next:
                self._apply(number, payload, _read(payload))
            elif number > self._next:
                self._lose(number, payload, _read(payload))

    def _lose(self, number: int, payload: bytes, batch: Batch | None) -> None:
        """Begin again with this batch; what was before is not known."""
        self.num_lost += self._next > 0
        self._forget()
        self._apply(number, payload, batch)

    def _begin_again(self) -> None:
        """Ask a restarted publisher for all: the answer has what waits, or it is of before."""
        self._drop_pending()
        self._forget()
        self._is_due = True

    def _forget(self) -> None:
        self.content.clear()
        self._next, self._last = 0, None

    def _apply(self, number: int, payload: bytes, batch: Batch | None) -> None:
        if number == 0:  # a publisher's beginning
            self.content.clear()
            self.content.is_whole = True
        self._next, self._last = number + 1, xxh3_64_intdigest(payload)
        self.num_applied += 1
        if batch is None:
            self.content.is_whole = False
        else:
            self.content.apply(batch)


def _read(payload: bytes) -> Batch | None:
    """Return a batch; None if it is in no form that is read."""
    try:
        return unpack(payload)
    except TransferError:
        return None
