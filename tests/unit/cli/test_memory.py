from typing import Any

from rich.console import Console

from kvray.cli.memory import memory_sentences, shares_report

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


def shard_of(*namespaces: tuple[str, int, int | None], over_quota: int = 0) -> dict[str, Any]:
    held = [
        {"namespace": name, "blocks": blocks, "bytes": blocks * 2**20, "quota_bytes": quota}
        for name, blocks, quota in namespaces
    ]
    arena = {"namespaces": held, "over_quota": over_quota}
    return {"shard": "kvray-shard-0123", "state": "serving", "arena": arena}


def lines_of(*shards: dict[str, Any]) -> list[str]:
    console = Console(width=80, highlight=False)
    with console.capture() as capture:
        for line in shares_report(list(shards)):
            console.print(line)
    return [" ".join(line.split()) for line in capture.get().splitlines()]


def test_every_namespace_shows_what_it_has_and_may_have() -> None:
    lines = lines_of(shard_of(("12ab34cd", 3, 5 * 2**20), ("", 2, None), over_quota=7))
    assert "0123 12ab34cd 3 3MiB 5MiB" in lines
    assert "0123 not known 2 2MiB" in lines
    assert "7 blocks went because their namespace was over its quota." in lines


def test_one_namespace_without_a_quota_needs_no_table() -> None:
    assert shares_report([shard_of(("12ab34cd", 3, None)), {"shard": "b"}]) == []
    assert len(shares_report([shard_of(("12ab34cd", 3, 2**30))])) == 1
