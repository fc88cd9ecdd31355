"""Loads of blocks that engines with more or fewer ranks have stored, beside loads of its own."""

from contextlib import ExitStack

import numpy as np
import torch

from kvray.engine.device.pool import HostPool, Load
from kvray.engine.model.cache_layout import CacheLayout, Group, LayerRange, Part, Region
from kvray.engine.model.reslicing import resliced_parts
from kvray.identity.keys import chain_keys, request_seed
from kvray.lab.bench.report import Row, copy_row
from kvray.lab.bench.runner import TOKENS_PER_BLOCK, measure, reserve_all, timed
from kvray.store import Arena

_LAYERS, _KV_HEADS, _HEAD_BYTES = 32, 8, 256
"""Of a model with 8e9 parameters: a block has 4 MiB on all ranks together."""
_CASES = ((1, 2), (2, 1), (1, 4), (4, 1))
"""Ranks that have stored the blocks, and ranks of the engine that loads them."""


def resliced_rows(arena: Arena, *, num_blocks: int, pairs: int) -> list[Row]:
    """Return a row for each case: one rank loads `num_blocks` blocks into host memory.

    KVRayError: the arena has no room.
    """
    arena.join("bench")
    try:
        return [_row(arena, *case, num_blocks=num_blocks, pairs=pairs) for case in _CASES]
    finally:
        arena.leave()


def _row(arena: Arena, stored_by: int, size: int, *, num_blocks: int, pairs: int) -> Row:
    layout = _layout(size, num_blocks)
    own = layout.parts(0, size, TOKENS_PER_BLOCK)
    others = resliced_parts(layout, 0, size, stored_by, TOKENS_PER_BLOCK)
    pool = HostPool([*own, *others])
    with ExitStack() as stack:
        resliced, plain = (
            [_load(arena, part, num_blocks, stack) for part in parts] for parts in (others, own)
        )
        found = measure(
            pairs,
            ours=lambda _: timed(lambda: pool.load(arena, resliced, None)),
            floor=lambda _: timed(lambda: pool.load(arena, plain, None)),
        )
    title = f"load by one of {size} ranks, stored by {stored_by}"
    num_bytes = num_blocks * own[0].block_bytes
    return copy_row(title, f"resliced_{stored_by}_to_{size}_{{}}", found, num_bytes=num_bytes)


def _layout(size: int, num_blocks: int) -> CacheLayout:
    """Return the pool of one of `size` ranks, with keys and values of each layer."""
    plane = _KV_HEADS // size * TOKENS_PER_BLOCK * _HEAD_BYTES
    pages = torch.zeros((num_blocks, 2 * _LAYERS * plane), dtype=torch.uint8)
    steps = tuple(
        LayerRange((layer,), 2 * layer * plane, 2 * (layer + 1) * plane) for layer in range(_LAYERS)
    )
    region = Region(pages=pages, steps=steps, num_planes=2 * _LAYERS)
    group = Group(layers=tuple(range(_LAYERS)), window=None, own=(region,))
    return CacheLayout(
        groups=(group,),
        dtype="bfloat16",
        kv_factor=2,
        tokens_per_block=TOKENS_PER_BLOCK,
        is_flat=True,
    )


def _load(arena: Arena, part: Part, num_blocks: int, stack: ExitStack) -> Load:
    """Return a load of fresh slots, to pages as scattered as those of an engine after a while."""
    tokens = np.arange(num_blocks * TOKENS_PER_BLOCK)
    seed = request_seed(f"kvray bench {part.num_ranks} {part.index}".encode())
    keys = chain_keys(tokens, tokens_per_block=TOKENS_PER_BLOCK, seed=seed)
    made = reserve_all(arena, keys, block_bytes=part.block_bytes)
    stack.callback(arena.abort, made)
    for slot in made.slots.tolist():
        arena.slot_bytes(slot)[:] = 1  # memory that nobody has written is not read from memory
    pages = np.random.default_rng(0).permutation(num_blocks).astype(np.int64)
    return Load(part, made.slots.astype(np.int64), pages)
