"""`kvray status`: shards, lookups, memory, replicas, namespaces, engines that read checkpoints."""

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
from rich.console import Console

from kvray.actors.staging.replicas import Replicas
from kvray.actors.tier.tier import summed
from kvray.cli import status
from kvray.cli.asking import for_people, show_answer
from kvray.cli.doctor.tier import hit_findings
from kvray.cli.hits import total_counters
from kvray.errors import ConfigError, ShardUnavailable
from kvray.identity.block import Namespace
from tests.unit.actors.small_shard import NAMESPACE
from tests.unit.cli.answers import SERVING, replica, shard, silent
from tests.unit.cli.answers import status as tier_status
from tests.unit.cli.conftest import rows, shown


def _print(found: dict[str, Any]) -> None:
    show_answer(found, lambda told: status._report(told, wide=True), as_json=False)


def test_ten_nodes_fit_on_one_screen_with_hosts_hits_disks_and_faults():
    names = [f"{number:012x}" for number in range(10)]
    hosts = {name: {"name": f"gpu-{name[-1]}", "ip": f"10.0.0.{name[-1]}"} for name in names}
    found = tier_status(
        seconds=4,
        shards=[shard(name, 4, uptime_s=9e5) for name in names],
        movers=[],
        hosts=hosts | {"0000000000ff": {"name": "gpu-x", "ip": "10.0.0.99"}},
        version="9.9",
        address="10.0.0.1:6379",
        first_tokens_s={"num": 9, "p50": 0.05, "p90": 0.4},
        lost={"0000000000ff": 125.0},
    )
    found["shards"][3] |= silent(names[3])
    text = shown(*status._report(for_people(found)), width=100)
    lines = rows(text)
    assert len(lines) < 36
    assert max(map(len, text.splitlines()[3:-4])) <= 100
    head, sources = lines[:2]
    assert "kvray 9.9, Ray at 10.0.0.1:6379): 9 of 10 nodes answer, up 10 d; the lookup" in head
    assert "own pool 0.0%, host 60.0%" in sources
    assert {
        "Time to the first token, last 10 min, as the router sees it: p50 50 ms, p90 400 ms",
        "gpu-0 serving 10 d 25% 4MiB 25% 4GiB 0% 60% 0% 0% 12",
        "gpu-3 (10.0.0.3): No answer in 2 s.",
        "gpu-x (10.0.0.99) left Ray 2 min ago, and its blocks in memory with it.",
    } <= {*lines}
    assert not any(name in text for name in names)
    assert "stage wait" not in text
    wide = shown(*status._report(for_people(found, with_ids=True), wide=True), width=300)
    assert f"gpu-0 (10.0.0.0, {names[0]})" in wide


def test_a_status_may_be_of_one_node():
    hosts = {"aa": {"name": "gpu-1", "ip": "10.0.0.1"}, "bb": {"name": "gpu-2", "ip": "10.0.0.2"}}
    found = tier_status(hosts=hosts)
    for meant in ("gpu-2", "10.0.0.2", "bb"):
        of_one = status._of_node(found, meant)
        assert [one["shard"] for one in of_one["shards"]] == ["kvray-shard-bb"]
        assert [one["mover"] for one in of_one["movers"]] == ["kvray-mover-bb"]
        assert "Tier prod: 1 of its 2 nodes; the lookup" in status.headline(of_one)
    with pytest.raises(ConfigError, match="gpu-1"):
        status._of_node(found, "gpu-3")


FOUND = {"cluster_name": "c", "lookup": {"keys": 0}, "shards": [SERVING]}


def test_process_that_is_stopped_with_the_lock_is_named(capsys):
    stopped = {"pid": 4242, "name": "[bold]engine", "since": 1.0}
    _print(FOUND)
    assert "stopped" not in capsys.readouterr().out
    _print({**FOUND, "shards": [{**SERVING, "stopped_with_lock": stopped}]})
    said = capsys.readouterr().out
    assert "aa: process 4242 ([bold]engine) is stopped while it has the arena's lock" in said
    assert "kill -CONT 4242" in said


def test_a_watched_tier_that_goes_away_is_said_beside_its_last_status(monkeypatch):
    console = Console(width=120, record=True)
    ask = Mock(side_effect=[FOUND, ShardUnavailable("No tier runs."), KeyboardInterrupt])
    monkeypatch.setattr(status, "_WATCH_S", 0.0)
    status._watch(ask, console, wide=False)
    text = console.export_text()
    assert "No answer: No tier runs. Trying again." in text
    assert "0% 1GiB" in text


def test_partitions_of_the_lookup_have_a_row_each_and_are_summed():
    one = {"keys": 3, "entries": 6, "bytes": 600, "queries": 2, "resyncs": 1, "shards": {"a": 1}}
    two = {**one, "keys": 5, "entries": 10, "bytes": 2**20}
    silent = {"state": "unreachable", "message": "no answer"}
    found = summed(one, [one, two, silent])
    assert (found["keys"], found["entries"], found["shards"]) == (8, 16, {"a": 1})
    assert found["bytes_per_key"] == round((600 + 2**20) / 8, 1)
    parts = {one["lookup"]: one for one in found["partitions"]}
    lines = rows(shown(*status.counter_tables("Lookup", parts, "lookup")))
    assert {"lookup keys 3 5", "lookup 600B 1MiB", "lookup queries 2 2"} <= {*lines}


def test_replica_shows_hits_and_misses_by_reason_and_those_that_are_gone_are_told():
    counters = {"requests": 7, "prompt_tokens": 900, "local_tokens": 32, "hit_tokens": 512}
    counters |= {"miss_tokens_not_stored": 320, "miss_tokens_arena_busy": 0, "stored_blocks": 10}
    counters |= {"stage_wait_us": 2_455_000}
    hits = {"host": 450, "nvme": 22, "nixl": 30, "object_ref": 10}
    counters |= {f"hit_tokens_from_{name}": count for name, count in hits.items()}
    words = " ".join(shown(status.replicas_table([replica(**counters)]), width=120).split())
    assert "r-1 0 7 900 4% 50% 2% 4% 40% 320 not stored 2.5 s stage wait, 10 stored blocks" in words
    assert "busy" not in words
    assert "gone" in shown(status.replicas_table([replica(connected=False)]))
    ended = [
        {"ranks": 40, "counters": {"requests": 1500, "prompt_tokens": 9000, "hit_tokens": 700}},
        {"ranks": 2, "counters": {}},
    ]
    assert status.ended_line(ended) == (
        "42 ranks ended before and are not listed: 1,500 requests, 700 hit tokens."
    )
    assert status.ended_line(ended[1:]) == "2 ranks ended before and are not listed."
    totals = total_counters([replica(prompt_tokens=1), *ended])
    assert totals["prompt_tokens"] == 9001


def test_a_counter_or_name_with_markup_is_printed_as_it_is(capsys):
    name = "[/nothing][bold]"
    one = replica(name, counters={name: 7, f"miss_tokens_{name}": 8})
    shard = {"shard": f"kvray-shard-{name}", "state": name, "message": name, "replicas": [one]}
    lookup = {"state": "unreachable", "message": name}
    _print({"cluster_name": name, "lookup": lookup, "shards": [shard]})
    said = capsys.readouterr().out
    for line in (f"Tier {name}", f"7 {name}", f"8 {name}", f"not answer: {name}", f": {name}"):
        assert line in said


MINE = replace(NAMESPACE, model="sha256:ab")


def shard_of(*gone: str, **namespaces: Namespace) -> dict[str, Any]:
    """Return what the status of a shard says of replicas by name, in this order."""
    replicas = Replicas()
    for connection, (name, namespace) in enumerate(namespaces.items()):
        replicas.register(connection, name, 0, namespace)
        if name in gone:
            replicas.disconnect(connection)
    return {"replicas": replicas.status(), "namespaces": replicas.namespaces()}


def compared(*shards: dict[str, Any]) -> list[str]:
    """Return the lines of table and sentence; of no report nothing."""
    return rows(shown(*(status.namespaces_report(list(shards)) or ()), width=120))


def test_replicas_are_compared_by_what_differs_also_of_several_nodes_and_those_that_are_gone():
    assert compared(shard_of(a=MINE, b=MINE)) == compared() == compared({"state": "starting"}) == []
    shard = shard_of(a=MINE, b=replace(MINE, tp_layout="tp4"), c=MINE)
    title, _, first, last, digests, _, row, _, sentence = compared(shard)
    assert title == "Namespaces"
    assert digests.split() == [replica["namespace"] for replica in shard["replicas"]][:2]
    assert (first, last, row) == ("a", "c b", "tp_layout tp1 tp4")
    assert "unless they differ in their number of ranks alone" in sentence
    there = shard_of(b=replace(MINE, kv_dtype="float8", part_bytes=256))
    lines = compared(shard_of("a", a=MINE), there)
    assert {"a gone b", "kv_dtype bfloat16 float8", "part_bytes 512 256"} <= {*lines}


def test_an_engine_that_was_started_with_other_settings_is_compared_with_its_own_blocks():
    replicas, other = Replicas(), replace(MINE, kv_dtype="float8")
    for connection, namespace in enumerate((MINE, other)):
        replicas.register(connection, "a", 0, namespace)
        replicas.disconnect(connection)
    held = [{"namespace": MINE.digest().hex()[:8], "blocks": 3, "bytes": 3}]
    shard = {"replicas": replicas.status(), "namespaces": replicas.namespaces()}
    lines = compared({**shard, "arena": {"namespaces": held}})
    assert {"a gone no replica now", "kv_dtype float8 bfloat16"} <= {*lines}
    assert compared(shard) == []


def test_many_namespaces_and_replicas_are_cut_short_and_counted():
    many = {f"r{n}": replace(MINE, tp_layout=f"tp{n}") for n in range(8)}
    same = {f"s{n}": many["r0"] for n in range(6)}
    lines = compared(shard_of(**many, **same))
    assert "2 more namespaces are in kvray status --json." in lines[-1]
    assert {"tp_layout tp0 tp1 tp2 tp3 tp4 tp5", "and 3 more r1 r2 r3 r4 r5"} <= {*lines}


def reading(**changes: Any) -> dict[str, Any]:
    read = {"fingerprint_bytes": 120 * 2**30, "fingerprint_bytes_read": 30 * 2**30}
    return replica("a", **read | {"fingerprint_failed": 0, "uptime_s": 20} | changes)


FAR = "uses no tier until it has read its checkpoint: "


@pytest.mark.parametrize(
    ("one", "said", "fix"),
    [
        (reading(), f"{FAR}30GiB of 120GiB read, about 60 s left", "connector.model_key"),
        (reading(fingerprint_bytes_read=0), f"{FAR}0B of 120GiB read", "wait"),
        (reading(fingerprint_failed=1), "cannot read its checkpoint, and uses no tier", "log"),
        (replica("a", fingerprint_bytes=2**30), f"{FAR}0B of 1GiB read", "wait"),
        (reading(uptime_s=0), f"{FAR}30GiB of 120GiB read, about 0 s left", "wait"),
        (
            replica("a", uptime_s=9, is_named=False),
            *("uses no tier until the version of its weights is named", "set_weights_version"),
        ),
    ],
    ids=["it goes on", "it has just begun", "it failed", "unknown", "its time is not", "weights"],
)
def test_a_sentence_says_how_far_a_reading_is_and_what_to_do(one, said, fix):
    known = (replica(uptime_s=20), reading(connected=False))
    ((says, remedy),) = status.unnamed_sentences([one, *known])
    assert says == f"replica a rank 0 {said}"
    assert fix in remedy
    findings = {one.check: one for one in hit_findings({"shards": [{"replicas": [one]}]})}
    assert (findings["checkpoint"].says, findings["checkpoint"].fix) == (says, remedy)


def test_every_namespace_shows_what_it_has_and_may_have_but_one_without_a_quota_needs_no_table():
    one = {"namespace": "12ab34cd", "blocks": 3, "bytes": 3 * 2**20, "quota_bytes": 5 * 2**20}
    other = {"namespace": "", "blocks": 2, "bytes": 2 * 2**20, "quota_bytes": None}

    def report(*namespaces: dict[str, Any]) -> list[Any]:
        arena = {"namespaces": [*namespaces], "over_quota": 7}
        return status.shares_report(
            [{"shard": "kvray-shard-0123", "state": "serving", "arena": arena}]
        )

    assert {
        "0123 12ab34cd 3 3MiB 5MiB",
        "0123 not known 2 2MiB",
        "7 blocks were evicted because their namespace was over its quota.",
    } <= {*rows(shown(*report(one, other)))}
    assert report(one)
    assert report(other) == status.shares_report([{"shard": "b"}]) == []
