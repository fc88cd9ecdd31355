"""Copies as addresses and sizes: joined where both sides go on, never over a chunk's end."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvray.engine.device.stages import Pieces, concatenate, join, of_size

BASE, CHUNK = 4096, 64


def made(*pieces: tuple[int, int, int]) -> Pieces:
    return Pieces(*(np.array(column, dtype=np.uint64) for column in zip(*pieces, strict=True)))


def listed(pieces: Pieces) -> list[tuple[int, ...]]:
    return list(zip(*(column.tolist() for column in pieces), strict=True))


def joined(pieces: Pieces) -> list[tuple[int, ...]]:
    return listed(join(pieces, pieces.sources, base=BASE, chunk_bytes=CHUNK))


def test_neighbours_on_both_sides_become_one_copy() -> None:
    assert joined(made((0, BASE, 8), (8, BASE + 8, 8), (16, BASE + 16, 4))) == [(0, BASE, 20)]


def test_a_gap_on_either_side_keeps_copies_apart() -> None:
    gaps = made((0, BASE, 8), (9, BASE + 8, 8), (17, BASE + 20, 8))
    assert joined(gaps) == listed(gaps)


def test_no_copy_reaches_over_the_end_of_a_chunk() -> None:
    run = made(*((at, BASE + at, 32) for at in range(0, 256, 32)))
    assert joined(run) == [(at, BASE + at, 64) for at in range(0, 256, 64)]


def test_a_piece_alone_and_none_are_left_as_they_are() -> None:
    assert joined(made((0, BASE, 8))) == [(0, BASE, 8)]
    nothing = of_size(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64), 8)
    assert joined(concatenate([nothing, nothing])) == []


@given(
    steps=st.lists(
        st.tuples(st.sampled_from([0, 0, 0, 8]), st.sampled_from([0, 0, 8])), max_size=40
    )
)
def test_joined_copies_move_the_same_bytes_to_the_same_places(
    steps: list[tuple[int, int]],
) -> None:
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
