"""The cache manager has TensorRT-LLM's interface and keeps its promises about bytes."""

import torch

from kvray.lab.reference.cache_manager import KVCacheManager
from kvray.lab.reference.engine_options import EngineOptions
from kvray.lab.reference.executor import schedule
from kvray.lab.reference.model import KVGeometry
from kvray.lab.reference.request import LlmRequest, LlmRequestState, ScheduledRequests
from tests.engine.conftest import BLOCK, make_prompt

GEOMETRY = KVGeometry(num_layers=3, num_kv_heads=2, head_dim=4)


def make_cache(num_blocks: int = 8, **options: bool) -> KVCacheManager:
    chosen = {"num_blocks": num_blocks, "tokens_per_block": BLOCK, "poison": True, **options}
    return KVCacheManager(GEOMETRY, EngineOptions(**chosen))


def test_pool_has_the_layout_of_the_contract() -> None:
    cache = make_cache()
    pool = cache.get_unique_primary_pool()
    assert pool.shape == (8, 3, 2, 2 * BLOCK * 4)
    assert pool.is_contiguous()
    buffers = cache.get_buffers(1)
    assert buffers.shape == (8, 2, 2, BLOCK, 4)
    buffers[5, 1, 0, 3, 2] = 42.0
    assert pool[5, 1, 1, 3 * 4 + 2] == 42.0


def test_request_gets_its_blocks_and_gives_them_back() -> None:
    cache = make_cache()
    request = LlmRequest(1, make_prompt(20), max_new_tokens=30)
    assert cache.get_max_resource_count() == 8
    assert cache.get_needed_resource_to_completion(request) == 4
    cache.prepare_resources(ScheduledRequests(context_requests=[request]))
    assert len(cache.get_cache_indices(request)) == 2
    assert cache.get_needed_beyond_held(request) == 2
    assert cache.get_num_free_blocks() == 6
    request.num_computed_tokens = 2 * BLOCK
    cache.prepare_resources(ScheduledRequests(generation_requests=[request]))
    assert len(cache.get_cache_indices(request)) == 3
    cache.free_resources(request)
    cache.free_resources(request)
    assert cache.get_num_free_blocks() == 8


def test_freed_blocks_without_reusable_content_are_poisoned() -> None:
    cache = make_cache()
    request = LlmRequest(1, make_prompt(20))
    cache.prepare_resources(ScheduledRequests(context_requests=[request]))
    cache.get_unique_primary_pool().zero_()
    request.finish_by_reason("cancelled")
    freed = cache.get_cache_indices(request)
    cache.free_resources(request)
    assert cache.get_unique_primary_pool()[freed].isnan().all()


def test_partial_match_copies_the_shared_rows_alone() -> None:
    cache = make_cache(enable_partial_reuse=True)
    first = LlmRequest(1, make_prompt(2 * BLOCK + 1))
    cache.prepare_resources(ScheduledRequests(context_requests=[first]))
    source = cache.get_cache_indices(first)
    cache.get_unique_primary_pool()[source] = torch.randn(3, 3, 2, 2 * BLOCK * 4)
    first.move_to_next_context_chunk()
    cache.update_resources(ScheduledRequests(context_requests=[first]))
    second = LlmRequest(2, make_prompt(BLOCK + 5) + make_prompt(9, seed=4))
    cache.prepare_resources(ScheduledRequests(context_requests=[second]))
    target = cache.get_cache_indices(second)
    assert second.context_current_position == BLOCK + 5
    assert target[0] == source[0]
    for layer in range(3):
        rows = cache.get_buffers(layer)
        assert torch.equal(rows[target[1], :, :, :5], rows[source[1], :, :, :5])
        assert rows[target[1], :, :, 5:].isnan().all()


def test_partial_match_is_given_up_when_its_block_is_needed() -> None:
    cache = make_cache(num_blocks=3, enable_partial_reuse=True)
    first = LlmRequest(1, make_prompt(2 * BLOCK + 1))
    cache.prepare_resources(ScheduledRequests(context_requests=[first]))
    first.move_to_next_context_chunk()
    first.add_new_token(9)
    cache.free_resources(first)
    second = LlmRequest(2, make_prompt(BLOCK + 5) + make_prompt(20, seed=4))
    cache.prepare_resources(ScheduledRequests(context_requests=[second]))
    assert second.context_current_position == BLOCK
    assert cache.get_num_free_blocks() == 0


def test_padding_request_takes_a_block_and_runs_out_quietly() -> None:
    cache = make_cache(num_blocks=1)
    padding = cache.add_padding_request()
    assert padding is not None
    assert padding.is_dummy
    assert padding.state is LlmRequestState.GENERATION_IN_PROGRESS
    assert cache.add_padding_request() is None
    cache.free_resources(padding)
    assert cache.get_num_free_blocks() == 1


def test_request_waits_until_its_longest_answer_fits_beside_the_others() -> None:
    cache = make_cache(num_blocks=4)
    first = LlmRequest(1, make_prompt(10), max_new_tokens=2 * BLOCK)
    second = LlmRequest(2, make_prompt(10, seed=1), max_new_tokens=BLOCK)
    third = LlmRequest(3, [5], max_new_tokens=1)
    active = [first, second, third]
    batch = schedule(active, cache, max_batch_size=8, chunk_tokens=None)
    assert batch.context_requests == [first]
    cache.prepare_resources(batch)
    assert cache.get_num_free_blocks() == 3
    first.move_to_next_context_chunk()
    first.state = LlmRequestState.GENERATION_IN_PROGRESS
    batch = schedule(active, cache, max_batch_size=8, chunk_tokens=None)
    assert batch.all_requests() == [first]
    first.finish_by_reason("stop")
    cache.free_resources(first)
    batch = schedule([second, third], cache, max_batch_size=8, chunk_tokens=None)
    assert batch.context_requests == [second, third]
