"""What ranks read of blocks that engines of other sizes have stored, byte for byte."""

from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvray.engine.cache_layout import CacheLayout, Group, Region, readable_sizes, resliced_parts
from tests.kit.devices import even_steps

SIZES = [1, 2, 4, 8]


def layout_of(memory: list[Any], **group: Any) -> CacheLayout:
    """Return the layout of regions u8 [num_pages, planes, bytes], one layer every two planes."""
    regions = []
    for array in memory:
        num_pages, planes, plane = array.shape
        pages = torch.from_numpy(array.reshape(num_pages, -1))
        steps = even_steps(planes // 2, 2 * plane)
        regions.append(Region(pages=pages, steps=steps, num_planes=planes))
    fields = {"window": None, "own": tuple(regions), **group}
    groups = (Group(layers=(0,), **fields),)
    return CacheLayout(
        groups=groups, dtype="float16", kv_factor=2, tokens_per_block=4, is_flat=True
    )


def share(heads: Any, rank: int, size: int) -> Any:
    """Return a rank's own bytes of [num_pages, planes, heads, bytes], as its engine has them."""
    count = heads.shape[2] // size
    mine = heads[:, :, rank * count : (rank + 1) * count]
    return np.ascontiguousarray(mine).reshape(*heads.shape[:2], -1)


@given(
    num_layers=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    head_bytes=st.integers(1, 5),
    num_heads=st.sampled_from([8, 16]),
    sizes=st.permutations(SIZES).map(lambda drawn: drawn[:2]),
    seed=st.integers(0, 2**16),
)
def test_pieces_are_what_the_rank_would_have_made(num_layers, head_bytes, num_heads, sizes, seed):
    random, (stored_by, size) = np.random.default_rng(seed), sizes
    whole = [
        random.integers(0, 256, (2, 2 * layers, num_heads, head_bytes), dtype=np.uint8)
        for layers in num_layers
    ]
    slots = [
        np.concatenate([share(heads, rank, stored_by)[1].ravel() for heads in whole])
        for rank in range(stored_by)
    ]
    for rank in range(size):
        wanted = [share(heads, rank, size) for heads in whole]
        memory = [np.zeros_like(array) for array in wanted]
        layout = layout_of(memory)
        assert stored_by in readable_sizes(layout, size, num_heads)
        for part in resliced_parts(layout, rank, size, stored_by, 4):
            slot, regions = slots[part.index], part.regions
            assert part.block_bytes == len(slot)
            edges = pairwise(accumulate([region.size for region in regions], initial=0))
            for region, (start, stop) in zip(regions, edges, strict=True):
                if not region.is_gap:
                    region.pages.numpy()[1] = slot[start:stop]
                    assert region.steps[0].layers
        for found, expected in zip(memory, wanted, strict=True):
            assert (found[1] == expected[1]).all()
            assert not found[0].any()


def test_a_piece_tells_which_layer_reads_it():
    layout = layout_of([np.zeros((1, 6, 32), dtype=np.uint8)])
    (part,) = resliced_parts(layout, 0, 2, 1, 4)
    layers = [region.steps[0].layers[0] for region in part.regions if not region.is_gap]
    assert layers == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("size", "num_heads", "found"),
    [
        (1, 8, (2, 4, 8)),
        (2, 8, (1, 4, 8)),
        (8, 8, (1, 2, 4)),
        (2, 2, (1,)),
        (1, 3, ()),
        (2, 6, (1,)),
        (4, 6, ()),  # no engine has its heads dealt so
        (4, 2, ()),  # ranks hold the same heads
        (6, 6, (1, 2)),
        (2, 0, ()),
        (2, None, (1, 4, 8)),
    ],
)
def test_sizes_that_deal_heads_evenly(size, num_heads, found):
    layout = layout_of([np.zeros((1, 4, 48), dtype=np.uint8)])
    assert readable_sizes(layout, size, num_heads) == found


def test_what_all_ranks_have_alike_is_not_cut():
    """Nor are other kinds: see `UNCUT` in tests/trtllm/test_ranks.py."""
    memory = [np.zeros((1, 4, 48), dtype=np.uint8)]
    (region,) = layout_of(memory).groups[0].own
    for own in ((region,), ()):
        assert readable_sizes(layout_of(memory, own=own, shared=(region,)), 2, 8) == ()
