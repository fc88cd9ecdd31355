"""Pages come back from slots byte for byte, whatever their type and however they lie."""

import numpy as np
import pytest
import torch

from kvray.actors.shard.shard import Shard
from kvray.connector.model.read_layout import layout_of_tensor, read_layout
from kvray.engine.device.gpu import open_pool
from kvray.engine.device.pool import Load
from kvray.identity.keys import chain_keys
from tests.unit.connector.conftest import MakePair, arena_of
from tests.unit.connector.model.test_cache_layout import MEMORY, described, group, region

DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "int8", "uint8")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_factor", [1, 2])
def test_blocks_of_any_type_come_back(
    shard: Shard, make_pair: MakePair, dtype: str, kv_factor: int
) -> None:
    arena = arena_of(make_pair())
    made = torch.randint(0, 255, (6, 3, kv_factor, 8 * 4), dtype=torch.uint8)
    layout = layout_of_tensor(made.view(getattr(torch, dtype)))
    (part,) = layout.parts(0, 1, 4)
    pool = open_pool(layout, [part], has_hooks=True)
    keys = chain_keys(range(3), tokens_per_block=1, seed=dtype.encode().ljust(32, b"."))
    reserved = arena.reserve(keys, parent=None, depth=0, part=0, block_bytes=part.block_bytes)
    assert reserved
    ticket = pool.save(arena, part, np.array([4, 1, 2]), reserved.slots, pool.mark(None))
    ticket.wait()
    assert arena.commit(reserved, arena.sums(reserved))
    assert ticket.sums is None or (ticket.sums == arena.sums(reserved)).all()
    before = made.clone()
    made.zero_()

    pool.load(arena, [Load(part, reserved.slots[1:], np.array([0, 5]))], None).wait()

    assert (made[[0, 5]] == before[[1, 2]]).all()
    assert not made[1:5].any()


def test_pages_of_several_regions_that_lie_apart_come_back(
    shard: Shard, make_pair: MakePair
) -> None:
    arena, before = arena_of(make_pair()), MEMORY.clone()
    regions = region(24, [0], at=8, stride=64), region(16, [1], at=40, stride=64)
    layout = read_layout(described(group(0, [0, 1], *regions)))
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

    changed = torch.zeros(len(MEMORY), dtype=torch.bool)
    for source, target in ((3, 0), (1, 2)):
        for at, size in ((8, 24), (40, 16)):
            start, stop = target * 64 + at, target * 64 + at + size
            assert (MEMORY[start:stop] == before[source * 64 + at : source * 64 + at + size]).all()
            changed[start:stop] = True
    assert (MEMORY[~changed] == before[~changed]).all()
    MEMORY.copy_(before)
