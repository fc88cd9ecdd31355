"""Random prompts that share prefixes: whatever is stored, what is retrieved is what was stored."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvray.actors.shard.shard import Shard
from kvray.config import KVRayConfig
from kvray.tensor_cache import TensorCache, TensorMetadata
from tests.examples import examples
from tests.unit.tensor_cache.conftest import BLOCK, METADATA, changed
from tests.unit.tensor_cache.kv import INTEGERS, assert_same, cut, suffix_mask

# Two values only, so that prompts often begin alike.
PROMPTS = st.lists(st.lists(st.integers(0, 1), max_size=5 * BLOCK), min_size=1, max_size=6)
LAYOUTS = st.sampled_from(["huggingface", "vllm"])
CHECKED = settings(
    max_examples=examples(60),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def true_kv(tokens: list[int], metadata: TensorMetadata) -> torch.Tensor:
    """Return a stand-in for a model's KV: each token's depends on all tokens up to it."""
    rows, state = [], 1
    for token in tokens:
        state = (state * 6364136223846793005 + token + 1442695040888963407) % 2**63
        generator = torch.Generator().manual_seed(state)
        shape = (metadata.num_layers, 2, metadata.num_kv_heads, metadata.head_size)
        bits = INTEGERS[metadata.dtype.itemsize]
        rows.append(torch.randint(-(2**15), 2**15, shape, dtype=bits, generator=generator))
    by_head = torch.stack(rows, dim=3) if rows else torch.empty(3, 2, 2, 0, 8, dtype=torch.int32)
    in_layout = by_head if metadata.layout == "huggingface" else by_head.transpose(2, 3)
    return in_layout.contiguous().view(metadata.dtype)


@pytest.fixture
def fresh_cache(config: KVRayConfig, shard: Shard) -> Callable[[str], TensorCache]:
    """Return a maker of caches on an arena that it empties first."""

    def make(layout: str) -> TensorCache:
        shard.clear(10)
        return TensorCache(config, changed(METADATA, layout=layout))

    return make


@CHECKED
@given(prompts=PROMPTS, layout=LAYOUTS, data=st.data())
def test_retrieve_returns_what_was_stored_for_lookup_tokens(
    fresh_cache: Callable[[str], TensorCache],
    prompts: list[list[int]],
    layout: str,
    data: st.DataObject,
) -> None:
    with fresh_cache(layout) as cache:
        held: set[tuple[int, ...]] = set()  # the full-block prefixes that must be found
        for tokens in prompts:
            first = data.draw(st.integers(0, len(tokens) // BLOCK)) * BLOCK
            kv = cut(true_kv(tokens, cache.metadata), first, len(tokens), cache.metadata)
            blocking = data.draw(st.booleans())
            cache.store(tokens, kv, suffix_mask(len(tokens), first), blocking=blocking)
            assert cache.flush()
            if not first or tuple(tokens[:first]) in held:
                ends = range(BLOCK, len(tokens) + 1, BLOCK)
                held |= {tuple(tokens[:end]) for end in ends if end > first}
        for tokens in prompts:
            check_found(cache, tokens, held, data)


def check_found(
    cache: TensorCache, tokens: list[int], held: set[tuple[int, ...]], data: st.DataObject
) -> None:
    expected = 0
    while tuple(tokens[: expected + BLOCK]) in held and expected + BLOCK <= len(tokens):
        expected += BLOCK
    assert cache.lookup(tokens) == expected
    first = data.draw(st.integers(0, len(tokens) // BLOCK)) * BLOCK
    kv, ret_mask = cache.retrieve(tokens, suffix_mask(len(tokens), first))
    assert ret_mask.tolist() == [first <= at < expected for at in range(len(tokens))]
    if first < expected:
        assert_same(kv, cut(true_kv(tokens, cache.metadata), first, expected, cache.metadata))
    else:
        assert kv == ()
