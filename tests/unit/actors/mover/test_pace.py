from hypothesis import given
from hypothesis import strategies as st

from kvray.actors.mover.source import FIRST_BYTES, Pace

MiB = 2**20


def test_a_fast_way_gets_pieces_as_large_as_the_transport_likes() -> None:
    pace = Pace(most_bytes=128 * MiB)
    assert pace.step(1024 * MiB) == FIRST_BYTES
    pace.note(FIRST_BYTES, 0.001)
    assert pace.step(1024 * MiB) == 128 * MiB


def test_a_slow_way_gets_pieces_that_take_a_moment() -> None:
    pace = Pace(most_bytes=128 * MiB)
    pace.note(16 * MiB, 0.2)
    assert pace.step(1024 * MiB) == 8 * MiB
    pace.note(8 * MiB, 10.0)
    assert pace.step(1024 * MiB) == 4 * MiB


def test_pieces_grow_smaller_towards_the_end() -> None:
    pace = Pace(most_bytes=128 * MiB)
    pace.note(FIRST_BYTES, 0.001)
    left, steps = 512 * MiB, []
    while left > 0:
        steps.append(min(left, pace.step(left)) // MiB)
        left -= steps[-1] * MiB
    assert steps == [128, 128, 128, 64, 64]


def test_a_transport_of_small_pieces_never_gets_larger_ones() -> None:
    pace = Pace(most_bytes=2 * MiB)
    pace.note(2 * MiB, 0.0)
    assert pace.step(64 * MiB) == 2 * MiB


@given(st.lists(st.tuples(st.integers(0, 2**40), st.floats(0, 100)), max_size=20), st.data())
def test_every_step_moves_something(notes: list[tuple[int, float]], data: st.DataObject) -> None:
    pace = Pace(most_bytes=data.draw(st.integers(1, 2**30)))
    for num_bytes, seconds in notes:
        pace.note(num_bytes, seconds)
        assert 0 < pace.step(data.draw(st.integers(0, 2**40))) <= 2**30
