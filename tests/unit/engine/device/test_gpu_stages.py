"""The order in which a load brings the bytes of its pages, its copies as addresses and sizes."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvray.engine.device.stages import (
    BEFORE_ALL,
    PIECE_BYTES,
    STAGE_BYTES,
    Pieces,
    Span,
    Stage,
    Stages,
    concatenate,
    join,
)
from kvray.engine.model.cache_layout import LayerRange, Part
from tests.kit.devices import even_steps, part_of, region

MUCH = 2**40


def stages_of(*parts: Part, num_layers: int = 32, num_bytes: int = MUCH) -> tuple[Stage, ...]:
    return Stages(parts, num_layers=num_layers).of(num_bytes)


def layered(num_layers: int, layer_bytes: int, *, index: int = 0) -> Part:
    return part_of(region(1, even_steps(num_layers, layer_bytes)), index=index)


def test_a_layer_that_is_worth_a_copy_is_a_stage():
    stages = stages_of(layered(4, PIECE_BYTES))
    assert [stage.layers for stage in stages] == [{0}, {1}, {2}, {3}]
    assert stages[1].spans == (Span(part=0, region=0, start=PIECE_BYTES, size=PIECE_BYTES),)


def test_layers_of_few_bytes_land_together():
    stages = stages_of(layered(5, PIECE_BYTES // 2))
    assert [stage.layers for stage in stages] == [{0, 1}, {2, 3}, {4}]
    assert stages[0].spans[0].size == PIECE_BYTES


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


def test_bytes_of_several_layers_land_before_the_first_of_them():
    steps = (LayerRange((0,), 0, PIECE_BYTES), LayerRange((2, 1), PIECE_BYTES, 3 * PIECE_BYTES))
    stages = stages_of(part_of(region(1, steps)))
    assert [stage.layers for stage in stages] == [{0}, {1, 2}]


def test_bytes_that_no_layer_of_the_engine_reads_land_before_the_pass():
    steps = (LayerRange((0,), 0, PIECE_BYTES), LayerRange((1, 2), PIECE_BYTES, 3 * PIECE_BYTES))
    stages = stages_of(part_of(region(1, steps)), num_layers=2)
    assert [stage.layers for stage in stages] == [{BEFORE_ALL}, {0}]


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


def listed(pieces: Pieces) -> list[tuple[int, ...]]:
    return list(zip(*(column.tolist() for column in pieces), strict=True))


def joined(pieces: Pieces) -> list[tuple[int, ...]]:
    return listed(join(pieces, pieces.sources, base=BASE, chunk_bytes=CHUNK))


def test_neighbours_on_both_sides_become_one_copy():
    assert joined(made((0, BASE, 8), (8, BASE + 8, 8), (16, BASE + 16, 4))) == [(0, BASE, 20)]


def test_a_gap_on_either_side_keeps_copies_apart():
    gaps = made((0, BASE, 8), (9, BASE + 8, 8), (17, BASE + 20, 8))
    assert joined(gaps) == listed(gaps)


def test_no_copy_reaches_over_the_end_of_a_chunk():
    run = made(*((at, BASE + at, 32) for at in range(0, 256, 32)))
    assert joined(run) == [(at, BASE + at, 64) for at in range(0, 256, 64)]


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
