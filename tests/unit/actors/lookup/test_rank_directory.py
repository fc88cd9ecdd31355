import pytest

from kvray.actors.lookup import lookup as lookup_module
from kvray.actors.lookup.lookup import RankDirectory


def test_a_rank_that_two_shards_name_is_with_the_later_one() -> None:
    ranks = RankDirectory()
    ranks.name("a", [("r", 0)])
    ranks.name("b", [("r", 0)])
    ranks.name("a", [("r", 0), ("r", 1)])
    assert ranks.replica("r", ["a", "b"]) == {0: "b", 1: "a"}
    assert ranks.replica("r", ["a"]) == {0: "a", 1: "a"}


def test_what_one_shard_names_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup_module, "RANKS_MAX", 2)
    ranks = RankDirectory()
    ranks.name("a", [("r", rank) for rank in range(5)])
    assert len(ranks) == 2
