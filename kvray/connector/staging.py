"""Blocks of other nodes: when the shard is asked for them, and what its answers are good for.

The engine's executor thread waits for an answer, so a request costs at most `stage_wait_s` of it,
however often it is asked about. A prompt of which nobody stores more costs one short call; the
key of its first missing block is remembered for `_ABSENT_S`, in which an engine that is full asks
about the same waiting requests in every pass. It is not remembered for longer, because a prompt
that several nodes get at once is soon stored by one of them.

The ranks of one engine may be on several nodes. Then nothing is promised without the shard, which
has every other node lease the same blocks in its ranks' names: the leader cannot look there.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import replace
from typing import TypeVar

from kvray.arrival import Arrivals, joined
from kvray.block import BlockKey
from kvray.connector.engine import Engine, release_away, release_prefix
from kvray.connector.matching import Matched, lease_exactly, match, refuse
from kvray.connector.prefix import Prefix
from kvray.node import StageCalls, Staged
from kvray.node.stage_calls import NOT_STORED, STORE_DOWN, TOO_SLOW

_log = logging.getLogger("kvray.connector")

_ABSENT_S = 1.0
_REMEMBERED_MAX = 8192
_WORTH_S = 0.005
"""With less than this left of its time a request is not asked about again."""
_MISSING = (NOT_STORED, "corrupt")
"""Reasons of a local match that another node may know better."""

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Staging:
    """What one leader asks of its shard; used by the engine's executor thread."""

    def __init__(self) -> None:
        """Start without a connection: most engines have no other nodes."""
        self._calls: StageCalls | None = None
        self._waited: OrderedDict[int, float] = OrderedDict()
        """Request -> seconds that it has cost."""
        self._absent: OrderedDict[BlockKey, float] = OrderedDict()
        """Key that no node had -> until when that is taken for granted."""
        self._arrivals: OrderedDict[int, Arrivals] = OrderedDict()
        """Request -> how its blocks came, if they were brought for it."""

    def match(
        self,
        engine: Engine,
        request_id: int,
        keys: list[BlockKey],
        first: int,
        *,
        tokens_per_s: float,
    ) -> tuple[Matched | None, str]:
        """Lease what of `keys` is here, or can be had in time from other nodes, for every rank.

        Args:
            engine: the leader's.
            request_id: of the prompt.
            keys: of the prompt, as far as it may be promised.
            first: blocks that the engine has itself.
            tokens_per_s: the engine's own speed; 0: not known.

        Returns:
            What was leased, which the caller must release; and why what follows it is missing.
        """
        refusal = refuse(engine, keys, first)
        if refusal is not None:
            return None, refusal
        if engine.spans_nodes:
            matched, reason = self._match_across(engine, request_id, keys, first, tokens_per_s)
        else:
            matched, reason = self._match_here(engine, request_id, keys, first, tokens_per_s)
        arrivals = self._arrivals.get(request_id)
        if matched is not None and arrivals:
            matched = replace(matched, arrivals=arrivals)
        return matched, reason

    def _match_here(
        self,
        engine: Engine,
        request_id: int,
        keys: list[BlockKey],
        first: int,
        tokens_per_s: float,
    ) -> tuple[Matched | None, str]:
        """Lease what this node has, or can be brought to it, for ranks that are all here."""
        matched, reason = match(engine, keys, first)
        have = matched.end if matched else 0
        if reason not in _MISSING or not engine.asks_peers or len(keys) <= max(have, first):
            return matched, reason
        try:
            staged = self._ask(engine, request_id, keys, have, tokens_per_s)
            if staged.leases:
                return self._find_spread(engine, matched, staged)
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

    def narrowed(self, engine: Engine, prefix: Prefix, keys: list[BlockKey]) -> Prefix | None:
        """Lease exactly `keys`, the first of those of `prefix`; None if they cannot be had."""
        if not prefix.away:
            return lease_exactly(engine, prefix.arena, keys)
        staged = self._stage(engine, keys, engine.config.connector.stage_wait_s, 0.0, None)
        if staged.num_blocks < len(keys):
            release_away(engine, staged.leases)
            return None
        matched, _ = _take(engine, keys, len(keys), staged)
        return None if matched is None else matched.prefix

    def waited_s(self, request_id: int) -> float:
        """Return how long a request has waited for the shard so far."""
        return self._waited.get(request_id, 0.0)

    def forget(self, request_id: int) -> None:
        """The request has ended."""
        self._waited.pop(request_id, None)
        self._arrivals.pop(request_id, None)

    def close(self) -> None:
        """Hang up. Twice is fine."""
        if self._calls is not None:
            self._calls.close()

    def _match_across(
        self,
        engine: Engine,
        request_id: int,
        keys: list[BlockKey],
        first: int,
        tokens_per_s: float,
    ) -> tuple[Matched | None, str]:
        """Lease what all ranks have on their nodes, which only the shard can find out."""
        if not engine.asks_peers:
            return None, STORE_DOWN
        staged = self._ask(engine, request_id, keys, first, tokens_per_s)
        if staged.num_blocks <= first:
            release_away(engine, staged.leases)
            return None, _reason(NOT_STORED, staged)
        return _take(engine, keys[: staged.num_blocks], first, staged)

    def _find_spread(
        self, engine: Engine, matched: Matched | None, staged: Staged
    ) -> tuple[Matched | None, str]:
        """Promise nothing of this match: ranks of the engine turn out to be on other nodes."""
        engine.has_ranks_away = True
        _log.warning(
            "kvray: ranks of this engine are on several nodes, but it does not say so; set"
            " gpus_per_node to how many of them a node has."
        )
        release_away(engine, staged.leases)
        _release(engine, matched)
        return None, STORE_DOWN

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
        left_s = wait_s - self.waited_s(request_id)
        if began < self._absent.get(keys[have], 0.0):
            return Staged(num_blocks=0, reason=NOT_STORED)
        if left_s < min(wait_s, _WORTH_S):
            return Staged(num_blocks=0, reason=TOO_SLOW)
        # What is not in this node's arena can only be checked by who has it.
        verify_from = have if engine.spans_nodes and engine.verifies_promises else None
        staged = self._stage(engine, keys, left_s, tokens_per_s, verify_from)
        ended = time.monotonic()
        _remember(self._waited, request_id, self.waited_s(request_id) + ended - began)
        if staged.arrivals:
            before = self._arrivals.get(request_id, ())
            _remember(self._arrivals, request_id, joined(before, staged.arrivals))
        if staged.num_blocks <= have and staged.reason == NOT_STORED:
            _remember(self._absent, keys[have], ended + _ABSENT_S)
        return staged

    def _stage(
        self,
        engine: Engine,
        keys: list[BlockKey],
        wait_s: float,
        tokens_per_s: float,
        verify_from: int | None,
    ) -> Staged:
        """Ask the shard, unless it has not answered lately."""
        if self._calls is None:
            self._calls = StageCalls(engine.link.directory)
        if not self._calls.can_ask:
            return Staged(num_blocks=0, reason=STORE_DOWN)
        began_ns = time.perf_counter_ns()
        staged = self._calls.stage(
            keys,
            replica=engine.replica,
            rank=engine.args.rank,
            wait_s=wait_s,
            tokens_per_s=tokens_per_s,
            verify_from=verify_from,
        )
        engine.totals["stage_calls"] += 1
        took_ns = time.perf_counter_ns() - began_ns
        engine.totals["stage_wait_us"] += took_ns // 1000
        engine.timings.stage.observe(took_ns)
        return staged


def _take(
    engine: Engine, keys: list[BlockKey], first: int, staged: Staged
) -> tuple[Matched | None, str]:
    """Lease here exactly `keys`, which ranks on other nodes have leased; all of them or none."""
    try:
        matched, reason = match(engine, keys, first, away=staged.leases)
    except BaseException:
        release_away(engine, staged.leases)
        raise
    if matched is None:
        release_away(engine, staged.leases)
        return None, reason
    if matched.prefix.num_blocks < len(keys):
        release_prefix(engine, matched.prefix)
        return None, reason
    return matched, _reason(reason, staged)


def _reason(local: str, staged: Staged) -> str:
    """Return why there is not more: what the other nodes know, unless it is known here."""
    return staged.reason if local == NOT_STORED and staged.reason != "none" else local


def _release(engine: Engine, matched: Matched | None) -> None:
    if matched is not None:
        release_prefix(engine, matched.prefix)


def _remember(known: OrderedDict[K, V], key: K, value: V) -> None:
    known[key] = value
    known.move_to_end(key)
    if len(known) > _REMEMBERED_MAX:
        known.popitem(last=False)
