"""The order in which a load brings the bytes of its pages, its copies as addresses and sizes."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvray.engine.cache_layout import LayerRange, Part
from kvray.engine.device.pool import (
    BEFORE_ALL,
    PIECE_BYTES,
    STAGE_BYTES,
    Pieces,
    Stage,
    Stages,
    concatenate,
    join,
)
from tests.kit.devices import even_steps, part_of, region

MUCH = 2**40


def stages_of(*parts: Part, num_layers: int = 32, num_bytes: int = MUCH) -> tuple[Stage, ...]:
    return Stages(parts, num_layers=num_layers).of(num_bytes)


def layered(num_layers: int, layer_bytes: int, *, index: int = 0) -> Part:
    return part_of(region(1, even_steps(num_layers, layer_bytes)), index=index)


def steps_of(*reads: tuple[int, ...]) -> Part:
    """Return pages of a piece a layer, in the order in which layers read them."""
    edges = itertools.accumulate((len(layers) * PIECE_BYTES for layers in reads), initial=0)
    steps = (
        LayerRange(layers, *edge)
        for layers, edge in zip(reads, itertools.pairwise(edges), strict=True)
    )
    return part_of(region(1, tuple(steps)))


@pytest.mark.parametrize(
    ("part", "num_layers", "layers"),
    [
        (layered(4, PIECE_BYTES), 32, [{0}, {1}, {2}, {3}]),
        (layered(5, PIECE_BYTES // 2), 32, [{0, 1}, {2, 3}, {4}]),
        (steps_of((0,), (2, 1)), 32, [{0}, {1, 2}]),
        (steps_of((0,), (1, 2)), 2, [{BEFORE_ALL}, {0}]),
    ],
    ids=["worth a copy", "few bytes", "before their first layer", "read by no layer"],
)
def test_layers_land_one_by_one_if_they_are_worth_a_copy(part, num_layers, layers):
    stages = stages_of(part, num_layers=num_layers)
    assert [stage.layers for stage in stages] == layers
    if num_layers == 32:
        assert all(span.size >= PIECE_BYTES for stage in stages[:-1] for span in stage.spans)


@pytest.mark.parametrize(
    ("num_bytes", "count"),
    [(0, 1), (STAGE_BYTES, 1), (3 * STAGE_BYTES, 3), (8 * STAGE_BYTES, 8), (MUCH, 8)],
)
def test_a_small_load_has_fewer_stages(num_bytes, count):
    stages = stages_of(layered(8, PIECE_BYTES), num_bytes=num_bytes)
    assert len(stages) == count
    assert sorted(layer for stage in stages for layer in stage.layers) == list(range(8))


def test_parts_and_regions_of_one_layer_land_together():
    size = PIECE_BYTES
    twice = part_of(region(1, even_steps(2, size)), region(1, even_steps(2, size)))
    stages = stages_of(twice, layered(2, size, index=3))
    assert [[span[:3] for span in stage.spans] for stage in stages] == [
        [(0, 0, 0), (0, 1, 0), (3, 0, 0)],
        [(0, 0, size), (0, 1, size), (3, 0, size)],
    ]


@given(
    sizes=st.lists(st.integers(1, 2 * PIECE_BYTES), min_size=1, max_size=12),
    order=st.randoms(use_true_random=False),
    num_bytes=st.integers(0, 16 * STAGE_BYTES),
)
def test_stages_have_every_byte_once_and_never_after_its_layer(sizes, order, num_bytes):
    layers = list(range(len(sizes)))
    order.shuffle(layers)
    steps, at = [], 0
    for layer, size in zip(layers, sizes, strict=True):
        steps.append(LayerRange((layer,), at, at + size))
        at += size
    stages = stages_of(part_of(region(1, tuple(steps))), num_bytes=num_bytes)
    spans = sorted((span.start, span.size) for stage in stages for span in stage.spans)
    assert sum(size for _, size in spans) == at
    assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(spans))
    firsts = [min(stage.layers) for stage in stages]
    assert firsts == sorted(firsts)
    assert all(max(a.layers) < min(b.layers) for a, b in itertools.pairwise(stages))


BASE, CHUNK = 4096, 64


def made(*pieces: tuple[int, int, int]) -> Pieces:
    return Pieces(*(np.array(column, dtype=np.uint64) for column in zip(*pieces, strict=True)))


def joined(pieces: Pieces) -> list[tuple[int, ...]]:
    found = join(pieces, pieces.sources, base=BASE, chunk_bytes=CHUNK)
    return list(zip(*(column.tolist() for column in found), strict=True))


def test_a_piece_alone_and_none_are_left_as_they_are():
    assert joined(made((0, BASE, 8))) == [(0, BASE, 8)]
    nothing = Pieces(*np.empty((3, 0), dtype=np.uint64))
    assert joined(concatenate([nothing, nothing])) == []


@given(
    steps=st.lists(
        st.tuples(st.sampled_from([0, 0, 0, 8]), st.sampled_from([0, 0, 8])), max_size=40
    )
)
def test_joined_copies_move_the_same_bytes_to_the_same_places(steps):
    pieces, target, source = [(0, BASE, 8)], 8, BASE + 8
    for target_gap, source_gap in steps:
        target, source = target + target_gap, source + source_gap
        pieces.append((target, source, 8))
        target, source = target + 8, source + 8
    found = joined(made(*pieces))
    assert moved(found) == moved(pieces)
    for _, source, size in found:
        assert (source - BASE) // CHUNK == (source + size - 1 - BASE) // CHUNK
    for before, after in itertools.pairwise(found):
        is_gap = after[0] != before[0] + before[2] or after[1] != before[1] + before[2]
        assert is_gap or (after[1] - BASE) % CHUNK == 0, "what could be joined was"


def moved(pieces: list[tuple[int, ...]]) -> set[tuple[int, int]]:
    return {(target + at, source + at) for target, source, size in pieces for at in range(size)}
