import hashlib

import pytest

from kvray.actors import orphans as orphans_module
from kvray.actors.orphans import Orphans
from kvray.index import Index, Loss

KEYS = [hashlib.sha256(bytes([n])).digest() for n in range(8)]


def lose(orphans: Orphans, *numbers: int, shards: tuple[str, ...] = ("a",)) -> None:
    orphans.note([Loss(keys=b"".join(KEYS[n] for n in numbers), parts=1, shards=shards)])


def taken(orphans: Orphans, shard: str = "a") -> list[int]:
    keys = orphans.take(shard, Index())
    return [KEYS.index(keys[at : at + 32]) for at in range(0, len(keys), 32)]


def test_every_shard_that_has_a_part_is_told_once() -> None:
    orphans = Orphans()
    lose(orphans, 0, shards=("a", "b"))
    lose(orphans, 1, shards=("b",))
    assert (taken(orphans, "a"), taken(orphans, "b")) == ([0], [0, 1])
    assert (taken(orphans, "a"), taken(orphans, "b")) == ([], [])


def test_an_answer_has_the_oldest_and_the_next_one_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orphans_module, "HANDED_MAX", 3)
    orphans = Orphans()
    lose(orphans, 0, 1)
    lose(orphans, 2, 3, 4)
    assert [taken(orphans), taken(orphans), taken(orphans)] == [[0, 1, 2], [3, 4], []]


def test_what_is_too_much_to_wait_drops_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orphans_module, "QUEUED_MAX", 4)
    orphans = Orphans()
    lose(orphans, 0)
    lose(orphans, 1, 2, 3)
    lose(orphans, 4, 5)
    assert taken(orphans) == [2, 3, 4, 5]


def test_a_dropped_shard_is_told_nothing() -> None:
    orphans = Orphans()
    lose(orphans, 0)
    orphans.drop("a")
    assert taken(orphans) == []
