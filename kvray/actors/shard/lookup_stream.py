"""What one shard tells one partition of the lookup: announcements, in unbroken order."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from random import Random
from typing import Any

from kvray.actors.lookup.lookup import Announcement, Answer, packed_parts
from kvray.actors.shard.tier_delta import Entries
from kvray.errors import KVRayError, ShardUnavailable

_log = logging.getLogger("kvray.shard")

Announce = Callable[[Announcement], Answer | None]
"""Brings an announcement to a partition and returns the answer; None if that is still to come.

It waits for nothing. Called again with the same announcement, it looks for the answer again. Raises
KVRayError once there will be none.
"""

ANNOUNCED_MAX = 20_000  # keys in one announcement; the rest follows in the next
_LEAST_MAX = 128
_PIECE_S = 0.01
"""How long the lookup may work on one announcement: from others it has queries meanwhile."""
_FIRST_MAX = 500
"""Keys with which a full announcement begins: it may be told to wait, and to send it is cheap."""
_UNHEARD_S = 2.0
"""After so long a wait for an answer the lookup counts as one that does not answer."""
_PATIENCE_S = 30.0
"""How long an answer is waited for; the lookup takes nothing that is older. After each that did not
come it is twice as long: else a lookup that is slow enough would never get to anything in time."""
_PATIENCE_MAX_S = 480.0
_BACKOFF_S = 0.5
_BACKOFF_MAX_S = 4.0


_Ranks = tuple[list[tuple[str, int]], tuple[int, ...]]
"""(replica, rank) of those that are registered, and the namespaces that are here."""


class LookupStream:
    """One shard's announcements to one partition; no two methods run at once, but for `lag_s`.

    At most one announcement is under way. So the lookup works on one piece of each shard, and a
    late answer counts like any other. A shard repeats an announcement only if the lookup has lost
    it, or refuses it.
    """

    def __init__(
        self,
        shard: str,
        announce: Announce,
        held: Callable[[], Iterable[Entries]],
        *,
        what: str = "the lookup",
        names_ranks: bool = False,
        random: Random,
    ) -> None:
        """`held` returns all blocks for a full announcement.

        One partition `names_ranks`: only it is told of them and of namespaces.
        """
        self.num_shards = 0
        """Live shards of the tier, as this partition said last; 0 while it does not answer."""
        self.num_told = 0
        self.telling_s = 0.0
        self.is_leaving = False
        """Whether to say that the node is to go."""
        self.answers: list[Answer] = []
        """Those that nobody has read yet."""
        self._shard = shard
        self._announce = announce
        self._held = held
        self._what = what
        self._random = random
        self._arena_id = ""
        # (keys, parts, whether they were added); the lookup has all that came before.
        self._pending: deque[tuple[Any, Any, bool]] = deque()
        self._untold_since: float | None = None
        self._sequence = 0
        self._ranks: _Ranks | None = ([], ()) if names_ranks else None
        self._ranks_said: _Ranks | None = None
        self._lookup_epoch: str | None = None
        self._is_heard = True
        # An announcement whose answer is still to come, since when, and whether it is outdated.
        self._under_way: Announcement | None = None
        self._sent_at = 0.0
        self._is_outdated = False
        self._patience_s = _PATIENCE_S
        # Not before then; and whether the lookup hands out turns, and has to be asked for one.
        self._send_at = 0.0
        self._has_to_ask = False
        self._num_failures = 0
        # A repeated announcement still owes the lookup its end.
        self._owes_end = False
        self._keys_max = ANNOUNCED_MAX
        # An epoch of the lookup, and by how much its clock is ahead.
        self._lookup_clock: tuple[str, float] | None = None

    def lag_s(self, now: float) -> float:
        """Return the age of the oldest change that it was not told of; from any thread."""
        since = self._untold_since
        return 0.0 if since is None else now - since

    def start_over(self, arena_id: str) -> None:
        """Announce everything again, of the arena of that name."""
        self._arena_id, self._lookup_epoch, self._is_outdated = arena_id, None, True

    def name_ranks(self, ranks: list[tuple[str, int]], namespaces: tuple[int, ...]) -> None:
        """Have these ranks announced, each (replica, rank), and these namespaces."""
        self._ranks = ranks, namespaces

    def note(self, entries: Entries, added: bool) -> None:
        """Note blocks that came or went."""
        if not len(entries):
            return
        if self._untold_since is None:
            self._untold_since = time.monotonic()
        self._pending.append((entries.keys, entries.parts, added))

    @property
    def is_telling(self) -> bool:
        """Whether an answer is soon to come."""
        return self._under_way is not None and self._is_heard

    @property
    def is_eager(self) -> bool:
        """Whether to announce at once what there is; else the next heartbeat is early enough.

        While a partition does not answer, it is.
        """
        is_new = bool(self._pending) or self._owes_end or self._ranks != self._ranks_said
        may_send = self._is_heard and self._under_way is None and time.monotonic() >= self._send_at
        return may_send and (is_new or self._lookup_epoch is None)

    def send(self, shard_epoch: int) -> None:
        """Announce what was noted, or just a heartbeat; what fails is sent again later."""
        if self._under_way is None:
            if time.monotonic() < self._send_at:
                return
            # Never a number twice: one that seems lost may still arrive.
            self._sequence += 1
            self._is_outdated = False
            self._under_way = self._next(shard_epoch, full=self._lookup_epoch is None)
            self._sent_at = time.monotonic()
        self.hear()

    def hear(self) -> None:
        """Take the answer to what is under way, if it is there."""
        if self._under_way is None:
            return
        try:
            answer = self._announce(self._under_way)
            waited_s = time.monotonic() - self._sent_at
            if answer is None and waited_s > self._patience_s:
                patience_s = self._patience_s
                self._patience_s = min(2 * patience_s, _PATIENCE_MAX_S)
                raise ShardUnavailable(f"No answer within {patience_s:.0f} s; see `kvray status`.")
        except KVRayError as error:
            self._give_up(error)
            return
        if answer is None:
            if waited_s > _UNHEARD_S:
                self._note_unheard("it has not answered yet")
            return
        announcement, self._under_way = self._under_way, None
        self._take(announcement, answer)

    def _take(self, announcement: Announcement, answer: Answer) -> None:
        if not self._is_heard:
            _log.info("%s: %s answers again", self._shard, self._what)
        now = time.monotonic()
        self._is_heard, self._num_failures, self.num_shards = True, 0, answer.num_shards
        self._patience_s = _PATIENCE_S
        self._lookup_clock = answer.lookup_epoch, answer.now_s - now
        if answer.resync:
            self._lookup_epoch = None
            self._has_to_ask = answer.wait_s > 0
            self._send_at = now + answer.wait_s * self._random.uniform(0.75, 1.25)
            return
        full = announcement.full
        same = not self._is_outdated and (full or answer.lookup_epoch == self._lookup_epoch)
        self._lookup_epoch = answer.lookup_epoch if same else None
        if full and self._has_to_ask:
            # Only the turn was asked for, and here it is.
            self._has_to_ask = False
            self._note_all()
        self._owes_end = announcement.more
        self._fit_to(announcement, answer.took_s)
        self._note_told()
        self.answers.append(answer)
        if not self._pending and not self._owes_end:
            self._send_at = now + answer.pause_s * self._random.uniform(0.75, 1.25)
        if announcement.ranks is not None:
            self._ranks_said = announcement.ranks, announcement.namespaces

    def _give_up(self, error: KVRayError) -> None:
        """Announce everything again after a while: the last announcement may be lost."""
        self._note_unheard(str(error))
        self._under_way = self._lookup_epoch = None
        self._pending.clear()
        self._num_failures += 1
        if self._num_failures > 1:
            backoff_s = min(_BACKOFF_S * 2 ** min(self._num_failures - 2, 8), _BACKOFF_MAX_S)
            self._send_at = time.monotonic() + backoff_s * self._random.uniform(0.5, 1)

    def _note_unheard(self, why: str) -> None:
        if self._is_heard:
            _log.warning("%s: %s cannot be told: %s", self._shard, self._what, why)
        self._is_heard = False
        self.num_shards = 0

    def _fit_to(self, announcement: Announcement, took_s: float) -> None:
        """Have the next pieces be as large as the lookup takes in a moment."""
        num_keys = announcement.num_entries
        if took_s > _PIECE_S:
            fitting = max(_LEAST_MAX, int(num_keys * _PIECE_S / took_s))
            self._keys_max = min(self._keys_max, fitting)
        elif took_s < _PIECE_S / 2 and num_keys >= self._keys_max:
            self._keys_max *= 4

    def _note_all(self) -> None:
        self._pending.clear()
        for entries in self._held():
            self.note(entries, True)

    def _note_told(self) -> None:
        """The lookup has taken an announcement; the remaining changes are no older."""
        if self._untold_since is not None:
            self.num_told += 1
            self.telling_s += time.monotonic() - self._untold_since
            if not self._pending:
                self._untold_since = None

    def _next(self, shard_epoch: int, *, full: bool) -> Announcement:
        if full:
            self._keys_max = _FIRST_MAX  # the first piece shows how long a key takes
            if not self._has_to_ask:
                self._note_all()
            else:
                self._pending.clear()
        is_question, room = full and self._has_to_ask, min(self._keys_max, ANNOUNCED_MAX)
        keys_of: dict[bool, bytearray] = {True: bytearray(), False: bytearray()}
        parts_of: dict[bool, bytearray] = {True: bytearray(), False: bytearray()}
        while self._pending and room:
            keys, parts, added = self._pending[0]
            # Removals are applied first: an addition must not be overtaken by an older removal.
            if not added and parts_of[True]:
                break
            if len(keys) > room:
                self._pending[0] = keys[room:], parts[room:], added
            else:
                self._pending.popleft()
            keys_of[added].extend(keys[:room].tobytes())
            parts_of[added].extend(packed_parts(parts[:room]))
            room -= min(room, len(keys))
        says_ranks = self._ranks is not None and (full or self._ranks != self._ranks_said)
        ranks, namespaces = self._ranks if self._ranks and says_ranks else (None, ())
        return Announcement(
            shard=self._shard,
            arena_id=self._arena_id,
            shard_epoch=shard_epoch,
            sequence=self._sequence,
            full=full,
            added_keys=bytes(keys_of[True]),
            added_parts=bytes(parts_of[True]),
            removed_keys=bytes(keys_of[False]),
            removed_parts=bytes(parts_of[False]),
            more=is_question or bool(self._pending),
            ranks=ranks,
            namespaces=namespaces,
            is_leaving=self.is_leaving,
            until=self._deadline(),
        )

    def _deadline(self) -> tuple[str, float] | None:
        """Return when this shard gives up on what it announces now, by the lookup's clock."""
        if self._lookup_clock is None:
            return None
        epoch, ahead_s = self._lookup_clock
        return epoch, time.monotonic() + ahead_s + self._patience_s
