"""Pools as bytes: any element type, on the host or behind staging copies."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from kvray.actors.shard import Shard
from kvray.connector.pool import DevicePool, HostPool, Pool, open_pool
from kvray.errors import ConfigError
from kvray.keys import chain_keys
from kvray.store import Arena
from tests.unit.connector.conftest import MakePair, arena_of

DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "int8", "uint8")


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8).reshape(tensor.shape[0], -1)


def device_pool(tensor: torch.Tensor) -> Pool:
    """The device's code on a tensor in host memory."""
    return DevicePool(bytes_of(tensor))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("opened", [open_pool, device_pool])
def test_blocks_come_back_from_the_arena_byte_for_byte(
    shard: Shard, make_pair: MakePair, dtype: str, opened: Callable[[torch.Tensor], Pool]
) -> None:
    arena = arena_of(make_pair())
    made = torch.randint(0, 255, (6, 3, 2, 8 * 4), dtype=torch.uint8)
    tensor = made.view(getattr(torch, dtype))
    pool = opened(tensor)
    assert pool.block_bytes == 3 * 2 * 8 * 4
    before, keys = bytes_of(tensor).clone(), store(arena, pool, [4, 1, 2], dtype)
    tensor.view(torch.uint8).zero_()
    (lease,) = arena.lease(keys) or []
    pool.load(arena, lease, np.array([0, 5]), first=1, verify=True)
    arena.release(lease)
    assert (bytes_of(tensor)[[0, 5]] == before[[1, 2]]).all()
    assert not bytes_of(tensor)[1:5].any()


def test_a_host_pool_lends_its_rows_and_a_device_pool_copies_them() -> None:
    tensor = torch.zeros(4, 1, 2, 8)
    for opened, is_lent in ((open_pool, True), (device_pool, False)):
        pool = opened(tensor)
        rows, block_ids = pool.source(np.array([2, 3]))
        tensor.fill_(1)
        assert bool(rows[block_ids].any()) == is_lent == pool.is_host
        tensor.fill_(0)


def test_a_latent_cache_is_a_pool_like_any_other() -> None:
    assert open_pool(torch.zeros(4, 2, 1, 8)).block_bytes == 64
    assert isinstance(open_pool(torch.zeros(4, 2, 1, 8)), HostPool)


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(4, 8), torch.zeros(4, 1, 2, 3, 8), torch.zeros(8, 2, 2, 8)[::2]],
    ids=["flat", "five", "strided"],
)
def test_a_pool_of_another_layout_is_refused_with_its_shape(tensor: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match=r"has shape \[4"):
        open_pool(tensor)


def store(arena: Arena, pool: Pool, block_ids: list[int], seed: str) -> list[bytes]:
    keys = chain_keys(range(len(block_ids)), tokens_per_block=1, seed=seed.encode().ljust(32, b"."))
    made = arena.reserve(keys, parent=None, depth=0, part=0, block_bytes=pool.block_bytes)
    assert made is not None
    rows, ids = pool.source(np.array(block_ids))
    assert arena.commit(made, arena.write(made, rows, ids[made.rows]))
    return list(keys)
