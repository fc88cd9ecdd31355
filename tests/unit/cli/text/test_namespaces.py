from dataclasses import replace
from typing import Any

from rich.console import Console

from kvray.actors.staging.replicas import Replicas
from kvray.cli.text.status import namespaces_report
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
