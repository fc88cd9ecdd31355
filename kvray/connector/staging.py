"""Blocks of other nodes: when the shard is asked for them, and what its answers are good for.

The engine's executor thread waits for an answer, so a request costs at most `stage_wait_s` of it,
however often it is asked about. A prompt of which nobody stores more costs one short call; the
key of its first missing block is remembered for `_ABSENT_S`, in which an engine that is full asks
about the same waiting requests in every pass. It is not remembered for longer, because a prompt
that several nodes get at once is soon stored by one of them.
"""

import time
from collections import OrderedDict
from collections.abc import Hashable
from typing import TypeVar

from kvray.block import BlockKey
from kvray.connector.engine import Engine, release_leases
from kvray.connector.matching import Matched, match
from kvray.node import StageCalls, Staged
from kvray.node.stage_calls import NOT_STORED, STORE_DOWN, TOO_SLOW

_ABSENT_S = 1.0
_REMEMBERED_MAX = 8192
_WORTH_S = 0.005
"""With less than this left of its time a request is not asked about again."""
_MISSING = (NOT_STORED, "corrupt")
"""Reasons of a local match that another node may know better."""

K = TypeVar("K", bound=Hashable)


class Staging:
    """What one leader asks of its shard; used by the engine's executor thread."""

    def __init__(self) -> None:
        """Start without a connection: most engines have no other nodes."""
        self._calls: StageCalls | None = None
        self._waited: OrderedDict[int, float] = OrderedDict()
        """Request -> seconds that it has cost."""
        self._absent: OrderedDict[BlockKey, float] = OrderedDict()
        """Key that no node had -> until when that is taken for granted."""

    def extend(
        self,
        engine: Engine,
        request_id: int,
        keys: list[BlockKey],
        first: int,
        matched: Matched | None,
        reason: str,
        *,
        tokens_per_s: float,
    ) -> tuple[Matched | None, str]:
        """Have what follows a local match brought here, and lease it.

        Args:
            engine: the leader's.
            request_id: of the prompt.
            keys: of the prompt, as far as it may be promised.
            first: blocks that the engine has itself.
            matched: what is leased already; owned by this call.
            reason: why it is not more.
            tokens_per_s: the engine's own speed; 0: not known.

        Returns:
            What is leased now, no less than `matched`; and why it is not more.
        """
        have = matched.end if matched else 0
        if reason not in _MISSING or not engine.asks_peers or len(keys) <= max(have, first):
            return matched, reason
        try:
            staged = self._ask(engine, request_id, keys, have, tokens_per_s)
            if staged.num_blocks <= max(have, first):
                return matched, _reason(reason, staged)
            more, reason = match(engine, keys, first, sound=have)
        except BaseException:
            _release(engine, matched)
            raise
        if more is None or more.end <= max(have, first):
            _release(engine, more)
            return matched, _reason(reason, staged)
        _release(engine, matched)
        gained = more.end - max(have, first)
        engine.totals["staged_tokens"] += gained * engine.args.tokens_per_block
        return more, _reason(reason, staged)

    def forget(self, request_id: int) -> None:
        """The request has ended."""
        self._waited.pop(request_id, None)

    def close(self) -> None:
        """Hang up. Twice is fine."""
        if self._calls is not None:
            self._calls.close()

    def _ask(
        self,
        engine: Engine,
        request_id: int,
        keys: list[BlockKey],
        have: int,
        tokens_per_s: float,
    ) -> Staged:
        """Ask the shard, unless the answer is known or would come too late."""
        began = time.monotonic()
        wait_s = engine.config.connector.stage_wait_s
        left_s = wait_s - self._waited.get(request_id, 0.0)
        if began < self._absent.get(keys[have], 0.0):
            return Staged(num_blocks=0, reason=NOT_STORED)
        if left_s < min(wait_s, _WORTH_S):
            return Staged(num_blocks=0, reason=TOO_SLOW)
        if self._calls is None:
            self._calls = StageCalls(engine.link.directory)
        if not self._calls.can_ask:
            return Staged(num_blocks=0, reason=STORE_DOWN)
        staged = self._calls.stage(
            keys,
            replica=engine.replica,
            rank=engine.args.rank,
            wait_s=left_s,
            tokens_per_s=tokens_per_s,
        )
        ended = time.monotonic()
        engine.totals["stage_calls"] += 1
        engine.totals["stage_wait_us"] += int(1e6 * (ended - began))
        _remember(self._waited, request_id, self._waited.get(request_id, 0.0) + ended - began)
        if staged.num_blocks <= have and staged.reason == NOT_STORED:
            _remember(self._absent, keys[have], ended + _ABSENT_S)
        return staged


def _reason(local: str, staged: Staged) -> str:
    """Return why there is not more: what the other nodes know, unless it is known here."""
    return staged.reason if local == NOT_STORED and staged.reason != "none" else local


def _release(engine: Engine, matched: Matched | None) -> None:
    if matched is not None:
        release_leases(engine, matched.arena, *matched.held.leases)


def _remember(known: OrderedDict[K, float], key: K, value: float) -> None:
    known[key] = value
    known.move_to_end(key)
    if len(known) > _REMEMBERED_MAX:
        known.popitem(last=False)
