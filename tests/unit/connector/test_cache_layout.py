"""Whatever the engine says of its KV cache becomes groups, regions and parts, and comes back."""

from typing import Any

import numpy as np
import pytest
import torch

from kvray.connector.read_layout import layout_of_tensor, read_layout
from kvray.engine.cache_layout import CacheLayout, LayerRange
from kvray.engine.device.gpu import open_pool
from kvray.engine.device.pool import Load
from kvray.errors import ConfigError
from kvray.identity.keys import chain_keys
from kvray.store import PartRequest
from tests.kit.connector import group_of, layout_of, region_of

MEMORY = torch.arange(4096, dtype=torch.int32).view(torch.uint8)


def region(
    size: int, layers: list[int], *, at: int = 0, stride: int = 0, roles: str = "key value"
) -> Any:
    return region_of(MEMORY.as_strided((4, size), (stride or size, 1), at), layers, roles)


def part_requests(layout: CacheLayout) -> list[list[PartRequest]]:
    """Return what each of two ranks' leases must have."""
    return [[part.request for part in layout.parts(rank, 2, 4)] for rank in range(2)]


def test_a_tensor_is_one_group_whose_layers_lie_one_after_the_other():
    layout = layout_of_tensor(torch.zeros(5, 3, 2, 8, dtype=torch.float16))
    (part,) = layout.parts(0, 1, 4)
    assert part.block_bytes == 3 * 2 * 8 * 2
    assert part.regions[0].steps == (
        LayerRange((0,), 0, 32),
        LayerRange((1,), 32, 64),
        LayerRange((2,), 64, 96),
    )
    assert (layout.is_flat, layout.dtype, layout.kv_factor) == (True, "float16", 2)


def test_ranks_have_parts_of_their_own():
    layout = layout_of_tensor(torch.zeros(5, 3, 2, 8))
    assert layout.num_parts(4) == 4
    assert [layout.parts(rank, 4, 4)[0].index for rank in range(4)] == [0, 1, 2, 3]
    assert all(layout.parts(rank, 4, 4)[0].is_stored_here for rank in range(4))
    assert part_requests(layout) == [[PartRequest(0, None, 192)], [PartRequest(1, None, 192)]]


def test_a_latent_cache_is_stored_by_one_rank_and_read_by_all():
    layout = layout_of_tensor(torch.zeros(5, 3, 1, 8))
    assert layout.num_parts(4) == 1
    parts = [layout.parts(rank, 4, 4)[0] for rank in range(4)]
    assert [part.index for part in parts] == [0, 0, 0, 0]
    assert [part.is_stored_here for part in parts] == [True, False, False, False]
    assert part_requests(layout) == [[PartRequest(0, None, 96)], [PartRequest(0, None, 96)]]
    assert layout_of_tensor(torch.zeros(5, 3, 1, 8), may_be_latent=False).num_parts(4) == 4


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(4, 8), torch.zeros(4, 1, 2, 3, 8), torch.zeros(8, 2, 2, 8)[::2]],
    ids=["flat", "five", "strided"],
)
def test_a_pool_of_another_shape_is_refused_with_it(tensor):
    with pytest.raises(ConfigError, match=r"has shape \[4"):
        layout_of_tensor(tensor)


def test_groups_with_windows_and_shared_regions_become_parts_of_each_rank():
    layout = read_layout(
        layout_of(
            group_of(
                0, [0, 2], region(64, [0, 2]), replicated_regions=(region(8, [0], roles="key"),)
            ),
            group_of(1, [1], region(32, [1]), window_size=10),
        )
    )
    assert layout.num_parts(2) == 5
    assert part_requests(layout) == [
        [PartRequest(0, None, 64), PartRequest(2, None, 8), PartRequest(3, 3, 32)],
        [PartRequest(1, None, 64), PartRequest(2, None, 8), PartRequest(4, 3, 32)],
    ]
    first, shared, windowed = layout.parts(1, 2, 4)
    assert (first.group, shared.group, windowed.group) == (0, 0, 1)
    assert [first.is_stored_here, shared.is_stored_here] == [True, False]
    assert [first.block_bytes, shared.block_bytes, windowed.block_bytes] == [64, 8, 32]


def test_a_group_without_values_is_the_same_on_all_ranks():
    latent = layout_of(group_of(0, [0, 1], region(64, [0, 1], roles="key")))
    assert read_layout(latent).num_parts(8) == 1
    assert read_layout(latent, may_be_latent=False).num_parts(8) == 8


@pytest.mark.parametrize(
    ("size", "layers", "roles"),
    [(64, [0, 1, 0], "key"), (63, [0, 1], "key value")],
    ids=["mixed", "uneven"],
)
def test_a_page_whose_layers_cannot_be_told_apart_is_one_step(size, layers, roles):
    layout = read_layout(layout_of(group_of(0, [0, 1], region(size, layers, roles=roles))))
    regions = layout.groups[0].own + layout.groups[0].shared
    assert regions[0].steps == (LayerRange((0, 1), 0, size),)


def test_layouts_that_differ_are_described_differently():
    made = [
        layout_of(group_of(0, [0, 1], region(64, [0, 1]))),
        layout_of(group_of(0, [0, 1], region(64, [0, 1]), window_size=8)),
        layout_of(group_of(0, [0, 1], region(32, [0]), region(32, [1]))),
        layout_of(group_of(0, [0], region(64, [0]))),
        layout_of(group_of(0, [0, 1], replicated_regions=(region(64, [0, 1]),))),
    ]
    assert len({read_layout(one).describe() for one in made}) == len(made)
    assert read_layout(made[0]).describe() == read_layout(made[0]).describe()


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        (layout_of(group_of(1, [0], region(8, [0]))), "counted from 0"),
        (layout_of(group_of(0, [0])), "has no bytes"),
        (layout_of(group_of(0, [0], region(8, [0], stride=4))), "do not overlap"),
    ],
)
def test_a_layout_that_makes_no_sense_is_refused(layout, says):
    with pytest.raises(ConfigError, match=says):
        read_layout(layout)


def test_pages_of_several_regions_that_lie_apart_come_back(pair):
    arena, expected = pair.arena, MEMORY.clone()
    places = {8: 24, 40: 16}
    regions = [region(size, [at // 40], at=at, stride=64) for at, size in places.items()]
    layout = read_layout(layout_of(group_of(0, [0, 1], *regions)))
    (part,) = layout.parts(0, 1, 4)
    pool = open_pool(layout, [part], has_hooks=True)
    keys = chain_keys(range(2), tokens_per_block=1, seed=b"r" * 32)
    reserved = arena.reserve(keys, parent=None, depth=0, part=0, block_bytes=40)
    assert reserved
    ticket = pool.save(arena, part, np.array([3, 1]), reserved.slots, None)
    ticket.wait()
    assert arena.commit(reserved, arena.sums(reserved))
    assert ticket.sums is None or (ticket.sums == arena.sums(reserved)).all()

    pool.load(arena, [Load(part, reserved.slots, np.array([0, 2]))], None)

    for at, size in places.items():
        for source, target in ((3, 0), (1, 2)):
            start = source * 64 + at
            expected[target * 64 + at :][:size] = expected[start : start + size]
    assert (expected == MEMORY).all()
