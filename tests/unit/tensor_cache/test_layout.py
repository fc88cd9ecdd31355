from typing import Any

import numpy as np
import pytest
import torch

from kvray.errors import ConfigError, LayoutMismatch
from kvray.identity.keys import chain_keys
from kvray.tensor_cache import layout
from kvray.tensor_cache.layout import MaskedPrompt, read_prompt
from tests.unit.tensor_cache.kv import (
    BLOCK,
    METADATA,
    VLLM,
    assert_same,
    changed,
    cut,
    pairs,
    random_blob,
)


def packed(blob: Any, metadata: Any = METADATA, blocks: Any = (0, 1)) -> Any:
    return layout.pack(layout.heads_of(blob, metadata), np.array(blocks), metadata)


def test_a_block_is_stored_layer_by_layer_keys_before_values_head_by_head_from_any_form():
    blob = random_blob(2 * BLOCK)
    for block in (0, 1):
        tokens = cut(blob, block * BLOCK, (block + 1) * BLOCK)
        assert packed(blob)[block].tobytes() == tokens.numpy().tobytes()
    for same, metadata in ((blob.transpose(2, 3), VLLM), (pairs(blob), METADATA)):
        assert np.array_equal(packed(same, metadata), packed(blob))


def test_blocks_with_gaps_of_strided_and_differentiable_tensors_are_packed_each_for_itself():
    wide = random_blob(12 * BLOCK, changed(METADATA, head_size=16)).requires_grad_()
    strided, chosen = wide[..., ::2, ::2], [0, 2, 3, 5]
    every = packed(strided.detach().contiguous(), blocks=range(6))
    assert np.array_equal(packed(strided, blocks=chosen), every[chosen])
    assert packed(strided, blocks=()).shape == (0, METADATA.block_bytes)


@pytest.mark.parametrize("metadata", [METADATA, VLLM])
@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool],
)
def test_unpacking_gives_back_every_bit(metadata, dtype):
    metadata = changed(metadata, dtype=dtype)
    blob = random_blob(3 * BLOCK, metadata)
    room = layout.empty_blob(3 * BLOCK, metadata)
    heads = layout.heads_of(room, metadata)
    layout.unpack(packed(blob, metadata, [0]), heads, 0, metadata)
    layout.unpack(packed(blob, metadata, [1, 2]), heads, 1, metadata)
    assert_same(room, blob)


@pytest.mark.parametrize(
    ("kv", "sentence"),
    [
        (random_blob(8, changed(METADATA, num_layers=2)), "has 2 layers, not 3"),
        (random_blob(8, changed(METADATA, dtype=torch.float16)), "float16, not torch.float32"),
        (random_blob(8, VLLM), r"shape \[8, 2, 8\].*\[2, num_tokens, 8\]"),
        (random_blob(8)[:, :, None], r"take the batch dimension off with tensor\[0\]"),
        (random_blob(8)[..., :4], r"shape \[2, 8, 4\]"),
        (torch.empty(3, 2, 2, 8, 8, device="meta"), "dense"),
        (torch.zeros(3, 3, 2, 8, 8), "Layer 0 of the KV holds 3 things"),
        ([([1], [2])] * 3, "holds a list; give torch tensors"),
        (None, "is a NoneType that holds no pairs"),
        ([1, 2, 3], "is a list that holds no pairs"),
        ([pairs(random_blob(8))[0]] * 2 + [(torch.zeros(2, 4, 8),) * 2], "numbers of"),
    ],
)
def test_tensors_that_do_not_fit_the_metadata_are_refused(kv, sentence):
    with pytest.raises(LayoutMismatch, match=sentence):
        layout.heads_of(kv, METADATA)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"model": "other"}, {}),
        ({"revision": "main"}, {}),
        ({"variant": "lora-7"}, {}),
        ({"dtype": torch.float16}, {}),
        ({"dtype": torch.int32}, {}),
        ({"num_layers": 4}, {}),
        ({"num_kv_heads": 4, "head_size": 4}, {}),
        ({"num_kv_heads": 4, "tokens_per_block": 2}, {}),
        ({"tokens_per_block": 2, "head_size": 16}, {}),
        ({"tokens_per_block": 8}, {}),
        ({"world_size": 2}, {}),
        ({"world_size": 2, "rank": 0}, {"world_size": 2, "rank": 1}),
        # Name and revision do not run into each other.
        ({"model": "a@b", "revision": "c"}, {"model": "a", "revision": "b@c"}),
    ],
)
def test_what_changes_the_bytes_changes_the_namespace(one, other):
    one, other = (changed(METADATA, **changes).namespace() for changes in (one, other))
    assert one.digest() != other.digest()


def test_a_checkpoint_goes_by_its_fingerprint_and_revision_and_not_by_its_layout():
    assert VLLM.namespace() == METADATA.namespace()
    named = changed(METADATA, model="f00d")
    assert named.namespace() != named.namespace(fingerprint="f00d")
    one, other = (changed(METADATA, revision=r).namespace(fingerprint="f00d") for r in ("1", "2"))
    assert one != other


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_layers": 0}, "num_layers must be a whole number of at least 1, not 0"),
        ({"head_size": 8.0}, "head_size must be a whole number"),
        ({"num_kv_heads": True}, "num_kv_heads must be a whole number"),
        ({"tokens_per_block": -1}, "tokens_per_block must be a whole number"),
        ({"rank": -1}, "rank must be a whole number of at least 0"),
        ({"rank": 1}, "rank 1 is not below world_size 1"),
        ({"layout": "hf"}, "layout must be 'huggingface' or 'vllm', not 'hf'"),
        ({"dtype": "float32"}, "dtype must be a plain torch.dtype"),
        ({"dtype": torch.qint8}, "dtype must be a plain torch.dtype"),
        ({"dtype": torch.complex128}, "dtype must be a plain torch.dtype of at most 8 bytes"),
        ({"model": ""}, "model must be a name or the path"),
    ],
)
def test_values_that_no_model_has_are_refused(changes, sentence):
    with pytest.raises(ConfigError, match=sentence):
        changed(METADATA, **changes)


SEED = bytes(32)
TOKENS = list(range(10))


def read(tokens: Any, mask: Any = None) -> MaskedPrompt:
    return read_prompt(tokens, mask, tokens_per_block=4, seed=SEED)


def test_full_blocks_have_keys_and_the_tail_has_none():
    for tokens in (TOKENS, torch.tensor(TOKENS)):
        assert read(tokens).keys == chain_keys(TOKENS, tokens_per_block=4, seed=SEED)
    assert (read(TOKENS).num_blocks, read([], []).num_blocks) == (2, 0)


@pytest.mark.parametrize("kind", [torch.tensor, np.array, list])
def test_a_mask_begins_at_its_first_true(kind):
    prompt = read(TOKENS, kind([False] * 4 + [True] * 6))
    assert (prompt.num_masked, prompt.first, prompt.num_blocks) == (4, 1, 1)
    assert read(TOKENS, kind([False] * 8 + [True] * 2)).num_blocks == 0


@pytest.mark.parametrize(
    ("mask", "sentence"),
    [
        ([False] * 3 + [True] * 7, "multiple of tokens_per_block = 4, for example 0"),
        ([False] * 6 + [True] * 4, "for example 4"),
        ([True] * 4 + [False] * 6, "True before a False"),
        ([True] * 9, "one boolean for each of the 10 tokens"),
        ([1] * 10, "one boolean"),
        (torch.ones(1, 10, dtype=torch.bool), "one boolean"),
        (torch.ones(10, dtype=torch.bfloat16), "one boolean"),
        ([[True], [True, True]], "one boolean"),
    ],
)
def test_a_mask_that_is_no_suffix_of_blocks_is_refused(mask, sentence):
    with pytest.raises(ConfigError, match=sentence):
        read(TOKENS, mask)
