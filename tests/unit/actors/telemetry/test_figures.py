"""Figures of a real shard, lookup and supervisor: declared, labelled, and true to statuses.

A rank's counters become totals of metrics, told apart by lives; growth is given once. What goes
wrong in the exporter's thread is nobody else's trouble.
"""

import logging
import math
import threading
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvray.actors.lookup.lookup import Lookup
from kvray.actors.shard.shard import Shard
from kvray.actors.telemetry import metrics_export
from kvray.actors.telemetry.figures import (
    Figures,
    Increments,
    PartCounts,
    RankFigures,
    Series,
    ShardFigures,
    lookup_figures,
    mover_figures,
    totals_of,
)
from kvray.actors.telemetry.metrics_export import MetricsExport, MetricsThread
from kvray.engine.shared_state import DropReason, TimeHistogram
from kvray.errors import ShardUnavailable
from kvray.metrics import METRICS, PREFIX
from kvray.node.stage_calls import ShardSocket
from tests.unit.actors.conftest import StartShard
from tests.unit.actors.small_shard import NAMESPACE, nvme_for
from tests.unit.store.small_arena import SLOT, chain, store
from tests.waiting import HANG_S, wait_for

NODE = "0123456789ab"
MINE = replace(NAMESPACE, part_bytes=SLOT)


@pytest.fixture
def shard(make_shard: StartShard, tmp_path: Path) -> Shard:
    return make_shard(f"kvray-shard-{NODE}", nvme=nvme_for(tmp_path), quotas={"": 2**20})


def report(shard: Shard, **counters: int) -> None:
    with closing(ShardSocket(Path(shard.status()["directory"]))) as socket:
        who = {"replica": "r", "rank": 0, "timeout_s": 5}
        socket.call("register", namespace=MINE.to_wire(), **who)
        socket.call("report", counters=counters, leaving=False, **who)


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


def test_a_shards_figures_are_declared_and_those_of_its_status(shard, arena):
    store(arena, chain(3))
    report(shard, requests=2, hit_tokens=64, hit_tokens_from_host=64, uptime_s=1, lease_us_sum=9)
    wait_for(lambda: shard.status()["announcements"]["announcements"] > 0)
    status = shard.status()
    figures = ShardFigures(shard.name, 0.0).of(status, 5.0)
    check_declared(figures)
    found = totals(figures)
    placed = {one.name for one in METRICS.values() if one.part == "shard" and one.places}
    missing = placed - {PREFIX + name for name, _ in (*figures.gauges, *found)}
    assert missing == {"kvray_nvme_write_budget_bytes"}, "without a budget"
    assert found["stored_blocks_total", (NODE, "host")] == status["arena"]["stored"] == 3
    assert found["requests_total", (NODE, "r", "0")] == 2
    assert found["hit_tokens_total", (NODE, "r", "0", "host", "none")] == 64
    assert figures.gauges["shard_serving", (NODE,)] == 1
    assert figures.gauges["capacity_bytes", (NODE, "nvme")] > 0
    assert found["announcement_seconds_total", (NODE,)] > 0
    status["arena"]["shard_epoch"] = 2  # what an adopted arena had counted is not counted again
    adopted = ShardFigures(shard.name, 0.0).of(status, 5.0)
    assert {one.source for one in adopted.totals if one.counted_before} == {"arena"}
    assert not any(one.counted_before for one in figures.totals)


def test_only_registered_namespaces_are_labels_whatever_else_the_arena_has(shard):
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


def test_figures_of_lookup_mover_and_supervisor_are_declared_and_of_a_shard_that_does_not_serve():
    lookup = Lookup()
    lookup.match(1, b"k" * 64)
    found = lookup_figures(lookup.status(), 0)
    check_declared(found)
    assert totals(found)["lookup_queried_blocks_total", ("0",)] == 2
    mover = mover_figures(f"kvray-mover-{NODE}", {"arena_id": "a", "sent_bytes": {"nixl": 7}})
    check_declared(mover)
    assert totals(mover) == {("moved_bytes_total", (NODE, "nixl", "out")): 7}
    check_declared(mover_figures("kvray-mover-b", {"state": "waiting"}))
    check_declared(PartCounts().note({"kvray-shard-a"}, set(), []))
    waiting = ShardFigures(f"kvray-shard-{NODE}", 0.0).of({"state": "preparing"}, 1.0)
    assert (waiting.gauges, waiting.totals) == ({("shard_serving", (NODE,)): 0.0}, [])


def test_the_curve_has_a_series_for_each_size_of_the_memory_and_registered_namespace():
    made = ShardFigures(f"kvray-shard-{NODE}", 0.0)
    made._namespaces.add("3f0a91c2")
    curve = {"own": 0.1, "host": [0.2, 0.3], "disk": [0.05, 0.0], "error": [0.01, 0.02]}
    curve |= {"remote": [0.02, 0.01], "is_sure": True}
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
    assert found["expected_hit_ratio", (NODE, "3f0a91c2", "0.5")] == pytest.approx(0.37)
    assert found["expected_hit_error", (NODE, "3f0a91c2", "1")] == 0.02
    assert made._expected({"namespaces": {}}) == {}
    curve["is_sure"] = False
    assert made._expected(traffic) == {}, "it says nothing of what it is not sure"


ALL = {"kvray-shard-a", "kvray-shard-b", "kvray-mover-a", "kvray-lookup"}
LESS = ALL - {"kvray-shard-a"}


OUTAGES = {
    "one that starts is none and one that stops is one": (
        [(ALL, ALL, LESS), (ALL, ALL, ALL), (ALL, ALL, LESS), (ALL, ALL, LESS)],
        {"parts": 2, "answering_parts": 1, "outages_total": 1, "ended_parts_total": 3},
    ),
    "one whose node has left is none": (
        [(ALL, ALL, ALL), (LESS, LESS, LESS)],
        {"parts": 1, "answering_parts": 1, "outages_total": 0, "ended_parts_total": 0},
    ),
    "one that was not asked has not stopped": (
        [(ALL, ALL, ALL), (ALL, {"kvray-shard-b"}, set())],
        {"parts": 2, "answering_parts": 1, "outages_total": 1, "ended_parts_total": 1},
    ),
}
"""A round is who is there, who is asked and who answers; the others were ended as frozen."""


@pytest.mark.parametrize(("rounds", "shards"), OUTAGES.values(), ids=OUTAGES)
def test_which_parts_are_an_outage(rounds, shards):
    counts = PartCounts()
    for there, asked, alive in rounds:
        counts.expect(there)
        figures = counts.note(asked, alive, asked - alive)
    found = figures.gauges | totals(figures)
    assert {name: found[name, ("shard",)] for name in shards} == shards
    assert found["answering_parts", ("lookup",)] == found["answering_parts", ("mover",)] == 1
    assert found["outages_total", ("lookup",)] == 0


# -- ranks ----------------------------------------------------------------------------------------

REASONS = [reason.value for reason in DropReason]
REQUESTS = "requests_total"
RANK = ("node", "r", "0")


def rank(counters: dict[str, int], *, replica: str = "r", connected: bool = True) -> dict[str, Any]:
    return {"replica": replica, "rank": 0, "connected": connected, "counters": counters}


def counted(figures: Figures) -> list[tuple[str, ...]]:
    """Return the labels of each rank's counter of requests."""
    return [labels for one in figures.totals for name, labels in one.totals if name == REQUESTS]


COUNTED = {
    "hits are told apart by tier and transport": (
        {"hit_tokens": 100}
        | {f"hit_tokens_from_{one}": n for one, n in (("host", 60), ("nvme", 10), ("nixl", 30))},
        "hit_tokens_total",
        {("host", "none"): 60, ("nvme", "none"): 10, ("remote", "nixl"): 30},
    ),
    "reasons that nobody knows are one label": (
        {"miss_tokens_evicted": 1, "miss_tokens_a": 2, "miss_tokens_prompt text": 3},
        "miss_tokens_total",
        {("evicted",): 1, ("other",): 5},
    ),
    "unsaved blocks have the reasons that engines name": (
        {f"dropped_blocks_{reason}": 2 for reason in REASONS} | {"dropped_blocks_x": 3},
        "unsaved_blocks_total",
        {(reason,): 2 for reason in REASONS} | {("other",): 3},
    ),
}


@pytest.mark.parametrize(("counters", "metric", "expected"), COUNTED.values(), ids=COUNTED)
def test_counters_of_a_rank_become_totals(counters, metric, expected):
    totals = totals_of(counters)
    assert {labels: n for (name, labels), n in totals.items() if name == metric} == expected


def test_buckets_of_the_connector_become_cumulative_and_keep_their_sum():
    timings = TimeHistogram()
    for nanoseconds in (1_000, 40_000, 40_000, 1_000_000, 10**11):
        timings.observe(nanoseconds)
    totals = totals_of(timings.counters("lease"))
    found = [(labels, n) for (name, labels), n in totals.items() if "_bucket_" in name]
    buckets = {float(bound): value for (bound,), value in found}
    assert buckets[2**15 / 1e9] == 1
    assert buckets[2**16 / 1e9] == 3
    assert buckets[2**20 / 1e9] == 4
    assert buckets[math.inf] == totals["lease_count_total", ()] == 5
    assert list(buckets.values()) == sorted(buckets.values())
    assert totals["lease_seconds_sum_total", ()] == 100.001081
    others = totals_of({"stage_ns_below_100000": 2, "stage_us_sum": 150})  # no bound of ours
    bounds = (f"{2.0**bits / 1e9:.9f}" for bits in (16, 17))
    assert [others["stage_seconds_bucket_total", (bound,)] for bound in bounds] == [0, 2]


LIVES: dict[str, tuple[float, list[tuple[int | None, int, float]], list[int]]] = {
    "an engine that is restarted counts on": (
        0.0,
        [(10, 50, 50), (12, 60, 60), (0, 0, 61), (20, 5, 66)],
        [10, 12, 12, 32],
    ),
    "one that is older than the shard is not counted twice": (
        1000.0,
        [(500, 300, 1002), (503, 310, 1012), (7, 2, 1022)],
        [0, 3, 10],
    ),
    "nor one that is older and has not reported yet": (
        1000.0,
        [(0, 0, 1001), (500, 300, 1002), (501, 301, 1003)],
        [0, 0, 1],
    ),
    "nor one that comes and goes": (0.0, [(5, 30, 31), (None, 0, 32), (6, 34, 35)], [5, 5, 6]),
    "one that started under this shard counts from its first request": (
        1000.0,
        [(5, 30, 1031)],
        [5],
    ),
}
"""When the shard began; requests, age and time of each look, 0 requests where the rank has
registered and not reported yet, None where it is gone since; and what the increments sum up to
after each look."""


@pytest.mark.parametrize("name", LIVES)
def test_a_rank_is_counted_once_over_its_lives_and_the_shards(name):
    began, looks, sums = LIVES[name]
    figures, increments, total, found = RankFigures("node", began), Increments[Series](), 0.0, []
    for requests, uptime_s, now in looks:
        counters = {"requests": requests, "uptime_s": uptime_s} if requests else {}
        totals = figures.look([rank(counters, connected=requests is not None)], now).totals
        for one in totals:
            before = one.counted_before
            grown = increments.take(one.source, one.totals, counted_before=before)
            assert all(labels[:3] == RANK for _, labels in grown)
            total += grown.get((REQUESTS, RANK), 0.0)
        increments.retain({one.source for one in totals})
        found.append(total)
    assert found == sums


def test_a_name_that_is_no_text_for_a_metrics_page_is_made_one():
    strange = rank({"requests": 1}, replica="a\udc80" + "b" * 300)
    ((_, name, _),) = counted(RankFigures("node", 0.0).look([strange], 1.0))
    assert name.encode().decode() == "a?" + "b" * 62


def test_however_many_have_come_and_gone_those_that_are_here_are_named():
    figures = RankFigures("node", 0.0)
    for number in range(200):
        gone = [rank({"requests": 1}, replica=f"r{number}", connected=False)]
        found = figures.look([*gone, rank({"requests": 1}, replica=f"s{number}")], number)
    assert counted(found)[1] == ("node", "other", "0"), "Ray keeps a counter's labels for ever"
    assert found.gauges["rank_connected", ("node", "s199", "0")] == 1
    many = [rank({"requests": 1}, replica=f"r{number}") for number in range(200)]
    found = figures.look(many, 300.0)
    assert len(found.gauges) == 129
    assert len(set(counted(RankFigures("node", 0.0).look(many, 1.0)))) == 129, "others share one"


def test_a_total_that_falls_gives_nothing_until_it_is_higher_than_ever_or_its_source_is_forgotten():
    increments: Increments[str] = Increments()
    grown = [increments.take("a", {"hits": total})["hits"] for total in (10, 4, 10, 11)]
    assert grown == [10, 0, 0, 1]
    assert increments.take("b", {"hits": 3}) == {"hits": 3}
    increments.retain({"a"})
    assert increments.take("a", {"hits": 11}) == {"hits": 0}
    assert increments.take("b", {"hits": 3}) == {"hits": 3}


@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from("xy"), st.integers(0, 50)), max_size=8),
        min_size=1,
        max_size=6,
    ),
    st.booleans(),
)
def test_over_any_lives_the_increments_add_up_to_what_was_counted(lives, counted_before):
    increments: Increments[str] = Increments()
    given_, counted = {"x": 0.0, "y": 0.0}, {"x": 0, "y": 0}
    is_first_look = True
    for life, steps in enumerate(lives):
        totals = {"x": 0, "y": 0}
        for name, by in steps:
            totals[name] += by
            is_theirs = is_first_look and counted_before
            grown = increments.take(life, totals, counted_before=is_theirs)
            assert all(value >= 0 for value in grown.values())
            if is_theirs:
                is_first_look = False
                given_ = {key: float(value) for key, value in totals.items()}
            else:
                given_ = {key: given_[key] + grown[key] for key in given_}
        counted = {key: counted[key] + totals[key] for key in counted} if steps else counted
    assert given_ == counted


# -- the exporter ---------------------------------------------------------------------------------


def test_what_goes_wrong_is_logged_once_and_tried_again(caplog):
    looks, enough = [], threading.Event()

    def look(now: float) -> Figures:
        looks.append(now)
        if len(looks) < 4:
            raise ValueError("a defect")
        enough.set()
        return Figures()

    with ExitStack() as stack:
        stack.callback(MetricsThread(look, "tier", every_s=0.3).stop)
        assert enough.wait(HANG_S)
    (said,) = (record.getMessage() for record in caplog.records)
    assert said == "the export of figures failed and will be tried again"


def test_a_part_that_starts_or_ends_has_no_figures_and_that_is_no_error(caplog):
    with caplog.at_level(logging.INFO):
        MetricsExport("tier").attempt(Mock(side_effect=ShardUnavailable("It is closed.")), 1.0)
    assert caplog.records == []


@pytest.mark.parametrize(("work_s", "looks"), [(0.0, [10.0, 10.5, 11.0]), (0.02, [10.0, 11.0])])
def test_figures_are_looked_at_the_less_often_the_more_work_it_is(monkeypatch, work_s, looks):
    export, look = MetricsExport("tier"), Mock(return_value=Figures())
    monkeypatch.setattr(metrics_export.time, "thread_time", lambda: work_s * look.call_count)
    for tenths in range(100, 112):
        export.attempt(look, tenths / 10)
    assert look.call_args_list == [*map(call, looks)]
