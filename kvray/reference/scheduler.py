"""Which requests take part in a pass: never one that might run out of blocks half-way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvray.reference.request import LlmRequest, LlmRequestState

if TYPE_CHECKING:
    from kvray.reference.cache_manager import KVCacheManager


@dataclass(slots=True)
class ScheduledRequests:
    """The requests of one pass: those in their context phase and those that generate."""

    context_requests: list[LlmRequest] = field(default_factory=list)
    generation_requests: list[LlmRequest] = field(default_factory=list)

    @property
    def batch_size(self) -> int:
        """How many requests take part."""
        return len(self.context_requests) + len(self.generation_requests)

    def all_requests(self) -> list[LlmRequest]:
        """Return context requests, then generation requests."""
        return self.context_requests + self.generation_requests

    def drop_context(self, request_ids: set[int]) -> None:
        """Take context requests out."""
        self.context_requests = [
            request for request in self.context_requests if request.request_id not in request_ids
        ]


def schedule(
    active: Sequence[LlmRequest],
    cache: KVCacheManager,
    *,
    max_batch_size: int,
    chunk_tokens: int | None,
) -> ScheduledRequests:
    """Choose the requests of the next pass in order of arrival.

    Args:
        active: all requests that have not ended, oldest first.
        cache: says what is free and what each may still need.
        max_batch_size: the most requests in one pass.
        chunk_tokens: the longest piece of a prompt in one pass, a multiple of a block; None for
            whole prompts.

    Source: TensorRT-LLM's GUARANTEED_NO_EVICT: a request starts only when the blocks of its
    prompt and longest answer are free beside what the started ones may still ask for.
    """
    batch = ScheduledRequests()
    promised = sum(
        cache.get_needed_beyond_held(request) for request in active if request.is_admitted
    )
    available = cache.get_num_free_blocks() - promised
    for request in active:
        if batch.batch_size == max_batch_size:
            break
        if request.state is LlmRequestState.GENERATION_IN_PROGRESS:
            batch.generation_requests.append(request)
        elif request.state is LlmRequestState.CONTEXT_INIT:
            if not request.is_admitted:
                needed = cache.get_needed_resource_to_completion(request)
                if needed > available:
                    break
                available -= needed
                request.is_admitted = True
            _set_chunk(request, chunk_tokens)
            batch.context_requests.append(request)
    return batch


def _set_chunk(request: LlmRequest, chunk_tokens: int | None) -> None:
    remaining = request.context_remaining_length
    request.context_chunk_size = remaining if chunk_tokens is None else min(chunk_tokens, remaining)
