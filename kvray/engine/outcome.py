"""Counts the outcome of each request, and notes it for `kvray explain`.

It runs on the engine's executor thread, after the answer, and takes microseconds.
"""

import time

from kvray.engine.request import Prompt, RequestState
from kvray.engine.shared_state import SharedState
from kvray.identity.block import BlockKey
from kvray.trace.arrival import Arrivals, runs_between
from kvray.trace.reasons import MissReason
from kvray.trace.request_note import RequestNote, sampled


def record_answer(
    shared: SharedState,
    *,
    asked: Prompt,
    reason: MissReason,
    state: RequestState | None = None,
    keys: list[BlockKey] | None = None,
    stage_s: float = 0.0,
    lease_s: float = 0.0,
) -> None:
    """Record a request that was just answered.

    `keys` are of the blocks that could be promised, `reason` says why not more was. The request has
    waited `stage_s` for the shard, and the rest of its answer took `lease_s`. One that came before
    its model had a name has no state and no keys: nothing was looked up.
    """
    totals, size = shared.figures.totals, shared.args.tokens_per_block
    first, wanted = asked.num_computed // size, asked.num_askable(size)
    end, hit = min(first, wanted), 0
    arrivals: Arrivals = ()
    step = 1
    missing: tuple[BlockKey, ...] = ()
    if state is not None and state.promise is not None:
        end, hit = state.promise.end, state.promise.num_blocks * size
        if not shared.pool.is_own(state.promise.lease):
            totals["resliced_tokens"] += hit
        for start, stop, way, _ in runs_between(state.arrivals, state.promise.first, end):
            totals[f"hit_tokens_from_{way}"] += (stop - start) * size
    missed = wanted * size - asked.num_computed - hit
    totals["requests"] += 1
    totals["prompt_tokens"] += len(asked.tokens)
    totals["local_tokens"] += asked.num_computed
    totals["hit_tokens"] += hit
    if missed > 0:
        totals[f"miss_tokens_{reason}"] += missed
    if state is not None and keys:
        arrivals = state.arrivals
        step, missing = sampled(keys, end)
    shared.figures.request_notes.note(
        RequestNote(
            request_id=asked.request_id,
            at=time.time(),
            num_tokens=len(asked.tokens),
            tokens_per_block=size,
            first=first,
            end=end,
            wanted=wanted,
            reason=reason if end < wanted else "none",
            arrivals=arrivals,
            stage_s=stage_s,
            lease_s=lease_s,
            step=step,
            keys=missing,
        )
    )


def record_bypassed(shared: SharedState, request_id: int) -> None:
    """Record a request that has no keys, and so nothing to find."""
    shared.figures.totals["bypassed_requests"] += 1
    size = shared.args.tokens_per_block
    shared.figures.request_notes.note(
        RequestNote(request_id, time.time(), 0, size, 0, 0, 0, "bypassed")
    )
