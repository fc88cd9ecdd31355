"""A real Hugging Face model's past_key_values through the cache."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from kvray.errors import LayoutMismatch
from kvray.tensor_cache import KV
from tests.unit.tensor_cache.conftest import BLOCK, MakeCache
from tests.unit.tensor_cache.kv import as_blob

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

pytestmark = pytest.mark.usefixtures("shard")


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
