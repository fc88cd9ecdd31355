from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from kvray.actors.tier.tier import summed
from kvray.cli import status
from kvray.cli.status import (
    _print,
    _watch,
    ended_line,
    lookups_table,
    memory_table,
    replicas_table,
    shards_table,
)
from kvray.cli.text.hits import total_counters
from kvray.errors import ShardUnavailable

ARENA = {
    "resident_bytes": 3 * 2**20,
    "capacity_bytes": 2**30,
    "blocks": 12,
    "leased_blocks": 2,
    "evicted": 5,
    "dropped": 1,
    "corrupt": 0,
}


def text_of(table: Table, width: int = 80) -> str:
    console = Console(width=width, highlight=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_shard_that_serves_shows_its_memory() -> None:
    shard = {"shard": "kvray-shard-0123456789ab", "state": "serving", "arena": ARENA}
    words = text_of(shards_table([shard])).split()
    assert words[-8:] == ["0123456789ab", "serving", "3MiB/1GiB", "12", "2", "5", "1", "0"]


def test_shard_that_gets_ready_shows_how_far_it_is() -> None:
    shard = {"shard": "kvray-shard-0123456789ab", "state": "preparing", "done": 1, "total": 4}
    assert "preparing 25 %" in text_of(shards_table([shard]))


def test_shard_that_does_not_answer_says_so() -> None:
    shard = {"shard": "kvray-shard-0123456789ab", "state": "unreachable", "message": "no answer"}
    assert "unreachable" in text_of(shards_table([shard]))


def test_process_that_is_stopped_with_the_lock_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stopped = {"pid": 4242, "name": "[bold]engine", "since": 1.0}
    shard = {"shard": "kvray-shard-01", "state": "serving", "arena": ARENA}
    found = {"cluster_name": "c", "lookup": {"keys": 0}, "shards": [shard]}
    _print(found)
    assert "stopped" not in capsys.readouterr().out
    _print({**found, "shards": [{**shard, "stopped_with_lock": stopped}]})
    line = "kvray-shard-01: process 4242 ([bold]engine) is stopped while it has the arena's lock"
    said = capsys.readouterr().out
    assert line in said
    assert "kill -CONT 4242" in said


def test_lookup_that_does_not_answer_is_said_beside_the_shards(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shard = {"shard": "kvray-shard-01", "state": "serving", "arena": ARENA}
    silent = {"lookup": "kvray-lookup", "state": "unreachable", "message": "No answer in time."}
    _print({"cluster_name": "c", "lookup": silent, "shards": [shard]})
    said = capsys.readouterr().out
    assert "1 shard, the lookup does not answer: No answer in time." in said
    assert "3MiB/1GiB" in said


class WatchedClient:
    """A client whose tier goes away after its first answer."""

    num_answers = 0

    def status(self, *, timeout_s: float) -> dict[str, Any]:
        self.num_answers += 1
        if self.num_answers > 1:
            raise ShardUnavailable("No tier runs.")
        shard = {"shard": "kvray-shard-01", "state": "serving", "arena": ARENA}
        return {"cluster_name": "c", "lookup": {"keys": 0}, "shards": [shard]}


def test_a_watched_tier_that_goes_away_is_said_beside_its_last_status(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client, console = WatchedClient(), Console(width=120, record=True)

    def sleep(seconds: float) -> None:
        if client.num_answers == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(status.time, "sleep", sleep)
    _watch(client, console)  # type: ignore[arg-type]
    shown = console.export_text()
    assert "No answer: No tier runs. Trying again." in shown
    assert "3MiB/1GiB" in shown


def test_partitions_of_the_lookup_have_a_row_each_and_are_summed() -> None:
    one = {"keys": 3, "entries": 6, "bytes": 600, "queries": 2, "resyncs": 1, "shards": {"a": 1}}
    two = {**one, "keys": 5, "entries": 10, "bytes": 2**20}
    silent = {"state": "unreachable", "message": "no answer"}
    found = summed(one, [one, two, silent])
    assert (found["keys"], found["entries"], found["shards"]) == (8, 16, {"a": 1})
    assert found["bytes_per_key"] == round((600 + 2**20) / 8, 1)
    shown = text_of(lookups_table(found["partitions"])).splitlines()
    first, second, third = (line.split() for line in shown if "kvray-lookup" in line)
    assert first == ["kvray-lookup", "answers", "3", "6", "600B", "2", "1"]
    assert second[:5] == ["kvray-lookup-1", "answers", "5", "10", "1MiB"]
    assert third == ["kvray-lookup-2", "unreachable"]


SLABS = {
    "block_bytes": 128 * 2**10,
    "slabs": 3,
    "slots": 1536,
    "blocks": 1500,
    "free_slots": 36,
    "longest_free_run": 20,
    "fragmented_share": 0.25,
    "slot_waste_bytes": 2**20,
    "slab_waste_bytes": 2**20,
}


def test_memory_is_shown_for_each_block_size_and_what_is_spare() -> None:
    arena = {**ARENA, "slabs": [SLABS, {**SLABS, "block_bytes": 2**22}], "spare_slabs": 13}
    shard = {"shard": "kvray-shard-0123456789ab", "state": "serving", "arena": arena}
    lines = text_of(memory_table([shard])).splitlines()
    figures = ["3", "1500", "36", "20", "25%", "2MiB"]
    assert ["0123456789ab", "128KiB", *figures] in [line.split() for line in lines]
    assert ["0123456789ab", "4MiB", *figures] in [line.split() for line in lines]
    assert ["0123456789ab", "spare", "13"] in [line.split() for line in lines]


def make_replica(**fields: Any) -> dict[str, Any]:
    defaults = {"replica": "r-1", "rank": 0, "connected": True, "namespace": "01", "counters": {}}
    return {**defaults, **fields}


def test_replica_shows_hits_and_misses_by_reason() -> None:
    counters = {
        "requests": 7,
        "prompt_tokens": 900,
        "local_tokens": 32,
        "hit_tokens": 512,
        "hit_tokens_from_host": 450,
        "hit_tokens_from_nvme": 22,
        "hit_tokens_from_nixl": 30,
        "hit_tokens_from_object_ref": 10,
        "miss_tokens_not_stored": 320,
        "miss_tokens_arena_busy": 0,
        "stored_blocks": 10,
    }
    table = replicas_table([make_replica(counters=counters)])
    words = " ".join(text_of(table, width=120).split())
    shares = "4% 50% 2% 4% 40%"
    assert f"r-1 0 7 900 {shares} 320 not stored 10 stored blocks" in words
    assert "busy" not in words


def test_replica_that_is_gone_is_marked() -> None:
    assert "gone" in text_of(replicas_table([make_replica(connected=False)]))


def test_name_of_a_replica_is_no_markup() -> None:
    assert "[red]" in text_of(replicas_table([make_replica(replica="[red]")]))


def test_who_ended_a_while_ago_is_a_sum() -> None:
    ended = [
        {"ranks": 40, "counters": {"requests": 1500, "prompt_tokens": 9000, "hit_tokens": 700}},
        {"ranks": 2, "counters": {}},
    ]
    assert ended_line(ended) == (
        "42 ranks ended before and are not listed: 1,500 requests, 700 hit tokens."
    )
    assert ended_line(ended[1:]) == "2 ranks ended before and are not listed."
    assert (
        total_counters([make_replica(counters={"prompt_tokens": 1}), *ended])["prompt_tokens"]
        == 9001
    )


def test_a_counter_or_name_with_markup_is_printed_as_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    name = "[/nothing][bold]"
    replica = make_replica(replica=name) | {"counters": {name: 7, f"miss_tokens_{name}": 8}}
    shard = {"shard": f"kvray-shard-{name}", "state": name, "message": name, "replicas": [replica]}
    lookup = {"state": "unreachable", "message": name}
    _print({"cluster_name": name, "lookup": lookup, "shards": [shard]})
    said = capsys.readouterr().out
    for line in (f"Tier {name}", f"7 {name}", f"8 {name}", f"answer: {name}", f": {name}"):
        assert line in said
