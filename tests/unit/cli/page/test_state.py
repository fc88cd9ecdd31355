"""The state of the page: what is there, what is old, and who brings the answers."""

import asyncio
import json
import sys
import time
from typing import Any

import pytest

from kvray.cli.hits import ReplicaRates
from kvray.cli.page import command
from kvray.cli.page.command import Feed
from kvray.cli.page.state import CONTENTS, REQUESTS, STATUS, PageState, Shares
from tests.unit.cli.answers import MARKUP, NOW, TRAFFIC, contents, requests, silent, status
from tests.waiting import HANG_S


@pytest.fixture
def shown() -> PageState:
    """Of a tier that answered each two seconds for 18, and then with everything."""
    shown = PageState("prod")
    for second in range(0, 20, 2):
        shown.take({"part": STATUS, "answer": status(second)}, NOW + second)
    shown.take({"part": CONTENTS, "answer": contents()}, NOW + 18)
    shown.take({"part": REQUESTS, "answer": requests(NOW + 20)}, NOW + 18)
    return shown


def state(shown: PageState, at: float, since: float = 0.0) -> dict[str, Any]:
    return shown.state(NOW + at, since)


def test_page_has_what_commands_show(shown):
    found = state(shown, 18)
    assert found["headline"] == "Tier prod: 2 nodes; the lookup knows 1,234 keys."
    assert [(one["name"], one["value"], one["of"]) for one in found["figures"]] == [
        ("hit rate now", "60%", "of prompt tokens"),
        ("hit rate, 1 h", "60%", "of those of 10 s"),
        ("prompt tokens", "200", "per second"),
        ("memory", "2MiB", "of 8MiB taken"),
        ("disk", "2GiB", "of 8GiB taken"),
        ("faults", "0", "at present"),
    ]
    first, _ = found["nodes"]
    assert [one["text"] for one in first["meters"]] == ["25% of 4MiB taken", "25% of 4GiB taken"]
    assert "3 blocks/s evicted" in first["figures"]
    assert found["replicas"]["rows"][0][:3] == [f"on-aa {MARKUP}", "0", "aa"]
    assert sorted(row[:2] for row in found["links"]["rows"]) == [["aa", "bb"], ["bb", "aa"]]
    (hottest,) = found["prefixes"]["hottest"]
    assert hottest["table"]["rows"] == [["00ff00ff", "aa, bb", "9", "144", "82", "2 s ago"]]
    latest, _ = found["requests"]["list"]
    assert "160 of 320 tokens were hits" in latest["report"][-1]
    assert (latest["number"], latest["sources"]) == ("7", [0, 0, 0, 160])
    assert found["findings"][-1]["verdict"] == "hint"
    assert "With +32GiB of host memory 53 % of prompt tokens would hit" in found["curve"]["says"][0]
    points = found["curve"]["points"]
    assert (points["unit"], points["now"], points["sizes"][0]) == ("GiB", 32.0, 8.0)
    assert (points["own"], points["host"][2], points["disk"][2]) == (0.1, 0.33, 0.04)
    seen = status(20, first_tokens_s={"num": 9, "p50": 0.0504, "p90": 1.25})
    shown.take({"part": STATUS, "answer": seen}, NOW + 20)
    figures = [[*one.values()] for one in state(shown, 20)["figures"]]
    assert ["first token, 10 min", "50 ms", "p50; p90 1.2 s"] in figures


def test_the_hour_begins_anew_when_a_node_with_its_counters_goes_or_comes(shown):
    without = status(20)
    without["shards"][1] = silent("bb")
    for second, answer in ((20, without), (40, status(40)), (60, status(60))):
        shown.take({"part": STATUS, "answer": answer}, NOW + second)
        figure = state(shown, second)["figures"][1]
        grown = {20: "of those of 0 s", 60: "of those of 20 s"}
        if second in grown:
            assert figure["of"] == grown[second]
    assert figure["value"] == "60%"


def test_history_is_handed_out_once_and_has_a_gap_where_nobody_answered_or_asked(shown):
    points = state(shown, 18)["shares"]["points"]
    assert points[-1]["rates"][""] == [0.0, 120.0, 0.0, 0.0, 80.0]
    assert points[-1]["rates"][f"on-bb {MARKUP}"] == [0.0, 60.0, 0.0, 0.0, 40.0]
    shown.take({"part": STATUS, "trouble": "No answer."}, NOW + 20)
    assert state(shown, 20, points[-1]["at"])["shares"]["points"] == [{"at": NOW + 20, "rates": {}}]
    for second in (22, 60):
        shown.take({"part": STATUS, "answer": status(second)}, NOW + second)
    points = state(shown, 60, NOW + 20)["shares"]["points"]
    assert [bool(one["rates"]) for one in points] == [True, False, True]


def test_page_calls_nodes_by_their_hosts_and_models_by_what_is_served():
    hosts = {"aa": {"name": "gpu-1", "ip": "10.0.0.1"}, "bb": {"name": "gpu-0", "ip": "10.0.0.2"}}
    shown, told = PageState("prod"), status(20, hosts=hosts)
    for shard in told["shards"]:
        shard["namespaces"]["3f0a91c2"] |= {"model": "sha256:ab", "served": "Qwen3-8B"}
    shown.take({"part": STATUS, "answer": told}, NOW)
    shown.take({"part": CONTENTS, "answer": contents()}, NOW)
    shown.take({"part": REQUESTS, "answer": requests(NOW)}, NOW)
    found = state(shown, 1)
    assert [one["name"] for one in found["nodes"]] == ["gpu-0 (10.0.0.2)", "gpu-1 (10.0.0.1)"]
    assert "brought over NIXL from node gpu-1 (10.0.0.1)" in str(found["requests"])
    assert found["prefixes"]["hottest"][0]["of"] == "Qwen3-8B (3f0a91c2)"
    text = json.dumps(found)
    assert "gpu-0 (10.0.0.2), gpu-1" in text or "gpu-1 (10.0.0.1), gpu-0" in text
    for unread in ("kvray-shard-", "sha256"):
        assert unread not in text


def test_tier_that_falls_silent_leaves_its_figures_with_their_age_and_the_reason(shown):
    for second in (20, 22, 24):
        shown.take({"part": STATUS, "trouble": "No answer."}, NOW + second)
    shown.lose("The process that asks has ended.", NOW + 25)
    found = state(shown, 25)
    part = found["parts"][STATUS]
    assert (part["age_s"], part["trouble"], part["trouble_s"]) == (7.0, "No answer.", 5.0)
    assert found["nodes"]
    shown.take({"part": STATUS, "answer": status(26)}, NOW + 26)
    found = state(shown, 26)
    assert found["parts"][STATUS]["trouble"] == ""
    # Rates over the gap would not be those of the present.
    assert found["figures"][0]["value"] == "\N{EN DASH}"


def test_shard_that_does_not_answer_keeps_its_last_figures_and_their_age(shown):
    gone = status(20)
    gone["shards"] = [gone["shards"][0], silent("bb")]
    shown.take({"part": STATUS, "answer": gone}, NOW + 20)
    first, second = state(shown, 22)["nodes"]
    assert (first["old_s"], second["old_s"]) == (None, 4.0)
    assert (second["state"], second["message"]) == ("unreachable", "No answer in 2 s.")
    assert second["meters"][0]["text"] == "25% of 4MiB taken"
    assert not any("/s" in one for one in second["figures"])
    assert state(shown, 22)["without"] == "Without node bb, which does not answer."
    (fault,) = [one for one in state(shown, 23)["findings"] if one["verdict"] == "fault"]
    assert fault["text"].startswith("shard bb: does not answer")
    assert fault["age_s"] == 3.0


def test_frozen_lookup_is_a_fault_with_its_time_and_shards_are_shown(shown):
    lookup = {"lookup": "kvray-lookup", "state": "unreachable", "message": "No answer in time."}
    for second in (20, 24):
        shown.take({"part": STATUS, "answer": status(second, lookup=lookup)}, NOW + second)
    found = state(shown, 25)
    assert "the lookup does not answer: No answer in time." in found["headline"]
    assert [one["age_s"] for one in found["findings"] if one["verdict"] == "fault"] == [5.0]
    assert all(one["is_healthy"] for one in found["nodes"])


def test_empty_tier_says_that_no_replica_has_registered_but_not_of_a_silent_node():
    shown = PageState("prod")
    shards = [
        {**one, "replicas": [], "namespaces": {}, "traffic": {**TRAFFIC, "namespaces": {}}}
        for one in status()["shards"]
    ]
    empty = {"contents": {one["shard"]: {"namespaces": {}} for one in shards}, "prefixes": {}}
    shown.take({"part": STATUS, "answer": status(shards=shards)}, NOW)
    shown.take({"part": CONTENTS, "answer": empty}, NOW)
    found = state(shown, 1)
    assert (found["replicas"], found["totals"]) == (None, "")
    assert any("no engine has registered" in one["text"] for one in found["findings"])
    assert found["prefixes"]["namespaces"] is None
    assert found["curve"]["points"] is None
    assert "Not enough traffic yet" in found["curve"]["says"][0]

    shown.take({"part": STATUS, "answer": status(shards=[silent("aa")], movers=[])}, NOW)
    found = state(shown, 1)
    assert found["replicas"] is None
    assert found["without"]
    assert not any("registered" in one["text"] for one in found["findings"]), "it may have some"


def test_shard_that_is_on_its_way_says_how_far():
    shown = PageState("prod")
    for name in ("preparing", "flushing"):
        one = {"shard": "kvray-shard-aa", "state": name, "done": 1, "total": 4}
        shown.take({"part": STATUS, "answer": status(shards=[one], movers=[])}, NOW)
        (node,) = state(shown, 1)["nodes"]
        assert (node["state"], node["is_healthy"], node["meters"]) == (f"{name} 25 %", False, [])


def test_history_is_bounded_in_time_and_in_replicas():
    shares = Shares()
    rank = ReplicaRates({}, "", {"prompt_tokens": 4.0, "hit_tokens_from_host": 3.0}, {})
    ranks = [rank._replace(rank={"replica": f"r{number}"}) for number in range(99)]
    for second in range(0, 4000, 2):
        shares.add(second, ranks)
    points = shares.since(0)
    assert (len(points), points[-1]["at"]) == (900, 3998)
    assert {len(one["rates"]) for one in points} == {33}
    assert points[0]["rates"][""] == [0.0, 297.0, 0.0, 0.0, 99.0]


ANSWER = json.dumps({"part": STATUS, "answer": status()})
ENDS = f"print({ANSWER!r})"
HANGS = f"import time; print({ANSWER!r}, flush=True); time.sleep(60)"
ECHOES = f"import sys; sys.stdin.readline(); print({ANSWER!r}, flush=True); sys.stdin.read()"


def fed(code: str, until: str, *, looks: bool = False) -> str:
    """Feed a page by a process that runs `code` until it has this trouble; return the trouble."""
    shown = PageState("prod")
    feed = Feed(shown, None, None, verbose=True)
    feed._command = [sys.executable, "-c", code]

    async def run() -> str:
        task = asyncio.create_task(feed.run())
        part = shown.state(time.time(), 0)["parts"][STATUS]
        deadline = time.monotonic() + HANG_S
        while part["age_s"] is None or until not in part["trouble"]:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
            if looks:
                feed.look()
            part = shown.state(time.time(), 0)["parts"][STATUS]
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return str(part["trouble"])

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("code", "says", "looks"),
    [(ENDS, "has ended", False), (HANGS, "does not answer", False), (ECHOES, "", True)],
    ids=["it ends", "it hangs", "it hears that somebody looks"],
)
def test_process_that_asks(monkeypatch, code, says, looks):
    monkeypatch.setattr(command, "_SILENT_S", 1.0 if code == HANGS else command._SILENT_S)
    assert bool(fed(code, says, looks=looks)) == bool(says)
