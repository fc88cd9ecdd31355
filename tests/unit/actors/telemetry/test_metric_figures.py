"""Figures of a real shard, lookup and supervisor: declared, labelled, and true to statuses."""

import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvray.actors.lookup.lookup import Lookup
from kvray.actors.shard.shard import Shard
from kvray.actors.telemetry.figures import Figures, PartCounts
from kvray.actors.telemetry.metric_figures import ShardFigures, lookup_figures, mover_figures
from kvray.metrics import METRICS, PREFIX
from kvray.node.stage_calls import ShardSocket
from tests.unit.actors.small_shard import (
    NAMESPACE,
    Line,
    nvme_for,
    open_arena,
    settings_for,
    wait_until_serving,
)
from tests.unit.store.small_arena import SLOT, chain, store
from tests.waiting import wait_for

NODE = "0123456789ab"
MINE = replace(NAMESPACE, part_bytes=SLOT)


@pytest.fixture
def shard() -> Iterator[Shard]:
    parent = Path(tempfile.mkdtemp(prefix="kvray-test-", dir="/dev/shm"))
    settings = settings_for(parent / "shm", nvme=nvme_for(parent), quotas={"": 2**20})
    made = Shard(f"kvray-shard-{NODE}", settings, [Line().announce])
    made.start()
    try:
        wait_until_serving(made)
        yield made
    finally:
        made.stop(retire=True, timeout_s=20)
        shutil.rmtree(parent)


def report(shard: Shard, **counters: int) -> None:
    directory = Path(shard.status()["directory"])
    socket = ShardSocket(directory)
    try:
        who = {"replica": "r", "rank": 0}
        socket.call("register", timeout_s=5, namespace=MINE.to_wire(), **who)
        socket.call("report", timeout_s=5, counters=counters, leaving=False, **who)
    finally:
        socket.close()


def totals(figures: Figures) -> dict[Any, float]:
    return {series: value for one in figures.totals for series, value in one.totals.items()}


def check_declared(figures: Figures) -> None:
    """Fail if a series is not declared, or has other labels than it should."""
    kinds = {"gauge": figures.gauges, "counter": totals(figures)}
    for kind, made in kinds.items():
        for name, labels in made:
            declared = METRICS[PREFIX + name]
            assert declared.kind == kind
            assert len(labels) == len(declared.labels), name


def test_a_shards_figures_are_declared_and_those_of_its_status(shard: Shard) -> None:
    arena = open_arena(Path(shard.status()["directory"]))
    try:
        store(arena, chain(3))
    finally:
        arena.close()
    report(shard, requests=2, hit_tokens=64, hit_tokens_from_host=64, uptime_s=1, lease_us_sum=9)
    wait_for(lambda: shard.status()["announcements"]["announcements"] > 0)

    status = shard.status()
    figures = ShardFigures(shard.name, 0.0).of(status, 5.0)

    check_declared(figures)
    found = totals(figures)
    assert found["stored_blocks_total", (NODE, "host")] == status["arena"]["stored"] == 3
    assert found["requests_total", (NODE, "r", "0")] == 2
    assert found["hit_tokens_total", (NODE, "r", "0", "host", "none")] == 64
    assert figures.gauges["shard_serving", (NODE,)] == 1
    assert figures.gauges["capacity_bytes", (NODE, "nvme")] > 0
    assert found["announcement_seconds_total", (NODE,)] > 0


def test_only_registered_namespaces_are_labels_whatever_else_the_arena_has(shard: Shard) -> None:
    report(shard, requests=1)
    status = shard.status()
    mine = MINE.digest().hex()[:8]
    status["arena"]["namespaces"] = [
        {"namespace": name, "blocks": 1, "bytes": 10, "quota_bytes": 100}
        for name in (mine, "deadbeef", "")
    ]

    figures = ShardFigures(shard.name, 0.0).of(status, 5.0)

    sizes = {
        labels[-1]: value
        for (name, labels), value in figures.gauges.items()
        if name == "resident_bytes" and "host" in labels
    }
    assert sizes == {mine: 10, "other": 20}
    quotas = [labels[-1] for name, labels in figures.gauges if name == "quota_bytes"]
    assert quotas == [mine]


def test_what_an_adopted_arena_had_counted_is_not_counted_again(shard: Shard) -> None:
    status = shard.status()
    status["arena"]["shard_epoch"] = 2

    figures = ShardFigures(shard.name, 0.0).of(status, 5.0)

    assert {one.source: one.counted_before for one in figures.totals}["arena"]


def test_a_shard_that_does_not_serve_says_so_and_no_more() -> None:
    figures = ShardFigures(f"kvray-shard-{NODE}", 0.0).of({"state": "preparing"}, 1.0)

    assert figures.gauges == {("shard_serving", (NODE,)): 0.0}
    assert figures.totals == []


def test_figures_of_lookup_mover_and_supervisor_are_declared() -> None:
    lookup = Lookup()
    lookup.match(b"k" * 64, 1, time.monotonic())

    found = lookup_figures(lookup.status(time.monotonic()), 0)

    check_declared(found)
    assert totals(found)["lookup_queried_blocks_total", ("0",)] == 2
    mover = mover_figures(f"kvray-mover-{NODE}", {"arena_id": "a", "sent_bytes": {"nixl": 7}})
    check_declared(mover)
    assert totals(mover) == {("moved_bytes_total", (NODE, "nixl", "out")): 7}
    check_declared(mover_figures("kvray-mover-b", {"state": "waiting"}))
    check_declared(PartCounts().note({"kvray-shard-a"}, set(), []))


def test_the_curve_has_a_series_for_each_size_of_the_memory_and_registered_namespace() -> None:
    made = ShardFigures(f"kvray-shard-{NODE}", 0.0)
    made._namespaces.add("3f0a91c2")
    curve = {"own": 0.1, "host": [0.2, 0.3], "disk": [0.05, 0.0], "error": [0.01, 0.02]}
    traffic = {
        "host_bytes": 100,
        "sizes": [50, 100],
        "namespaces": {"3f0a91c2": curve, "00ff00ff": curve},
    }
    found = made._expected(traffic)
    assert {labels for name, labels in found if name == "expected_hit_ratio"} == {
        (NODE, "3f0a91c2", "0.5"),
        (NODE, "3f0a91c2", "1"),
    }
    assert found["expected_hit_ratio", (NODE, "3f0a91c2", "0.5")] == pytest.approx(0.35)
    assert found["expected_hit_error", (NODE, "3f0a91c2", "1")] == 0.02
    assert made._expected({"namespaces": {}}) == {}


ALL = {"kvray-shard-a", "kvray-shard-b", "kvray-mover-a", "kvray-lookup"}
LESS = ALL - {"kvray-shard-a"}


def counted() -> PartCounts:
    counts = PartCounts()
    counts.expect(ALL)
    return counts


def total(figures: Figures, name: str, kind: str) -> float:
    (one,) = figures.totals
    return one.totals[name, (kind,)]


def test_a_part_that_starts_is_no_outage_and_one_that_stops_is_one() -> None:
    counts = counted()
    counts.note(ALL, LESS, [])
    counts.note(ALL, ALL, [])
    figures = counts.note(ALL, LESS, [])
    figures = counts.note(ALL, LESS, [])

    assert figures.gauges["parts", ("shard",)] == 2
    assert figures.gauges["answering_parts", ("shard",)] == 1
    assert figures.gauges["answering_parts", ("lookup",)] == 1
    assert total(figures, "outages_total", "shard") == 1
    assert total(figures, "outages_total", "lookup") == 0


def test_a_part_whose_node_has_left_is_no_outage() -> None:
    counts = counted()
    counts.note(ALL, ALL, [])

    counts.expect(LESS)
    figures = counts.note(LESS, LESS, [])

    assert total(figures, "outages_total", "shard") == 0
    assert figures.gauges["parts", ("shard",)] == 1
    assert figures.gauges["answering_parts", ("shard",)] == 1


def test_a_part_that_was_not_asked_has_not_stopped() -> None:
    counts = counted()
    counts.note(ALL, ALL, [])
    figures = counts.note({"kvray-shard-b"}, set(), [])

    assert figures.gauges["answering_parts", ("shard",)] == 1
    assert figures.gauges["answering_parts", ("mover",)] == 1
    assert total(figures, "outages_total", "shard") == 1


def test_frozen_parts_that_were_ended_are_counted() -> None:
    figures = counted().note(ALL, LESS, ["kvray-shard-a"])

    assert total(figures, "ended_parts_total", "shard") == 1
