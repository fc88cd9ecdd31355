"""The line to the lookup's actor, with a stand-in for Ray: an answer is taken whenever it comes."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from kvray.actors.lookup.lookup import Announcement, Answer, packed_parts
from kvray.actors.ray_glue.arguments import packed, unpacked
from kvray.actors.shard import actor
from kvray.actors.shard.actor import LookupLine
from kvray.errors import ShardUnavailable
from kvray.identity.block import KEY_BYTES

ANSWER = Answer(lookup_epoch="e", resync=False)


class Ray:
    """Calls of the lookup, and the answers that there are, by their number."""

    def __init__(self) -> None:
        self.calls: list[Announcement] = []
        self.answers: list[Future[Answer]] = []
        self.num_searches = 0

    def get_actor(self, name: str) -> Any:
        self.num_searches += 1
        return SimpleNamespace(announce=SimpleNamespace(remote=self._call))

    def _call(self, *announcement: Any) -> Any:
        self.calls.append(unpacked(*announcement))
        self.answers.append(Future())
        return SimpleNamespace(future=lambda made=self.answers[-1]: made)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    made = Ray()
    monkeypatch.setattr(actor, "get_actor", made.get_actor)
    return made


def said(sequence: int, *, num_keys: int = 0) -> Announcement:
    return Announcement(
        shard="a",
        arena_id="",
        shard_epoch=1,
        sequence=sequence,
        full=False,
        added_keys=bytes(num_keys * KEY_BYTES),
        added_parts=packed_parts([0] * num_keys),
        removed_keys=b"",
        removed_parts=b"",
    )


def test_a_late_answer_is_waited_for_and_nothing_else_is_sent_meanwhile(ray):
    line, first = LookupLine(), said(1)
    assert [line.announce(first) for _ in range(3)] == [None] * 3
    ray.answers[0].set_result(ANSWER)
    assert line.announce(first) is ANSWER
    assert ray.calls == [first]


def test_the_next_announcement_is_sent_when_the_one_before_is_answered_or_given_up(ray):
    line, first, second, third = LookupLine(), said(1), said(2), said(3)
    assert line.announce(first) is None
    ray.answers[0].set_result(ANSWER)
    assert line.announce(first) is ANSWER
    assert [line.announce(each) for each in (second, third)] == [None, None]
    ray.answers[2].set_result(ANSWER)
    assert line.announce(third) is ANSWER
    assert ray.calls == [first, second, third]
    assert ray.num_searches == 1


def test_a_lookup_that_has_ended_is_looked_for_again(ray):
    line, first = LookupLine(), said(1)
    assert line.announce(first) is None
    ray.answers[0].set_exception(ShardUnavailable("It is gone."))
    with pytest.raises(ShardUnavailable):
        line.announce(first)
    assert line.announce(first) is None
    ray.answers[1].set_result(ANSWER)
    assert line.announce(first) is ANSWER
    assert ray.num_searches == 2


def test_what_is_long_is_sent_in_pieces_that_travel_with_the_call(ray):
    long = said(1, num_keys=20_000)
    LookupLine().announce(long)
    assert ray.calls == [long]
    assert all(len(piece) <= 2**16 for piece in packed(long))
