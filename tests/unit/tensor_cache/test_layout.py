from typing import Any

import numpy as np
import pytest
import torch

from kvray.errors import LayoutMismatch
from kvray.tensor_cache import layout
from tests.unit.tensor_cache.conftest import BLOCK, METADATA, changed
from tests.unit.tensor_cache.kv import assert_same, cut, pairs, random_blob

VLLM = changed(METADATA, layout="vllm")


def packed(blob: Any, metadata: Any = METADATA, blocks: Any = (0, 1)) -> Any:
    return layout.pack(layout.heads_of(blob, metadata), np.array(blocks), metadata)


def test_a_block_is_stored_layer_by_layer_keys_before_values_head_by_head() -> None:
    blob = random_blob(2 * BLOCK, METADATA)
    for block in (0, 1):
        tokens = cut(blob, block * BLOCK, (block + 1) * BLOCK, METADATA)
        assert packed(blob)[block].tobytes() == tokens.numpy().tobytes()


def test_both_layouts_give_equal_bytes() -> None:
    blob = random_blob(2 * BLOCK, METADATA)
    assert np.array_equal(packed(blob.transpose(2, 3), VLLM), packed(blob))


def test_pairs_and_a_blob_give_equal_bytes() -> None:
    blob = random_blob(2 * BLOCK, METADATA)
    assert np.array_equal(packed(pairs(blob)), packed(blob))


def test_blocks_with_gaps_between_them_are_packed_each_for_itself() -> None:
    blob = random_blob(6 * BLOCK, METADATA)
    assert np.array_equal(
        packed(blob, blocks=(0, 2, 3, 5)), packed(blob, blocks=range(6))[[0, 2, 3, 5]]
    )


def test_no_blocks_pack_to_no_bytes() -> None:
    assert packed(random_blob(3, METADATA), blocks=()).shape == (0, METADATA.block_bytes)


@pytest.mark.parametrize("metadata", [METADATA, VLLM])
@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool],
)
def test_unpacking_gives_back_every_bit(metadata: Any, dtype: torch.dtype) -> None:
    metadata = changed(metadata, dtype=dtype)
    blob = random_blob(3 * BLOCK, metadata)
    room = layout.empty_blob(3 * BLOCK, metadata)
    heads = layout.heads_of(room, metadata)
    layout.unpack(packed(blob, metadata, [0]), heads, 0, metadata)
    layout.unpack(packed(blob, metadata, [1, 2]), heads, 1, metadata)
    assert_same(room, blob)


def test_strided_and_differentiable_tensors_are_packed_as_they_are() -> None:
    wide = random_blob(4 * BLOCK, changed(METADATA, head_size=16)).requires_grad_()
    assert np.array_equal(
        packed(wide[..., ::2, ::2]), packed(wide[..., ::2, ::2].detach().contiguous())
    )


@pytest.mark.parametrize(
    ("kv", "sentence"),
    [
        (random_blob(8, changed(METADATA, num_layers=2)), "has 2 layers, not 3"),
        (random_blob(8, changed(METADATA, dtype=torch.float16)), "float16, not torch.float32"),
        (random_blob(8, VLLM), r"shape \[8, 2, 8\].*\[2, num_tokens, 8\]"),
        (random_blob(8, METADATA)[:, :, None], r"take the batch dimension off with tensor\[0\]"),
        (random_blob(8, METADATA)[..., :4], r"shape \[2, 8, 4\]"),
        (torch.empty(3, 2, 2, 8, 8, device="meta"), "dense"),
        (torch.zeros(3, 3, 2, 8, 8), "Layer 0 of the KV holds 3 things"),
        ([([1], [2])] * 3, "holds a list; give torch tensors"),
        (None, "is a NoneType that holds no pairs"),
        ([1, 2, 3], "is a list that holds no pairs"),
        ([pairs(random_blob(8, METADATA))[0]] * 2 + [(torch.zeros(2, 4, 8),) * 2], "numbers of"),
    ],
)
def test_tensors_that_do_not_fit_the_metadata_are_refused(kv: Any, sentence: str) -> None:
    with pytest.raises(LayoutMismatch, match=sentence):
        layout.heads_of(kv, METADATA)
