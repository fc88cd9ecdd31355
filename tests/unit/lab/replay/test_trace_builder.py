from collections.abc import Sequence

import numpy as np
import pytest

from kvray.lab.replay.reading import TraceBuilder
from kvray.store.replay.trace import NO_PARENT, Trace


def build(*paths: Sequence[int], spaces: Sequence[str] | None = None) -> Trace:
    builder = TraceBuilder(name="made", block_tokens=4)
    for at, ids in enumerate(paths):
        space = spaces[at] if spaces else None
        builder.add(time_s=at, num_tokens=4 * len(ids), ids=ids, space=space)
    return builder.build()


def paths(trace: Trace) -> list[list[int]]:
    return [part.tolist() for part in np.split(trace.ids, trace.starts[1:-1])]


def test_ids_are_numbered_in_the_order_of_first_use() -> None:
    assert paths(build([90, -7], [90, 2**62], [5])) == [[0, 1], [0, 2], [3]]


def test_requests_are_put_in_the_order_of_time_from_0_on() -> None:
    builder = TraceBuilder(name="made", block_tokens=4)
    for time_s, ids in ((7.0, [1]), (3.0, [2]), (7.0, [3]), (5.5, [4])):
        builder.add(time_s=time_s, num_tokens=len(ids) * 4 + ids[0], ids=ids)
    trace = builder.build()
    assert trace.times.tolist() == [0.0, 2.5, 4.0, 4.0]
    assert trace.num_tokens.tolist() == [6, 8, 5, 7]
    assert paths(trace) == [[0], [1], [2], [3]]


def test_equal_ids_of_different_spaces_are_different_blocks() -> None:
    trace = build([1, 2], [1, 3], [1, 2], spaces=["a", "b", "a"])
    assert paths(trace) == [[0, 1], [2, 3], [0, 1]]


def test_ids_of_the_content_alone_are_told_apart_by_their_prefix() -> None:
    trace = build([1, 2], [3, 2], [1, 2, 1], [2])
    assert paths(trace) == [[0, 1], [2, 3], [0, 1, 4], [5]]


def test_a_block_that_comes_twice_in_a_prompt_is_two_blocks() -> None:
    assert paths(build([8, 8, 8], [8, 8])) == [[0, 1, 2], [0, 1]]


def test_parents_are_the_blocks_before() -> None:
    trace = build([1, 2], [], [1, 3], [4])
    assert trace.parents.tolist() == [NO_PARENT, 0, 0, NO_PARENT]


def test_requests_without_a_block_stay_in_the_trace() -> None:
    trace = build([], [1], [], [1, 2], [])
    assert trace.starts.tolist() == [0, 0, 1, 1, 3, 3]
    assert (trace.num_requests, trace.num_refs, trace.num_unique) == (5, 3, 2)


def test_hit_tokens_end_with_the_prompt() -> None:
    builder = TraceBuilder(name="made", block_tokens=4)
    builder.add(time_s=0, num_tokens=6, ids=[1, 2])
    builder.add(time_s=1, num_tokens=9, ids=[1, 2])
    trace = builder.build()
    assert trace.hit_tokens(np.array([2, 2])) == 6 + 8
    assert trace.hit_tokens(np.array([1, 0])) == 4
    assert trace.prompt_tokens == 15


def test_a_trace_without_a_request_is_empty() -> None:
    trace = build()
    assert (trace.num_requests, trace.num_refs, trace.num_unique, trace.seconds) == (0, 0, 0, 0)


def test_an_id_that_no_integer_holds_is_refused() -> None:
    with pytest.raises(OverflowError):
        build([2**64])
