"""Which nodes kvray leaves: those that nobody uses for long, and those that are to go."""

from hypothesis import given
from hypothesis import strategies as st

from kvray.actors.supervisor.watch import IdleNodes

NODES = st.frozensets(st.sampled_from("abc"))


def test_a_node_is_left_once_it_was_unused_for_so_long() -> None:
    idle = IdleNodes(10.0)
    assert left_at(idle, {"a", "b"}, 0.0) == set()
    assert left_at(idle, {"a"}, 9.0) == set()
    assert left_at(idle, {"a", "b"}, 10.0) == {"a"}
    assert left_at(idle, {"a", "b"}, 19.0) == {"a"}
    assert left_at(idle, {"a", "b"}, 20.0) == {"a", "b"}


def test_a_node_that_somebody_uses_again_gets_its_shard_back() -> None:
    idle = IdleNodes(10.0)
    left_at(idle, {"a"}, 0.0)
    assert left_at(idle, {"a"}, 10.0) == {"a"}
    assert left_at(idle, set(), 11.0) == set()
    assert left_at(idle, {"a"}, 12.0) == set()


def test_a_node_that_could_not_be_left_is_tried_again_after_the_same_time() -> None:
    idle = IdleNodes(10.0)
    left_at(idle, {"a"}, 0.0)
    assert left_at(idle, {"a"}, 10.0) == {"a"}
    idle.stay("a")
    assert not idle.left
    assert left_at(idle, {"a"}, 11.0) == set()
    assert left_at(idle, {"a"}, 21.0) == {"a"}


def test_a_node_that_is_to_go_is_left_at_once_whatever_the_setting() -> None:
    idle = IdleNodes(None)
    idle.note({"a"}, {"b"}, 0.0)
    assert idle.left == {"b"}
    idle.note({"a"}, {"b"}, 1e9)
    assert idle.left == {"b"}
    idle.note({"a"}, set(), 1e9)
    assert not idle.left


@given(st.lists(st.tuples(NODES, NODES, st.floats(0, 8)), max_size=20))
def test_no_node_is_left_that_was_in_use_within_the_time(
    rounds: list[tuple[frozenset[str], frozenset[str], float]],
) -> None:
    idle, now, used_at = IdleNodes(10.0), 0.0, dict.fromkeys("abc", 0.0)
    went: set[str] = set()  # were to go at some time since somebody used them
    for unused, going, step in rounds:
        now += step
        used_at |= dict.fromkeys(set("abc") - unused, now)
        went = went & unused | going
        idle.note(unused, going, now)
        assert all(node in went or now - used_at[node] >= 10.0 for node in idle.left)
        assert going <= idle.left <= unused | going


def left_at(idle: IdleNodes, unused: set[str], now: float) -> set[str]:
    idle.note(unused, set(), now)
    return set(idle.left)
