"""What a cache stores is what it retrieves; its life, by itself and by an instance's id."""

import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

import kvray
from examples import tensor_cache as example_program
from kvray.actors.shard.shard import Shard
from kvray.config import KVRayConfig
from kvray.errors import ConfigError, LayoutMismatch
from kvray.tensor_cache import TensorCache, TensorMetadata
from tests.examples import examples
from tests.unit.tensor_cache.kv import (
    BLOB,
    BLOCK,
    METADATA,
    TOKENS,
    VLLM,
    as_blob,
    assert_same,
    changed,
    cut,
    pairs,
    random_blob,
    suffix_mask,
)
from tests.waiting import wait_for

pytestmark = pytest.mark.usefixtures("shard")


def test_what_was_retrieved_belongs_to_the_caller(stored):
    stored.retrieve(TOKENS, return_tuple=False)[0].zero_()
    assert_same(stored.retrieve(TOKENS)[0], BLOB)


def test_a_suffix_without_its_prefix_is_not_stored_and_says_so(cache, caplog):
    mask = suffix_mask(len(TOKENS), BLOCK)
    for _ in range(2):
        assert cache.store(TOKENS, random_blob(5 * BLOCK), mask) == 0
    assert cache.counters()["dropped_tokens"] == 2 * 5 * BLOCK
    assert [r.levelname for r in caplog.records if "not stored" in r.message] == ["WARNING"]


def test_a_store_in_the_background_keeps_no_hold_on_the_tensors(cache):
    given_kv = BLOB.clone()
    assert cache.store(TOKENS, pairs(given_kv), blocking=False) == 0
    given_kv.zero_()
    assert cache.flush()
    assert_same(cache.retrieve(TOKENS)[0], BLOB)
    assert cache.counters()["stored_tokens"] == len(TOKENS)


def test_close_finishes_background_stores(cache, make_cache):
    other = make_cache()
    for number in range(8):
        cache.store([number, *TOKENS[1:]], random_blob(len(TOKENS), seed=number), blocking=False)
    cache.close()
    assert [other.lookup([number, *TOKENS[1:]]) for number in range(8)] == [len(TOKENS)] * 8


def test_a_background_that_is_full_drops_and_says_so(cache, monkeypatch, caplog):
    monkeypatch.setattr(cache._stores, "has_room", lambda size: False)
    for _ in range(2):
        cache.store(TOKENS, BLOB, blocking=False)
    assert cache.counters()["dropped_tokens"] == 2 * len(TOKENS)
    assert [r.levelname for r in caplog.records if "background" in r.message] == ["WARNING"]


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        (("text", random_blob(4)), ConfigError, "list of integers"),
        ((torch.ones(4, dtype=torch.bfloat16), random_blob(4)), ConfigError, "list of integers"),
        ((TOKENS, random_blob(23)), LayoutMismatch, "23 tokens .* 24"),
        ((TOKENS, BLOB, suffix_mask(24, BLOCK)), LayoutMismatch, "24 tokens where .* ask for 20"),
        ((TOKENS, random_blob(24, VLLM)), LayoutMismatch, "layout 'huggingface'"),
        ((TOKENS, example_program.to_past(pairs(BLOB))), LayoutMismatch, "3 things; give a pair"),
    ],
)
def test_bad_input_gets_a_sentence_and_stores_nothing(cache, arguments, error, sentence):
    with pytest.raises(error, match=sentence):
        cache.store(*arguments)
    assert cache.lookup(TOKENS) == 0


def test_a_path_has_a_checkpoint_and_another_one_does_not_share(make_cache, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="no-such-model"):
        make_cache(model="/no-such-model")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    namespaces = []
    checkpoint = tmp_path / "model"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")
    for content in (b"one", b"two"):
        (checkpoint / "pytorch_model.bin").write_bytes(content)
        namespaces.append(make_cache(model=str(checkpoint)).namespace)
    assert namespaces[0] != namespaces[1]


@pytest.mark.parametrize(
    ("given", "metadata", "words"),
    [
        ("kvray.yaml", METADATA, "load_config.*not a str"),
        ({}, METADATA, "load_config.*not a dict"),
        (None, {"model": "tiny"}, "TensorMetadata, not a dict"),
    ],
)
def test_arguments_of_another_kind_are_refused_in_a_sentence(given, metadata, words):
    with pytest.raises(ConfigError, match=words):
        TensorCache(given, metadata)
    with pytest.raises(ConfigError, match=words):
        TensorCache.get_or_create("one", given, metadata)


def test_close_twice_is_fine_and_use_after_it_is_refused(cache):
    with cache:
        assert cache.lookup(TOKENS) == 0
    cache.close()
    calls = cache.lookup, cache.retrieve, lambda tokens: cache.store(tokens, BLOB)
    for call in calls:
        with pytest.raises(ConfigError, match="closed"):
            call(TOKENS)


def shown(shard: Shard) -> dict[str, Any]:
    ranks = {one["replica"]: dict(one["counters"]) for one in shard.status()["replicas"]}
    for counters in ranks.values():
        counters.pop("uptime_s", None)
    return ranks


def test_the_shard_shows_the_figures_of_each_cache_also_a_closed_one(stored, make_cache, shard):
    second = make_cache(layout="vllm")
    second.retrieve([*TOKENS, 1])
    hit = {"requests": 1, "prompt_tokens": 25, "local_tokens": 0, "hit_tokens": 24}
    wait_for(lambda: shown(shard).get("test") == {"stored_tokens": 24, "dropped_tokens": 0})
    wait_for(lambda: shown(shard).get("test.2") == {**hit, "hit_tokens_from_host": 24})
    second.retrieve(TOKENS)
    second.close()
    assert shown(shard)["test.2"]["requests"] == 2


@pytest.fixture
def create(config: KVRayConfig) -> Iterator[Callable[..., TensorCache]]:
    """Get or create caches by id, which end with the test."""
    yield lambda name, metadata=METADATA: TensorCache.get_or_create(name, config, metadata)
    TensorCache.destroy("one")
    TensorCache.destroy("two")


def test_an_id_names_one_cache_with_a_name_of_its_own_until_it_is_destroyed_or_closed(create):
    made = create("one")
    assert create("one", replace(METADATA)) is made
    assert TensorCache.get("one") is made
    second = create("two")
    assert second is not made
    assert [made._place[2], second._place[2]] == ["test", "test.2"]
    for _ in range(2):
        TensorCache.destroy("one")
    assert made.closed
    assert TensorCache.get("one") is None
    again = create("one", changed(METADATA, revision="2"))
    assert again is not made
    assert again._place[2] == "test"
    again.close()
    assert TensorCache.get("one") is None
    assert not create("one").closed


def test_other_values_under_a_known_id_are_refused(create, config):
    create("one")
    with pytest.raises(ConfigError, match="'one' exists with other values of num_layers, layout"):
        create("one", changed(METADATA, num_layers=1, layout="vllm"))
    other = config.model_copy(update={"cluster_name": "other"})
    with pytest.raises(ConfigError, match="other values of the configuration; destroy it"):
        TensorCache.get_or_create("one", other, METADATA)


def test_threads_that_ask_at_once_get_one_cache(create):
    together = threading.Barrier(8)

    def ask(_: int) -> TensorCache:
        together.wait()
        return create("one")

    with ThreadPoolExecutor(8) as pool:
        assert len(set(map(id, pool.map(ask, range(8))))) == 1


SMALL = LlamaConfig(
    vocab_size=256,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.2,
)


def test_a_model_goes_on_from_retrieved_blocks_as_from_its_own(config, monkeypatch):
    monkeypatch.setattr(example_program, "TINY", SMALL)
    monkeypatch.setattr(example_program, "TEXT", example_program.TEXT[:200])
    first, second = (example_program.answer(config, None) for _ in range(2))
    assert (first.hit_tokens, second.hit_tokens) == (0, (first.prompt_tokens - 1) // 32 * 32)
    assert first.tokens == second.tokens


# -- random prompts that share prefixes: what is retrieved is what was stored -------------------


def true_kv(tokens: list[int], metadata: TensorMetadata) -> torch.Tensor:
    """Return a stand-in for a model's KV: each token's depends on all tokens up to it."""
    seeds = [crc32(bytes(tokens[: at + 1])) for at in range(len(tokens))]
    each = [as_blob(random_blob(1, metadata, seed=seed)) for seed in seeds]
    none = as_blob(random_blob(0, metadata))
    token_dim = 3 if metadata.layout == "huggingface" else 2
    return torch.cat([none, *each], dim=token_dim).view(metadata.dtype)


STORES = st.lists(
    st.tuples(
        st.lists(st.integers(0, 1), max_size=5),
        st.integers(0, BLOCK - 1),
        st.integers(0, 5),
        st.booleans(),
    ),
    min_size=1,
    max_size=6,
)
"""(blocks, tokens behind the last, blocks that are masked, whether the call waits)."""


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    stores=STORES,
    layout=st.sampled_from(["huggingface", "vllm"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e5m2]),
)
@example(
    [([0, 0], 0, 0, True), ([0, 0, 1], 0, 1, False), ([0, 0, 1, 0], 2, 3, True)],
    "vllm",
    torch.bfloat16,
)
def test_retrieve_returns_what_was_stored_for_lookup_tokens(config, shard, stores, layout, dtype):
    shard.clear(10)
    with TensorCache(config, changed(METADATA, layout=layout, dtype=dtype)) as cache:
        held: set[tuple[int, ...]] = set()  # the full-block prefixes that must be found
        for blocks, num_more, num_masked, blocking in stores:
            tokens, first = tokens_of(blocks, num_more), min(num_masked, len(blocks)) * BLOCK
            kv = cut(true_kv(tokens, cache.metadata), first, len(tokens), cache.metadata)
            before = len(held)
            if not first or tuple(tokens[:first]) in held:
                ends = range(first + BLOCK, len(tokens) + 1, BLOCK)
                held |= {tuple(tokens[:end]) for end in ends}
            mask = suffix_mask(len(tokens), first)
            num_stored = cache.store(tokens, kv, mask, blocking=blocking)
            assert num_stored == blocking * (len(held) - before) * BLOCK
            assert cache.flush()
            assert cache.counters().get("stored_tokens", 0) == len(held) * BLOCK
        for blocks, num_more, num_masked, as_tuple in stores:
            tokens = tokens_of(blocks, num_more)
            check_found(cache, tokens, held, min(num_masked, len(blocks)) * BLOCK, as_tuple)
        assert shard.status()["arena"]["leased_blocks"] == 0


def tokens_of(blocks: list[int], num_more: int) -> list[int]:
    """Return a prompt whose blocks differ in their last tokens only."""
    ends = [[0] * (BLOCK - 1) + [one] for one in blocks]
    return [token for block in ends for token in block] + [0] * num_more


def check_found(cache, tokens, held, first, as_tuple) -> None:
    expected = 0
    while tuple(tokens[: expected + BLOCK]) in held and expected + BLOCK <= len(tokens):
        expected += BLOCK
    assert cache.lookup(tokens) == expected
    kv, ret_mask = cache.retrieve(tokens, suffix_mask(len(tokens), first), as_tuple)
    assert ret_mask.dtype == torch.bool
    assert ret_mask.tolist() == [first <= at < expected for at in range(len(tokens))]
    if first < expected:
        assert isinstance(kv, tuple if as_tuple else torch.Tensor)
        assert_same(kv, cut(true_kv(tokens, cache.metadata), first, expected, cache.metadata))
    else:
        assert kv == ()


PAGE = (Path(__file__).parents[3] / "docs" / "python_api.md").read_text()


def test_every_example_of_the_page_runs_top_to_bottom(config, monkeypatch):
    monkeypatch.setenv("KVRAY_ARENA__DIR", str(config.arena.dir))
    monkeypatch.setenv("KVRAY_ARENA__CAPACITY", str(config.arena.capacity))
    found = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    # tests/ray/test_programs.py runs those with a client.
    codes = [one for one in found if "Client" not in one]
    names: dict[str, object] = {}
    for code in codes:
        exec(code, names)
    assert len(codes) >= 6


def test_page_and_help_name_everything_that_is_public():
    names = [name for name in kvray.__all__ if not name.startswith("__")]
    assert [name for name in names if f"`{name}" not in PAGE] == []
    assert all(getattr(kvray, name).__name__ == name for name in names)
    said = TensorMetadata.__doc__ or ""
    fields = TensorMetadata.__dataclass_fields__
    assert [name for name in fields if f"        {name}: " not in said] == []
