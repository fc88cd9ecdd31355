"""The line to the lookup's actor, with a stand-in for Ray: an answer is taken whenever it comes."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvray.actors.lookup.lookup import Announcement, Answer
from kvray.actors.shard import lookup_line
from kvray.actors.shard.lookup_line import LookupLine
from kvray.errors import ShardUnavailable

ANSWER = Answer(lookup_epoch="e", resync=False)


class Ray:
    """Calls of the lookup, and the answers that there are, by their number."""

    def __init__(self) -> None:
        self.calls: list[Announcement] = []
        self.answers: dict[int, Answer | Exception] = {}
        self.num_searches = 0

    def get_actor(self, name: str) -> Any:
        self.num_searches += 1
        return SimpleNamespace(announce=SimpleNamespace(remote=self._call))

    def wait(self, calls: list[int], timeout: float) -> tuple[list[int], list[int]]:
        return [call for call in calls if call in self.answers], []

    def get(self, call: int, timeout: float) -> Answer:
        answer = self.answers[call]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _call(self, announcement: Announcement) -> int:
        self.calls.append(announcement)
        return len(self.calls) - 1


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    made = Ray()
    monkeypatch.setattr(lookup_line, "ray", made)
    monkeypatch.setattr(lookup_line, "get_actor", made.get_actor)
    return made


def said(sequence: int) -> Announcement:
    return Announcement(
        shard="a",
        arena_id="",
        shard_epoch=1,
        sequence=sequence,
        full=False,
        added_keys=b"",
        added_parts=[],
        removed_keys=b"",
        removed_parts=[],
    )


def test_a_late_answer_is_waited_for_and_nothing_else_is_sent_meanwhile(ray: Ray) -> None:
    line, first = LookupLine(), said(1)
    assert [line.announce(first) for _ in range(3)] == [None] * 3
    ray.answers[0] = ANSWER
    assert line.announce(first) is ANSWER
    assert ray.calls == [first]


def test_the_next_announcement_is_sent_when_the_one_before_is_answered_or_given_up(
    ray: Ray,
) -> None:
    line = LookupLine()
    ray.answers = {0: ANSWER, 2: ANSWER}
    assert line.announce(said(1)) is ANSWER
    assert line.announce(said(2)) is None
    assert line.announce(said(3)) is ANSWER
    assert [each.sequence for each in ray.calls] == [1, 2, 3]
    assert ray.num_searches == 1


def test_a_lookup_that_has_ended_is_looked_for_again(ray: Ray) -> None:
    line, first = LookupLine(), said(1)
    ray.answers = {0: ShardUnavailable("It is gone."), 1: ANSWER}
    with pytest.raises(ShardUnavailable):
        line.announce(first)
    assert line.announce(first) is ANSWER
    assert ray.num_searches == 2
