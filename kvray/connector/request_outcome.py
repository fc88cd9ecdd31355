"""Counts the outcome of each request, and notes it for `kvray explain`.

It runs on the engine's executor thread, after the answer, and takes microseconds.
"""

import time
from typing import Any

from kvray.connector.request_identifier import AskedRequest
from kvray.connector.request_state import RequestState
from kvray.connector.shared_state import SharedState
from kvray.identity.block import BlockKey
from kvray.trace.arrival import runs_between
from kvray.trace.reasons import MissReason
from kvray.trace.request_note import RequestNote, sampled


def record_answer(
    shared: SharedState,
    asked: AskedRequest,
    state: RequestState,
    keys: list[BlockKey],
    *,
    reason: MissReason,
    stage_s: float,
    lease_s: float,
) -> None:
    """Record a request that was just answered.

    `keys` are of the blocks that could be promised, `reason` says why not more was. The request has
    waited `stage_s` for the shard, and the rest of its answer took `lease_s`.
    """
    totals, size, promise = shared.figures.totals, state.tokens_per_block, state.promise
    hit = 0
    if promise is not None:
        hit = promise.num_blocks * size
        for start, stop, way, _ in runs_between(state.arrivals, promise.first, promise.end):
            totals[f"hit_tokens_from_{way}"] += (stop - start) * size
    missed = len(keys) * size - asked.num_computed - hit
    totals["hit_tokens"] += hit
    _count(shared, asked, num_tokens=len(asked.tokens), missed=missed, reason=reason)
    if keys and state.num_saved:
        shared.figures.prefix_digests.note_stored(state.prefix_digest)
    elif keys and reason == "not_stored":
        shared.figures.prefix_digests.note_missed(state.prefix_digest, missed)
    first = asked.num_computed // size
    end = promise.end if promise is not None else min(first, len(keys))
    step, missing = sampled(keys, end)
    _note(
        shared,
        asked.request_id,
        num_tokens=state.num_tokens,
        first=first,
        end=end,
        wanted=len(keys),
        reason=reason if missing else "none",
        arrivals=state.arrivals,
        stage_s=stage_s,
        lease_s=lease_s,
        prefix_digest=state.prefix_digest,
        step=step,
        keys=missing,
    )


def record_unnamed(shared: SharedState, asked: AskedRequest) -> None:
    """Record a request that came before its model had a name: nothing was looked up."""
    size = shared.args.tokens_per_block
    first, num_blocks = asked.num_computed // size, asked.num_askable(size)
    missed = num_blocks * size - asked.num_computed
    _count(shared, asked, num_tokens=asked.prompt_len, missed=missed, reason="fingerprinting")
    _note(
        shared,
        asked.request_id,
        num_tokens=asked.prompt_len,
        first=first,
        end=min(first, num_blocks),
        wanted=num_blocks,
        reason="fingerprinting" if first < num_blocks else "none",
    )


def record_bypassed(shared: SharedState, request_id: int) -> None:
    """Record a request that has no keys, and so nothing to find."""
    shared.figures.totals["bypassed_requests"] += 1
    _note(shared, request_id, num_tokens=0, first=0, end=0, wanted=0, reason="bypassed")


def _count(
    shared: SharedState, asked: AskedRequest, *, num_tokens: int, missed: int, reason: MissReason
) -> None:
    totals = shared.figures.totals
    totals["requests"] += 1
    totals["prompt_tokens"] += num_tokens
    totals["local_tokens"] += asked.num_computed
    if missed > 0:
        totals[f"miss_tokens_{reason}"] += missed


def _note(shared: SharedState, request_id: int, **fields: Any) -> None:
    shared.figures.request_notes.note(
        RequestNote(
            request_id=request_id,
            at=time.time(),
            tokens_per_block=shared.args.tokens_per_block,
            **fields,
        )
    )
