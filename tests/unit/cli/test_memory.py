from typing import Any

from kvray.cli.memory import memory_sentences

GIB = 2**30


def sentence(**changes: Any) -> str:
    memory = {
        "mapped_bytes": 4 * GIB,
        "huge_bytes": 0,
        "huge_page_bytes": 2**21,
        "numa_nodes": 1,
        "interleaved_nodes": 0,
        "command": "mount -o remount,huge=advise /dev/shm",
    }
    (said,) = memory_sentences([{"shard": "a", "memory": {**memory, **changes}}])
    return said


def test_an_arena_in_small_pages_is_told_the_command() -> None:
    assert sentence() == (
        "a: none of its memory is in huge pages; for pages of 2MiB run"
        " `mount -o remount,huge=advise /dev/shm` as root, then `kvray down` and `kvray up`."
    )


def test_an_arena_in_huge_pages_needs_no_command() -> None:
    assert sentence(huge_bytes=4 * GIB, command=None) == ("a: its memory is in huge pages of 2MiB.")


def test_an_arena_partly_in_huge_pages_says_how_much() -> None:
    assert "a: 75 % of its memory is in huge pages; for" in sentence(huge_bytes=3 * GIB)


def test_where_there_are_no_huge_pages_none_are_offered() -> None:
    assert sentence(huge_page_bytes=0, command=None) == "a: its memory is in small pages."


def test_several_numa_nodes_are_named() -> None:
    assert "pages, interleaved over 4 NUMA nodes; for" in sentence(
        numa_nodes=4, interleaved_nodes=4
    )
    assert "pages, not interleaved over the 4 NUMA nodes; for" in sentence(numa_nodes=4)


def test_a_shard_that_does_not_know_says_nothing() -> None:
    assert memory_sentences([{"shard": "a"}, {"shard": "b", "memory": {}}]) == []
