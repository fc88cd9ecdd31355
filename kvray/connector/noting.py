"""Notes what came of a request, for `kvray explain`; on the engine's thread, in microseconds."""

import time

from kvray.block import BlockKey
from kvray.connector.engine import Engine
from kvray.connector.request_state import RequestState
from kvray.request_note import RequestNote, sampled

BYPASSED = "bypassed"
"""Reason of a request that has no keys: an adapter or an item that cannot be told from others."""


def note_request(
    engine: Engine,
    state: RequestState,
    *,
    wanted: list[BlockKey],
    first: int,
    reason: str,
    stage_s: float,
    lease_s: float,
) -> None:
    """Note a request that was just answered.

    Args:
        engine: the leader's.
        state: of the request.
        wanted: keys of the blocks that could be promised.
        first: leading blocks that the engine has itself.
        reason: why not more was promised.
        stage_s: how long the request has waited for the shard.
        lease_s: how long the rest of its answer took.
    """
    end = state.promise.end if state.promise is not None else min(first, len(wanted))
    step, missing = sampled(wanted, end)
    engine.requests.note(
        RequestNote(
            request_id=state.request_id,
            at=time.time(),
            num_tokens=state.num_tokens,
            tokens_per_block=state.tokens_per_block,
            first=first,
            end=end,
            wanted=len(wanted),
            reason=reason if missing else "none",
            arrivals=state.arrivals,
            stage_s=stage_s,
            lease_s=lease_s,
            opening=state.opening,
            step=step,
            keys=missing,
        )
    )


def note_bypassed(engine: Engine, request_id: int) -> None:
    """Note a request that has no keys, and so nothing to find."""
    engine.requests.note(
        RequestNote(
            request_id=request_id,
            at=time.time(),
            num_tokens=0,
            tokens_per_block=engine.args.tokens_per_block,
            first=0,
            end=0,
            wanted=0,
            reason=BYPASSED,
        )
    )
