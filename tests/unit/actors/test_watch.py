import socket

from kvray.actors.watch import Silences, is_reachable


def heard(*names: str) -> Silences:
    """Silences of parts that all answered at 0."""
    silences = Silences(frozen_s=5, start_s=60)
    assert silences.note(names, names, 0) == []
    return silences


def test_a_part_that_is_silent_for_long_is_frozen() -> None:
    silences = heard("a", "b")

    assert silences.note({"a", "b"}, {"a"}, 1) == []
    assert silences.note({"a", "b"}, {"a"}, 4.9) == []
    assert silences.note({"a", "b"}, {"a"}, 5) == ["b"]


def test_an_answer_ends_a_silence() -> None:
    silences = heard("a")
    silences.note({"a"}, {"a"}, 4)

    assert silences.note({"a"}, set(), 8.9) == []
    assert silences.note({"a"}, set(), 9) == ["a"]


def test_a_part_that_was_ended_may_take_long_to_start() -> None:
    silences = heard("a")

    assert silences.note({"a"}, set(), 5) == ["a"]
    assert silences.note({"a"}, set(), 64) == []
    assert silences.note({"a"}, set(), 65) == ["a"]


def test_a_part_that_never_answered_may_take_long_to_start() -> None:
    silences = heard()

    assert silences.note({"a"}, set(), 1) == []
    assert silences.note({"a"}, set(), 60) == []
    assert silences.note({"a"}, set(), 61) == ["a"]


def test_a_part_that_answers_after_its_start_has_no_more_time_than_others() -> None:
    silences = heard()
    silences.note({"a"}, set(), 1)
    silences.note({"a"}, {"a"}, 2)

    assert silences.note({"a"}, set(), 7) == ["a"]


def test_a_part_that_is_no_more_is_forgotten() -> None:
    silences = heard("a")
    silences.note(set(), set(), 4)

    assert silences.note({"a"}, set(), 6) == []


def test_a_machine_is_reachable_if_its_ray_can_be_connected_to() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        node = {"NodeManagerAddress": "127.0.0.1", "NodeManagerPort": server.getsockname()[1]}
        assert is_reachable(node, timeout_s=1)
    assert not is_reachable(node, timeout_s=1)
