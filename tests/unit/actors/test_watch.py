import socket

from kvray.actors.watch import Silences, is_reachable


def test_a_part_that_is_silent_for_long_is_frozen_and_told_once() -> None:
    silences = Silences(frozen_s=5)

    assert silences.note({"a", "b"}, {"a"}, 10) == []
    assert silences.note({"a", "b"}, {"a"}, 14.9) == []
    assert silences.note({"a", "b"}, {"a"}, 15) == ["b"]
    assert silences.note({"a", "b"}, {"a"}, 16) == []


def test_an_answer_ends_a_silence() -> None:
    silences = Silences(frozen_s=5)
    silences.note({"a"}, set(), 10)
    silences.note({"a"}, {"a"}, 12)

    assert silences.note({"a"}, set(), 16) == []
    assert silences.note({"a"}, set(), 21) == ["a"]


def test_a_part_that_was_ended_has_as_long_again_to_come_back() -> None:
    silences = Silences(frozen_s=5)
    silences.note({"a"}, set(), 10)

    assert silences.note({"a"}, set(), 15) == ["a"]
    assert silences.note({"a"}, set(), 19) == []
    assert silences.note({"a"}, set(), 20) == ["a"]


def test_a_part_that_is_no_more_is_forgotten() -> None:
    silences = Silences(frozen_s=5)
    silences.note({"a"}, set(), 10)
    silences.note(set(), set(), 12)

    assert silences.note({"a"}, set(), 16) == []


def test_a_machine_is_reachable_if_its_ray_can_be_connected_to() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        node = {"NodeManagerAddress": "127.0.0.1", "NodeManagerPort": server.getsockname()[1]}
        assert is_reachable(node, timeout_s=1)
    assert not is_reachable(node, timeout_s=1)
