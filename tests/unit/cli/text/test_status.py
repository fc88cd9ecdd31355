"""Parts of `kvray status`: memory, namespaces, and engines that still read their checkpoints."""

from dataclasses import replace
from typing import Any

from rich.console import Console

from kvray.actors.staging.replicas import Replicas
from kvray.cli.doctor.tier import hit_findings
from kvray.cli.text.status import namespaces_report, shares_report, unnamed_sentences
from kvray.identity.block import Namespace
from tests.unit.actors.small_shard import NAMESPACE

MINE = replace(NAMESPACE, model="sha256:ab")


def shard_of(**namespaces: Namespace) -> tuple[Replicas, dict[str, Any]]:
    """Return the replicas of a shard, by name and in this order, and what its status says."""
    replicas = Replicas()
    for connection, (name, namespace) in enumerate(namespaces.items()):
        replicas.register(connection, name, 0, namespace)
    return replicas, status_of(replicas)


def status_of(replicas: Replicas) -> dict[str, Any]:
    return {"replicas": replicas.status(), "namespaces": replicas.namespaces()}


def words_of(*shards: dict[str, Any]) -> list[list[str]]:
    """Return the lines of table and sentence as words; of no report nothing."""
    console = Console(width=120, highlight=False)
    with console.capture() as capture:
        for line in namespaces_report(list(shards)) or ():
            console.print(line, soft_wrap=True)
    return [line.split() for line in capture.get().splitlines()]


def test_replicas_of_one_namespace_need_no_table() -> None:
    _, shard = shard_of(a=MINE, b=MINE)
    assert words_of(shard) == []
    assert words_of() == []
    assert words_of({"state": "preparing"}) == []


def test_only_what_differs_is_shown_and_who_differs() -> None:
    _, shard = shard_of(a=MINE, b=replace(MINE, tp_layout="tp4"), c=MINE)
    title, _, first, last, digests, _, row, _, sentence = words_of(shard)
    assert title == ["Namespaces"]
    assert digests == [replica["namespace"] for replica in shard["replicas"]][:2]
    assert (first, last) == (["a"], ["c", "b"])
    assert row == ["tp_layout", "tp1", "tp4"]
    assert sentence[:5] == ["Replicas", "in", "different", "columns", "share"]


def test_replicas_of_several_nodes_are_compared() -> None:
    _, here = shard_of(a=MINE)
    _, there = shard_of(b=replace(MINE, kv_dtype="float8", part_bytes=256))
    rows = words_of(here, there)
    assert ["kv_dtype", "bfloat16", "float8"] in rows
    assert ["part_bytes", "512", "256"] in rows


def test_who_is_gone_is_shown_too_since_their_blocks_are_not_found() -> None:
    replicas, _ = shard_of(a=MINE, b=replace(MINE, tp_layout="tp4"))
    replicas.disconnect(0)
    assert ["a", "gone", "b"] in words_of(status_of(replicas))


def test_many_namespaces_and_replicas_are_cut_short_and_counted() -> None:
    many = {f"r{n}": replace(MINE, tp_layout=f"tp{n}") for n in range(8)}
    same = {f"s{n}": many["r0"] for n in range(6)}
    _, shard = shard_of(**many, **same)
    rows = words_of(shard)
    assert "2 more namespaces are in kvray status --json." in " ".join(rows[-1])
    assert ["tp_layout", "tp0", "tp1", "tp2", "tp3", "tp4", "tp5"] in rows
    assert ["and", "3", "more", "r1", "r2", "r3", "r4", "r5"] in rows


def test_names_and_values_are_no_markup() -> None:
    _, shard = shard_of(**{"[red]": MINE, "b": replace(MINE, overrides="[bold]")})
    text = str(words_of(shard))
    assert "[red]" in text
    assert "[bold]" in text


def replica(**changes: Any) -> dict[str, Any]:
    counters = {
        "fingerprint_bytes": 120 * 2**30,
        "fingerprint_bytes_read": 30 * 2**30,
        "fingerprint_failed": 0,
        "uptime_s": 20,
    }
    own = {"replica": "a", "rank": 0, "connected": True, "namespace": "01"}
    return own | {"counters": counters | changes}


def test_the_sentence_says_how_far_a_reading_is_and_what_to_do() -> None:
    ((says, fix),) = unnamed_sentences([replica()])
    assert says.startswith("replica a rank 0 uses no tier until")
    assert says.endswith("30GiB of 120GiB read, about 60 s left")
    assert "connector.model_key" in fix


def test_a_reading_that_has_just_begun_has_no_time_left() -> None:
    ((says, _),) = unnamed_sentences([replica(fingerprint_bytes_read=0)])
    assert says.endswith("of 120GiB read")


def test_figures_that_are_missing_count_as_none() -> None:
    said = []
    for one in ({}, {"fingerprint_bytes_read": 2**29}):
        ((says, _),) = unnamed_sentences(
            [replica() | {"counters": {"fingerprint_bytes": 2**30} | one}]
        )
        said.append(says.partition(": ")[2])
    assert said == ["0B of 1GiB read", "512MiB of 1GiB read, about 0 s left"]


def test_a_reading_that_failed_leads_to_the_log() -> None:
    ((says, fix),) = unnamed_sentences([replica(fingerprint_failed=1)])
    assert "cannot read its checkpoint" in says
    assert "log" in fix


def test_who_knows_its_checkpoint_or_is_gone_has_no_sentence() -> None:
    known = replica()
    known["counters"] = {"uptime_s": 20}
    assert not list(unnamed_sentences([known, replica() | {"connected": False}]))


def test_doctor_says_why_nothing_is_promised_yet() -> None:
    status = {"shards": [{"replicas": [replica()]}]}
    findings = {one.check: one for one in hit_findings(status)}
    assert "30GiB of 120GiB" in findings["checkpoint"].says


def memory_shard_of(
    *namespaces: tuple[str, int, int | None], over_quota: int = 0
) -> dict[str, Any]:
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
    lines = lines_of(memory_shard_of(("12ab34cd", 3, 5 * 2**20), ("", 2, None), over_quota=7))
    assert "0123 12ab34cd 3 3MiB 5MiB" in lines
    assert "0123 not known 2 2MiB" in lines
    assert "7 blocks were evicted because their namespace was over its quota." in lines


def test_one_namespace_without_a_quota_needs_no_table() -> None:
    assert shares_report([memory_shard_of(("12ab34cd", 3, None)), {"shard": "b"}]) == []
    assert len(shares_report([memory_shard_of(("12ab34cd", 3, 2**30))])) == 1
