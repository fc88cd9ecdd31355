from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from kvray.actors.shard.shard import Shard
from kvray.errors import ConfigError, LayoutMismatch
from kvray.tensor_cache import KV, TensorCache
from tests.unit.tensor_cache.conftest import BLOCK, METADATA, MakeCache, changed
from tests.unit.tensor_cache.kv import as_blob, assert_same, cut, pairs, random_blob, suffix_mask
from tests.waiting import wait_for

TOKENS = list(range(100, 100 + 5 * BLOCK))
VLLM = changed(METADATA, layout="vllm")

pytestmark = pytest.mark.usefixtures("shard")

# -- round trips --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2])
@pytest.mark.parametrize("metadata", [METADATA, VLLM], ids=["huggingface", "vllm"])
def test_what_was_stored_is_retrieved_bit_for_bit(
    make_cache: MakeCache, metadata: Any, dtype: torch.dtype
) -> None:
    cache = make_cache(layout=metadata.layout, dtype=dtype)
    blob = random_blob(len(TOKENS), cache.metadata)
    assert cache.store(TOKENS, pairs(blob)) == len(TOKENS)
    kv, ret_mask = cache.retrieve(TOKENS)
    assert_same(kv, blob)
    assert ret_mask.dtype == torch.bool
    assert ret_mask.tolist() == [True] * len(TOKENS)


def test_tuples_and_blobs_go_in_and_come_out(make_cache: MakeCache) -> None:
    cache = make_cache()
    blob = random_blob(len(TOKENS), METADATA)
    cache.store(TOKENS, blob)
    as_tuple, _ = cache.retrieve(TOKENS)
    as_one, _ = cache.retrieve(TOKENS, return_tuple=False)
    assert isinstance(as_tuple, tuple)
    assert [len(layer) for layer in as_tuple] == [2, 2, 2]
    assert isinstance(as_one, torch.Tensor)
    assert_same(as_tuple, blob)
    assert_same(as_one, blob)


def test_what_is_retrieved_belongs_to_the_caller(make_cache: MakeCache) -> None:
    cache = make_cache()
    blob = random_blob(len(TOKENS), METADATA)
    cache.store(TOKENS, blob)
    kv, _ = cache.retrieve(TOKENS, return_tuple=False)
    assert isinstance(kv, torch.Tensor)
    kv.zero_()
    assert_same(cache.retrieve(TOKENS)[0], blob)


def test_a_cache_of_one_layout_answers_one_of_the_other(make_cache: MakeCache) -> None:
    huggingface, vllm = make_cache(), make_cache(layout="vllm")
    blob = random_blob(len(TOKENS), METADATA)
    huggingface.store(TOKENS, blob)
    assert_same(vllm.retrieve(TOKENS)[0], blob.transpose(2, 3).contiguous())


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": torch.int32},
        {"num_kv_heads": 4, "head_size": 4},
        {"tokens_per_block": 2, "head_size": 16},
        {"revision": "2"},
        {"salt": "tenant"},
        {"rank": 1, "world_size": 2},
    ],
)
def test_caches_of_other_metadata_do_not_share(
    make_cache: MakeCache, changes: dict[str, Any]
) -> None:
    make_cache().store(TOKENS, random_blob(len(TOKENS), METADATA))
    other = make_cache(**changes)
    assert other.lookup(TOKENS) == 0
    assert other.retrieve(TOKENS)[0] == ()


def test_the_tail_that_fills_no_block_is_not_stored(make_cache: MakeCache) -> None:
    cache = make_cache()
    tokens = [*TOKENS, 1, 2, 3]
    blob = random_blob(len(tokens), METADATA)
    assert cache.store(tokens, blob) == len(TOKENS)
    kv, ret_mask = cache.retrieve(tokens)
    assert_same(kv, cut(blob, 0, len(TOKENS), METADATA))
    assert ret_mask.tolist() == [True] * len(TOKENS) + [False] * 3


def test_less_than_a_block_is_neither_stored_nor_found(make_cache: MakeCache) -> None:
    cache = make_cache()
    for tokens in ([], TOKENS[:3]):
        assert cache.store(tokens, random_blob(len(tokens), METADATA)) == 0
        kv, ret_mask = cache.retrieve(tokens)
        assert kv == ()
        assert ret_mask.tolist() == [False] * len(tokens)
        assert cache.lookup(tokens) == 0


def test_prompts_share_the_blocks_of_their_common_prefix(make_cache: MakeCache) -> None:
    cache = make_cache()
    blob = random_blob(len(TOKENS), METADATA)
    cache.store(TOKENS, blob)
    other = [*TOKENS[: 2 * BLOCK + 1], *range(BLOCK)]
    assert cache.lookup(other) == 2 * BLOCK
    kv, ret_mask = cache.retrieve(other)
    assert_same(kv, cut(blob, 0, 2 * BLOCK, METADATA))
    assert int(ret_mask.sum()) == 2 * BLOCK
    assert cache.store(other, random_blob(len(other), METADATA, seed=1)) == BLOCK


def test_nothing_is_found_of_unknown_tokens(make_cache: MakeCache) -> None:
    cache = make_cache()
    for return_tuple in (True, False):
        kv, ret_mask = cache.retrieve(TOKENS, return_tuple=return_tuple)
        assert kv == ()
        assert not ret_mask.any()


def test_many_steps_of_conversion_make_one_answer(
    make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvray.tensor_cache.cache._STEP_BYTES", 2 * METADATA.block_bytes)
    cache = make_cache()
    blob = random_blob(len(TOKENS), METADATA)
    assert cache.store(TOKENS, blob) == len(TOKENS)
    assert_same(cache.retrieve(TOKENS)[0], blob)


# -- masks --------------------------------------------------------------------------------------


def test_a_suffix_is_stored_behind_its_prefix(make_cache: MakeCache) -> None:
    cache = make_cache()
    blob = random_blob(len(TOKENS), METADATA)
    head = 2 * BLOCK
    cache.store(TOKENS[:head], cut(blob, 0, head, METADATA))
    mask = suffix_mask(len(TOKENS), head)
    assert cache.store(TOKENS, cut(blob, head, len(TOKENS), METADATA), mask) == 3 * BLOCK
    assert_same(cache.retrieve(TOKENS)[0], blob)


def test_only_the_suffix_is_retrieved(make_cache: MakeCache) -> None:
    cache = make_cache()
    blob = random_blob(len(TOKENS), METADATA)
    cache.store(TOKENS, blob)
    tokens = [*TOKENS, 1]
    kv, ret_mask = cache.retrieve(tokens, suffix_mask(len(tokens), BLOCK))
    assert_same(kv, cut(blob, BLOCK, len(TOKENS), METADATA))
    assert ret_mask.tolist() == [False] * BLOCK + [True] * 4 * BLOCK + [False]


def test_a_suffix_that_begins_behind_what_is_stored_is_not_found(make_cache: MakeCache) -> None:
    cache = make_cache()
    cache.store(TOKENS[: 2 * BLOCK], random_blob(2 * BLOCK, METADATA))
    kv, ret_mask = cache.retrieve(TOKENS, suffix_mask(len(TOKENS), 3 * BLOCK))
    assert kv == ()
    assert not ret_mask.any()


def test_a_suffix_without_its_prefix_is_not_stored_and_says_so(
    make_cache: MakeCache, caplog: pytest.LogCaptureFixture
) -> None:
    cache = make_cache()
    mask = suffix_mask(len(TOKENS), BLOCK)
    for _ in range(2):
        assert cache.store(TOKENS, random_blob(4 * BLOCK, METADATA), mask) == 0
    assert cache.counters()["dropped_tokens"] == 2 * 4 * BLOCK
    assert [r.levelname for r in caplog.records if "not stored" in r.message] == ["WARNING"]


# -- storing again, and in the background -------------------------------------------------------


@pytest.mark.parametrize("skip_existing", [True, False])
def test_what_is_there_is_not_stored_again(make_cache: MakeCache, skip_existing: bool) -> None:
    cache = make_cache()
    blob = random_blob(len(TOKENS), METADATA)
    cache.store(TOKENS, blob)
    assert cache.store(TOKENS, blob, skip_existing=skip_existing) == 0
    assert cache.counters()["dropped_tokens"] == 0


def test_a_store_in_the_background_keeps_no_hold_on_the_tensors(make_cache: MakeCache) -> None:
    cache = make_cache()
    blob = random_blob(len(TOKENS), METADATA)
    given = blob.clone()
    assert cache.store(TOKENS, pairs(given), blocking=False) == 0
    given.zero_()
    assert cache.flush()
    assert_same(cache.retrieve(TOKENS)[0], blob)
    assert cache.counters()["stored_tokens"] == len(TOKENS)


def test_a_background_store_adds_what_is_missing(make_cache: MakeCache) -> None:
    cache = make_cache()
    blob = random_blob(len(TOKENS), METADATA)
    cache.store(TOKENS[: 2 * BLOCK], cut(blob, 0, 2 * BLOCK, METADATA))
    mask = suffix_mask(len(TOKENS), BLOCK)
    cache.store(TOKENS, cut(blob, BLOCK, len(TOKENS), METADATA), mask, blocking=False)
    assert cache.flush()
    assert_same(cache.retrieve(TOKENS)[0], blob)
    assert cache.counters()["stored_tokens"] == len(TOKENS)


def test_close_finishes_background_stores(make_cache: MakeCache) -> None:
    cache, other = make_cache(), make_cache()
    for number in range(8):
        tokens = [number, *TOKENS[1:]]
        cache.store(tokens, random_blob(len(tokens), METADATA, seed=number), blocking=False)
    cache.close()
    assert [other.lookup([number, *TOKENS[1:]]) for number in range(8)] == [len(TOKENS)] * 8


def test_a_background_that_is_full_drops_and_says_so(
    make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = make_cache()
    monkeypatch.setattr(cache._stores, "has_room", lambda size: False)
    for _ in range(2):
        cache.store(TOKENS, random_blob(len(TOKENS), METADATA), blocking=False)
    assert cache.counters()["dropped_tokens"] == 2 * len(TOKENS)
    assert [r.levelname for r in caplog.records if "background" in r.message] == ["WARNING"]


# -- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        (("text", random_blob(4, METADATA)), ConfigError, "list of integers"),
        ((TOKENS, random_blob(len(TOKENS) - 1, METADATA)), LayoutMismatch, "19 tokens .* 20"),
        (
            (TOKENS, random_blob(len(TOKENS), METADATA), suffix_mask(len(TOKENS), BLOCK)),
            LayoutMismatch,
            "20 tokens where tokens and mask ask for 16",
        ),
        (
            (TOKENS, random_blob(len(TOKENS) - 3, METADATA), suffix_mask(len(TOKENS), 3)),
            ConfigError,
            "multiple of tokens_per_block = 4",
        ),
        ((TOKENS, random_blob(len(TOKENS), METADATA).half()), LayoutMismatch, "float16"),
        ((TOKENS, random_blob(len(TOKENS), VLLM)), LayoutMismatch, "layout 'huggingface'"),
    ],
)
def test_bad_input_gets_a_sentence_and_stores_nothing(
    make_cache: MakeCache, arguments: Any, error: type[Exception], sentence: str
) -> None:
    cache = make_cache()
    with pytest.raises(error, match=sentence):
        cache.store(*arguments)
    assert cache.lookup(TOKENS) == 0


def test_a_path_without_a_checkpoint_is_refused(make_cache: MakeCache) -> None:
    with pytest.raises(ConfigError, match="no-such-model"):
        make_cache(model="/no-such-model")


def test_checkpoints_at_one_path_do_not_share(
    make_cache: MakeCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    namespaces = []
    checkpoint = tmp_path / "model"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}")
    for content in (b"one", b"two"):
        (checkpoint / "pytorch_model.bin").write_bytes(content)
        namespaces.append(make_cache(model=str(checkpoint)).namespace)
    assert namespaces[0] != namespaces[1]


# -- its life -----------------------------------------------------------------------------------


def test_close_twice_is_fine_and_use_after_it_is_refused(make_cache: MakeCache) -> None:
    with make_cache() as cache:
        assert cache.lookup(TOKENS) == 0
    cache.close()
    for call in (cache.lookup, cache.retrieve):
        with pytest.raises(ConfigError, match="closed"):
            call(TOKENS)
    with pytest.raises(ConfigError, match="closed"):
        cache.store(TOKENS, random_blob(len(TOKENS), METADATA))


def test_the_shard_shows_each_cache_with_its_figures(make_cache: MakeCache, shard: Shard) -> None:
    first, second = make_cache(), make_cache(layout="vllm")
    blob = random_blob(len(TOKENS), METADATA)
    first.store(TOKENS, blob)
    second.retrieve([*TOKENS, 1])

    def shown() -> dict[str, Any]:
        ranks = {one["replica"]: dict(one["counters"]) for one in shard.status()["replicas"]}
        for counters in ranks.values():
            counters.pop("uptime_s", None)
        return ranks

    stored = {"stored_tokens": 20, "dropped_tokens": 0}
    hit = {"requests": 1, "prompt_tokens": 21, "local_tokens": 0, "hit_tokens": 20}
    wait_for(lambda: shown().get("test") == stored)
    wait_for(lambda: shown().get("test.2") == {**hit, "hit_tokens_from_host": 20})


def test_the_last_figures_of_a_closed_cache_stay(make_cache: MakeCache, shard: Shard) -> None:
    keeps_the_link = make_cache()
    cache = make_cache()
    cache.store(TOKENS, random_blob(len(TOKENS), METADATA))
    cache.close()
    shown = {one["replica"]: one["counters"] for one in shard.status()["replicas"]}
    assert shown["test.2"]["stored_tokens"] == len(TOKENS)
    keeps_the_link.close()


# -- what is no argument ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "metadata", "words"),
    [
        ("kvray.yaml", METADATA, "load_config.*not a str"),
        ({}, METADATA, "load_config.*not a dict"),
        (None, {"model": "tiny"}, "TensorMetadata, not a dict"),
    ],
)
def test_arguments_of_another_kind_are_refused_in_a_sentence(
    given: Any, metadata: Any, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        TensorCache(given, metadata)
    with pytest.raises(ConfigError, match=words):
        TensorCache.get_or_create("one", given, metadata)


CONFIG = LlamaConfig(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.2,
)
PROMPT = [(7 * index * index + 3 * index) % 128 for index in range(5 * BLOCK + 3)]


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG).to(request.param).eval()


def fields_of(model: Any) -> dict[str, Any]:
    """Return the fields of the metadata that follow from the model."""
    return {
        "model": "tiny-llama",
        "dtype": model.dtype,
        "num_layers": model.config.num_hidden_layers,
        "num_kv_heads": model.config.num_key_value_heads,
        "head_size": model.config.head_dim,
    }


@torch.no_grad()
def prefill(model: Any, tokens: list[int], past: Any = None) -> Any:
    return model(torch.tensor([tokens]), past_key_values=past, use_cache=True)


def to_pairs(past: Any) -> KV:
    return tuple((layer.keys[0], layer.values[0]) for layer in past.layers)


def to_past(kv: KV) -> DynamicCache:
    past = DynamicCache()
    for index, (keys, values) in enumerate(kv):
        past.update(keys[None], values[None], index)
    return past


@torch.no_grad()
def continue_greedily(model: Any, past: Any, tokens: list[int], count: int) -> list[int]:
    """Return the next tokens after `tokens`, of which `past` has the first ones."""
    answer: list[int] = []
    rest = tokens[past.get_seq_length() :]
    for _ in range(count):
        logits = model(torch.tensor([rest]), past_key_values=past, use_cache=True).logits
        rest = [int(logits[0, -1].argmax())]
        answer += rest
    return answer


def test_past_key_values_round_trip_bit_for_bit(model: Any, make_cache: MakeCache) -> None:
    cache = make_cache(**fields_of(model))
    past = prefill(model, PROMPT).past_key_values
    cache.store(PROMPT, to_pairs(past))
    kv, ret_mask = cache.retrieve(PROMPT)
    found = 5 * BLOCK
    assert int(ret_mask.sum()) == found
    expected = as_blob(to_pairs(past))[:, :, :, :found]
    assert torch.equal(as_blob(kv), expected)


def test_generation_goes_on_from_retrieved_blocks_as_from_its_own(
    model: Any, make_cache: MakeCache
) -> None:
    head = PROMPT[: 5 * BLOCK]
    past = prefill(model, head).past_key_values
    make_cache(**fields_of(model)).store(head, to_pairs(past))
    expected = continue_greedily(model, past, PROMPT, 12)
    kv, _ = make_cache(**fields_of(model)).retrieve(PROMPT)
    assert continue_greedily(model, to_past(kv), PROMPT, 12) == expected


def test_a_past_that_carries_gradients_is_stored(model: Any, make_cache: MakeCache) -> None:
    cache = make_cache(**fields_of(model))
    past = model(torch.tensor([PROMPT]), use_cache=True).past_key_values
    assert past.layers[0].keys.requires_grad
    assert cache.store(PROMPT, to_pairs(past)) == 5 * BLOCK


def test_the_batch_dimension_is_refused_with_the_fix(model: Any, make_cache: MakeCache) -> None:
    cache = make_cache(**fields_of(model))
    past = prefill(model, PROMPT).past_key_values
    with pytest.raises(LayoutMismatch, match=r"take the batch dimension off with tensor\[0\]"):
        cache.store(PROMPT, [(layer.keys, layer.values) for layer in past.layers])
    with pytest.raises(LayoutMismatch, match="holds 3 things; give a pair"):
        cache.store(PROMPT, past)
