"""What a pass changes in its requests: how far they are, and their tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvray.reference.request import LlmRequest, LlmRequestState
from kvray.reference.scheduler import ScheduledRequests


def count_computed(batch: ScheduledRequests) -> None:
    """Move every request on by what the pass computed of it."""
    for request in batch.context_requests:
        request.move_to_next_context_chunk()
        if request.context_remaining_length == 0 and not request.is_finished:
            request.state = LlmRequestState.GENERATION_IN_PROGRESS
    for request in batch.generation_requests:
        request.num_computed_tokens += 1


def foresee_ends(batch: ScheduledRequests, *, num_pending: int) -> None:
    """Stop scheduling what will end by its length once `num_pending` tokens have been added."""
    for request in batch.all_requests():
        if (
            request.state is LlmRequestState.GENERATION_IN_PROGRESS
            and request.will_complete_next_iteration(num_pending=num_pending)
        ):
            request.state = LlmRequestState.GENERATION_TO_COMPLETE


def add_tokens(sampled: Mapping[int, int], requests: Iterable[LlmRequest], *, now: float) -> None:
    """Append the sampled token, by request id, to each request that has not ended meanwhile."""
    for request in requests:
        token = sampled.get(request.request_id)
        if token is None or request.is_finished:
            continue
        if not request.generated_tokens:
            request.first_token_at = now
        request.add_new_token(token)
