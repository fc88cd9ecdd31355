"""Counts the outcome of each request, and notes it for `kvray explain`.

It runs on the engine's executor thread, after the answer, and takes microseconds.
"""

import time

from kvray.engine.prefix_finder import Found
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
    found: Found,
    state: RequestState | None = None,
    reason: MissReason | None = None,
) -> None:
    """Record a request that was just answered with what was `found`.

    `reason` says why it has no more after all. A request that came before its model had a name has
    no state: nothing was looked up.
    """
    reason = reason or found.reason
    totals, size = shared.figures.totals, shared.args.tokens_per_block
    first, wanted = asked.num_computed // size, asked.num_askable(size)
    end, hit = min(first, wanted), 0
    arrivals: Arrivals = ()
    step = 1
    missing: tuple[BlockKey, ...] = ()
    promise = None if state is None else state.promise
    if state is not None and promise is not None:
        end, hit = promise.end, (promise.end - promise.first) * size
        if promise.lease.stored_by != shared.args.num_parts_ranks:
            totals["resliced_tokens"] += hit
        for start, stop, way, _ in runs_between(state.arrivals, promise.first, end):
            totals[f"hit_tokens_from_{way}"] += (stop - start) * size
    missed = wanted * size - asked.num_computed - hit
    totals["requests"] += 1
    totals["prompt_tokens"] += len(asked.tokens)
    totals["local_tokens"] += asked.num_computed
    totals["hit_tokens"] += hit
    if missed > 0:
        totals[f"miss_tokens_{reason}"] += missed
    if state is not None and wanted:
        arrivals = state.arrivals
        step, missing = sampled(state.keys[:wanted], end)
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
            stage_s=found.stage_s,
            lease_s=found.lease_s,
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
