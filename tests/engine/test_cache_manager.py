"""The engine's pool has TensorRT-LLM's interface and events, and keeps its promises about bytes."""

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvray.errors import CapacityError
from kvray.events import Batch
from kvray.events.native import NativePool
from kvray.events.pool_content import PoolContent, chain_digests
from kvray.reference.cache_manager import BlockPool, KVCacheManager
from kvray.reference.engine import ReferenceEngine
from kvray.reference.engine_options import EngineOptions
from kvray.reference.executor import schedule
from kvray.reference.model import KVGeometry
from kvray.reference.request import LlmRequest, LlmRequestState, ScheduledRequests
from tests.engine.conftest import BLOCK, make_prompt
from tests.examples import examples

GEOMETRY = KVGeometry(num_layers=3, num_kv_heads=2, head_dim=4)


def make_cache(num_blocks: int = 8, **options: int) -> KVCacheManager:
    chosen = EngineOptions(num_blocks=num_blocks, tokens_per_block=BLOCK, poison=True, **options)
    return KVCacheManager(GEOMETRY, chosen)


def begun(cache: KVCacheManager, number: int, tokens: list[int], **options: int) -> LlmRequest:
    """Return a request that has the blocks of its prompt."""
    request = LlmRequest(number, tokens, **options)
    cache.prepare_resources(ScheduledRequests(context_requests=[request]))
    return request


def test_pool_has_the_layout_of_the_contract():
    cache = make_cache()
    pool = cache.get_unique_primary_pool()
    assert pool.shape == (8, 3, 2, 2 * BLOCK * 4)
    assert pool.is_contiguous()
    buffers = cache.get_buffers(1)
    assert buffers.shape == (8, 2, 2, BLOCK, 4)
    buffers[5, 1, 0, 3, 2] = 42.0
    assert pool[5, 1, 1, 3 * 4 + 2] == 42.0


def test_request_gets_its_blocks_and_gives_them_back_poisoned():
    cache = make_cache()
    request = begun(cache, 1, make_prompt(20), max_new_tokens=30)
    assert cache.get_max_resource_count() == 8
    assert cache.get_needed_resource_to_completion(request) == 4
    assert len(cache.get_cache_indices(request)) == 2
    assert cache.get_needed_beyond_held(request) == 2
    assert cache.get_num_free_blocks() == 6
    request.num_computed_tokens = 2 * BLOCK
    cache.prepare_resources(ScheduledRequests(generation_requests=[request]))
    freed = cache.get_cache_indices(request)
    assert len(freed) == 3
    cache.get_unique_primary_pool().zero_()
    request.finish_by_reason("cancelled")  # nobody is to find its blocks
    cache.free_resources(request)
    cache.free_resources(request)
    assert cache.get_num_free_blocks() == 8
    assert cache.get_unique_primary_pool()[freed].isnan().all()


def test_blocks_of_rejected_drafts_are_counted_on_then_poisoned_and_go_to_others():
    cache = make_cache(4, max_draft_len=20)
    request = begun(cache, 1, make_prompt(2 * BLOCK - 1), max_new_tokens=4)
    assert cache.get_needed_resource_to_completion(request) == 4
    assert cache.get_needed_beyond_held(request) == 2
    ScheduledRequests(context_requests=[request]).count_computed()
    request.add_sampled(5)
    request.py_draft_tokens = list(range(20))
    batch = ScheduledRequests(generation_requests=[request])
    cache.prepare_resources(batch)
    block_ids = cache.get_cache_indices(request)
    kept, rewound = block_ids[:2], block_ids[2:]
    assert len(rewound) == 2
    cache.get_unique_primary_pool().zero_()
    batch.count_computed()
    request.add_sampled(6)
    cache.update_resources(batch)
    assert cache.get_cache_indices(request) == kept
    assert cache.get_unique_primary_pool()[rewound].isnan().all()
    other = begun(cache, 2, make_prompt(2 * BLOCK, seed=1))
    assert sorted(cache.get_cache_indices(other)) == sorted(rewound)


def test_partial_match_copies_the_shared_rows_alone():
    cache = make_cache(enable_partial_reuse=True)
    first = begun(cache, 1, make_prompt(2 * BLOCK + 1))
    source = cache.get_cache_indices(first)
    cache.get_unique_primary_pool()[source] = torch.randn(3, 3, 2, 2 * BLOCK * 4)
    first.move_to_next_context_chunk()
    cache.update_resources(ScheduledRequests(context_requests=[first]))
    second = begun(cache, 2, make_prompt(BLOCK + 5) + make_prompt(9, seed=4))
    target = cache.get_cache_indices(second)
    assert second.context_current_position == BLOCK + 5
    assert target[0] == source[0]
    for layer in range(3):
        rows = cache.get_buffers(layer)
        assert torch.equal(rows[target[1], :, :, :5], rows[source[1], :, :, :5])
        assert rows[target[1], :, :, 5:].isnan().all()


def test_partial_match_is_given_up_when_its_block_is_needed():
    cache = make_cache(num_blocks=3, enable_partial_reuse=True)
    first = begun(cache, 1, make_prompt(2 * BLOCK + 1))
    first.move_to_next_context_chunk()
    first.add_new_token(9)
    cache.free_resources(first)
    second = begun(cache, 2, make_prompt(BLOCK + 5) + make_prompt(20, seed=4))
    assert second.context_current_position == BLOCK
    assert cache.get_num_free_blocks() == 0


def test_padding_request_takes_a_block_and_runs_out_quietly():
    cache = make_cache(num_blocks=1)
    padding = cache.add_padding_request()
    assert padding is not None
    assert cache.add_padding_request() is None
    cache.free_resources(padding)
    assert cache.get_num_free_blocks() == 1


def test_request_waits_until_its_longest_answer_fits_beside_the_others():
    cache = make_cache(num_blocks=4)
    first = LlmRequest(1, make_prompt(10), max_new_tokens=2 * BLOCK)
    second = LlmRequest(2, make_prompt(10, seed=1), max_new_tokens=BLOCK)
    third = LlmRequest(3, [5], max_new_tokens=1)
    take = partial(schedule, cache=cache, max_batch_size=8, chunk_tokens=None)
    batch = take([first, second, third])
    assert batch.context_requests == [first]
    cache.prepare_resources(batch)
    first.move_to_next_context_chunk()
    first.state = LlmRequestState.GENERATION_IN_PROGRESS
    assert take([first, second, third]).all_requests() == [first]
    first.finish_by_reason("stop")
    cache.free_resources(first)
    assert take([second, third]).context_requests == [second, third]


SIZE = 2
NUM_BLOCKS = 8


class PoolMachine(RuleBasedStateMachine):
    """Sequences come and go; `content` is what each block would hold in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, tokens_per_block=SIZE)
        self.sequences: list[tuple[list[int], list[int]]] = []
        self.content: dict[int, tuple[int, ...]] = {}

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=8), is_partial=st.booleans())
    def add(self, tokens: list[int], is_partial: bool) -> None:
        match = self.pool.match(tokens[:-1], namespace=None, allow_partial=is_partial)
        held = list(match.block_ids)
        for index, block_id in enumerate(held):
            assert self.content[block_id] == tuple(tokens[: (index + 1) * SIZE])
        if match.partial_block_id is not None:
            end = len(held) * SIZE + match.num_partial_tokens
            assert end < len(tokens)
            assert self.content[match.partial_block_id][:end] == tuple(tokens[:end])
        self.pool.reference(held)
        count = -(-len(tokens) // SIZE) - len(held)
        free = self.pool.num_free
        try:
            fresh = self.pool.allocate(count)
        except CapacityError:
            assert count > free
            assert self.pool.num_free == free
            self.pool.release(held)
            return
        in_use = {block_id for _, block_ids in self.sequences for block_id in block_ids}
        assert not in_use & set(fresh)
        block_ids = held + fresh
        for index, block_id in enumerate(block_ids):
            self.content[block_id] = tuple(tokens[: (index + 1) * SIZE])
        self.sequences.append((tokens, block_ids))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), is_remembered=st.booleans(), keep_tail=st.booleans())
    def end(self, data: st.DataObject, is_remembered: bool, keep_tail: bool) -> None:
        index = data.draw(st.integers(0, len(self.sequences) - 1))
        tokens, block_ids = self.sequences.pop(index)
        if is_remembered:
            self.pool.remember(tokens, block_ids, namespace=None, keep_tail=keep_tail)
        self.pool.release(block_ids)

    @invariant()
    def free_blocks_are_those_that_nobody_holds(self) -> None:
        in_use = {block_id for _, block_ids in self.sequences for block_id in block_ids}
        assert self.pool.num_free == NUM_BLOCKS - len(in_use)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=examples(200), deadline=None)


def test_least_recently_used_tail_goes_first():
    pool = BlockPool(4, tokens_per_block=SIZE)
    for tokens in ([1, 1, 1, 1], [2, 2, 2, 2]):
        block_ids = pool.allocate(2)
        pool.remember(tokens, block_ids, namespace=None, keep_tail=False)
        pool.release(block_ids)
    pool.release(pool.allocate(1))
    lengths = [
        len(pool.match(tokens, namespace=None, allow_partial=False).block_ids)
        for tokens in ([1, 1, 1, 1], [2, 2, 2, 2])
    ]
    assert lengths == [1, 2]


def test_nothing_is_kept_of_a_namespace_without_blocks():
    pool = BlockPool(4, tokens_per_block=SIZE)
    for salt in range(20):
        block_ids = pool.allocate(2)
        pool.remember([1, 1, 1, 1], block_ids, namespace=salt, keep_tail=False)
        pool.remember([1], block_ids, namespace=f"short {salt}", keep_tail=False)
        pool.release(block_ids)
    assert [*pool._roots] == [18, 19]


class Heard:
    """What a router makes of an engine's events."""

    def __init__(self, engine: ReferenceEngine) -> None:
        self._engine = engine
        self.pool = NativePool(block_size=BLOCK)
        self.content = PoolContent(blocks_max=1000)
        self.kinds: set[str] = set()

    def leading(self, tokens: list[int]) -> int:
        events: list[Any] = self._engine.get_kv_cache_events()
        self.kinds |= {one["data"]["type"] for one in events}
        self.content.apply(Batch(at=0.0, events=self.pool.take(events)))
        packed = b"".join(token.to_bytes(4, "little") for token in tokens)
        digests = {BLOCK: chain_digests(packed, block_size=BLOCK)}
        return self.content.num_tokens(digests) // BLOCK


@pytest.mark.parametrize("options", [{}, {"enable_partial_reuse": True}, {"overlap": True}])
def test_what_events_tell_is_what_the_engine_reuses(make_engine, options):
    engine = make_engine(num_blocks=16, event_buffer_max_size=1000, **options)
    heard = Heard(engine)
    for number in [0, 1, 2, 3, 4, 0, 1, 1, 5, 2, 0, 6, 6, 3]:
        prompt = make_prompt(3 * BLOCK + 5, seed=number)
        told = heard.leading(prompt)
        output = engine.generate(prompt, max_tokens=4)
        assert output.reused_tokens // BLOCK == told
    assert heard.kinds == {"created", "stored", "removed"}
    assert heard.pool.num_gaps == heard.pool.num_unread == 0


def test_a_buffer_that_is_too_small_shows_as_a_gap(make_engine):
    engine = make_engine(num_blocks=16, event_buffer_max_size=2)
    heard = Heard(engine)
    heard.leading([])
    for number in range(8):
        engine.generate(make_prompt(3 * BLOCK, seed=number), max_tokens=4)
    heard.leading([])
    assert heard.pool.num_gaps == 1


def test_salted_prompts_stay_inside(make_engine):
    engine = make_engine(event_buffer_max_size=1000)
    heard, prompt = Heard(engine), make_prompt(2 * BLOCK + 1)
    engine.generate(prompt, max_tokens=2, salt="a")
    assert heard.leading(prompt) == heard.pool.num_blocks() == 0
    engine.generate(prompt, max_tokens=2)
    assert heard.leading(prompt) == 2


def test_without_a_buffer_nothing_is_told(make_engine):
    engine = make_engine()
    engine.generate(make_prompt(2 * BLOCK), max_tokens=2)
    assert engine.get_kv_cache_events() == []
