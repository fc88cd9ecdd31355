import hashlib

import pytest

from kvray.actors.lookup import lookup as partial_blocks_module
from kvray.actors.lookup.lookup import PartialBlocks
from kvray.index import Index, Loss

KEYS = [hashlib.sha256(bytes([n])).digest() for n in range(8)]


def lose(blocks: PartialBlocks, *numbers: int, shards: tuple[str, ...] = ("a",)) -> None:
    blocks.note([Loss(keys=b"".join(KEYS[n] for n in numbers), parts=1, shards=shards)])


def taken(blocks: PartialBlocks, shard: str = "a") -> list[int]:
    keys = blocks.take(shard, Index())
    return [KEYS.index(keys[at : at + 32]) for at in range(0, len(keys), 32)]


def test_every_shard_that_has_a_part_is_told_once() -> None:
    blocks = PartialBlocks()
    lose(blocks, 0, shards=("a", "b"))
    lose(blocks, 1, shards=("b",))
    assert (taken(blocks, "a"), taken(blocks, "b")) == ([0], [0, 1])
    assert (taken(blocks, "a"), taken(blocks, "b")) == ([], [])


def test_an_answer_has_the_oldest_and_the_next_one_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_blocks_module, "HANDED_MAX", 3)
    blocks = PartialBlocks()
    lose(blocks, 0, 1)
    lose(blocks, 2, 3, 4)
    assert [taken(blocks), taken(blocks), taken(blocks)] == [[0, 1, 2], [3, 4], []]


def test_what_is_too_much_to_wait_drops_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_blocks_module, "QUEUED_MAX", 4)
    blocks = PartialBlocks()
    lose(blocks, 0)
    lose(blocks, 1, 2, 3)
    lose(blocks, 4, 5)
    assert taken(blocks) == [2, 3, 4, 5]


def test_a_dropped_shard_is_told_nothing() -> None:
    blocks = PartialBlocks()
    lose(blocks, 0)
    blocks.drop("a")
    assert taken(blocks) == []
