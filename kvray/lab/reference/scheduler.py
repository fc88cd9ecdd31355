"""The choice of requests for a pass: never one that might run out of blocks half-way."""

from __future__ import annotations

from collections.abc import Sequence

from kvray.lab.reference.cache_manager import KVCacheManager
from kvray.lab.reference.request import LlmRequest, LlmRequestState, ScheduledRequests


def schedule(
    active: Sequence[LlmRequest],
    cache: KVCacheManager,
    *,
    max_batch_size: int,
    chunk_tokens: int | None,
) -> ScheduledRequests:
    """Choose the requests of the next pass in order of arrival.

    `chunk_tokens` is the longest piece of a prompt, a multiple of a block; None: whole prompts.

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
            remaining = request.context_remaining_length
            request.context_chunk_size = min(chunk_tokens or remaining, remaining)
            batch.context_requests.append(request)
    return batch
