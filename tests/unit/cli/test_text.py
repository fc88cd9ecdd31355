"""What people read of requests, prompts, rates, links between nodes, namespaces and memory."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from kvray.actors.tier.sizing import combined
from kvray.cli import explain
from kvray.cli.hits import History, replicas_table, source_shares
from kvray.cli.ls import namespaces, namespaces_table, prefixes
from kvray.cli.size import _report, make_figure, sizing_line
from kvray.cli.transports import NodeLink, choose, node_links, node_links_table, slow_nodes
from kvray.store.block_history import CAUSES as CAUSE_NAMES
from kvray.trace.reasons import MISS_REASONS
from tests.unit.actors.tier.test_sizing import node
from tests.unit.cli.answers import NOW, mover, replica, request, silent, span
from tests.unit.cli.conftest import shown

LEFT = {"left_node": "kvray-shard-a", "left_tier": "host", "left_by": "writer"}
EVICTED = {
    "reason": "evicted",
    "ranges": [
        span(0, 160, "hit", way="nixl", source="kvray-shard-0123456789ab"),
        span(160, 304, "miss", reason="evicted", places=[], left_at=[NOW - 60, NOW - 50], **LEFT),
        span(304, 320, "computed"),
    ],
}


def test_a_request_is_told_range_by_range_and_in_a_sentence():
    text = shown(*explain.request_report(request(**EVICTED), now=NOW))
    for words in (
        "Request 7 of replica one",
        "brought over NIXL from node 0123456789ab",
        "evicted: left the memory of node a",
        "by a writer of that node, because the memory was full",
        "160 of 320 tokens were hits",
        "144 were missed because they were stored, and had left the tier",
        "Raise arena.capacity",
        "nvme.admission: all",
    ):
        assert words in text


def test_a_request_without_a_hit_says_why():
    missed = span(0, 304, "miss", reason="never_stored", places=[])
    one = request(reason="never_stored", hit_tokens=0, missed_tokens=304, ranges=[missed])
    text = shown(*explain.request_report(one, now=NOW))
    for words in ("never stored, at least not since", "(2 h ago)", "0 of 320 tokens were hits"):
        assert words in text
    missed["places"] = [{"node": "kvray-shard-b", "tier": "host"}]
    one = request(reason="too_slow", hit_tokens=0, missed_tokens=304, ranges=[missed])
    text = shown(*explain.request_report(one, now=NOW))
    for words in ("or unknown to this node then, in the memory of node b", "Mend links first"):
        assert words in text
    one = request(reason="bypassed", num_tokens=0, hit_tokens=0, missed_tokens=0, ranges=[])
    assert "the request has no keys" in shown(*explain.request_report(one, now=NOW))


def test_several_requests_are_one_line_each_and_a_sentence():
    whole = request(request_id=8, reason="none", hit_tokens=304, missed_tokens=0)
    some = [request(**EVICTED), whole]
    table = shown(explain.requests_table(some, now=NOW))
    assert [line.split()[0] for line in table.splitlines() if " one " in line] == ["7", "8"]
    sentence = shown(explain.requests_sentence(some))
    assert "464 of 640 tokens of these 2 requests were hits" in sentence
    bypassed = request(reason="bypassed", num_tokens=0, hit_tokens=0, missed_tokens=0, ranges=[])
    sentence = shown(explain.requests_sentence([bypassed, bypassed]))
    assert "nothing was looked up: the request has no keys" in sentence


def test_a_prompt_is_told_by_where_its_blocks_are():
    ranges = [
        span(0, 160, "stored", places=[{"node": "kvray-shard-a", "tier": "nvme"}]),
        span(160, 320, "never_stored", places=[]),
        span(320, 330, "computed"),
    ]
    prompt = request(num_tokens=330, stored_tokens=160, ranges=ranges, leaving=["kvray-shard-a"])
    text = shown(*explain.prompt_report(prompt, now=NOW))
    assert "on the disk of node a" in text
    assert "Node a is being drained; blocks that only it holds go to others." in text
    assert "160 of 330 tokens are stored now" in text
    whole = {**prompt, "reason": "none", "stored_tokens": 320}
    assert "only whole blocks are stored" in shown(*explain.prompt_report(whole, now=NOW))


def test_every_reason_cause_and_moment_has_its_words():
    assert explain.REASONS.keys() == MISS_REASONS
    assert set(CAUSE_NAMES) == explain.CAUSES.keys()
    assert "security.tenant_quota" in explain.reason("evicted", "quota").advice
    assert "`kvray status --wide`" in explain.reason("partial").advice
    assert "compare salts" in explain.reason("never_stored").advice
    assert "cannot be read" in explain.reason("fingerprinting").advice, "then nobody need wait"
    assert explain.clock(NOW - 90, NOW).endswith("(2 min ago)")
    assert explain.clock(0.0, NOW) == "never"


def status_after(seconds: int) -> dict[str, Any]:
    """Return what a status says of a node at work, and of one that does not answer."""
    counters = {"prompt_tokens": 1000, "hit_tokens": 250, "hit_tokens_from_host": 250}
    counters |= {"miss_tokens_not_stored": 100, "miss_tokens_too_slow": 50}
    here = {
        "shard": "kvray-shard-a",
        "state": "serving",
        "arena": {"taken_bytes": 2**20, "capacity_bytes": 2**22, "evicted": 5 * seconds},
        "staging": {"transports": {"nixl": {"bytes": seconds}}},
        "replicas": [replica("one", **{key: one * seconds for key, one in counters.items()})],
    }
    return {"shards": [here, silent("b")]}


def test_rates_are_those_of_the_time_that_is_kept_and_none_is_negative_after_a_restart():
    history = History(5.0)
    for at in range(8):
        history.add(100.0 + at, status_after(at))
    assert history.seconds == 5.0
    (one,) = history.replicas()
    assert one.prompt == 1000.0
    assert source_shares(one.counters)["host"] == "25%"
    assert one.missed == {"not_stored": 100.0, "too_slow": 50.0}
    nodes = [(node.staged_bytes, node.evicted) for node in history.nodes()]
    assert nodes == [(1.0, 5.0), (0.0, 0.0)]
    assert "not stored 100, too slow 50" in shown(replicas_table([one]))
    history.add(108.0, status_after(0))
    assert (history.replicas()[0].prompt, history.nodes()[0].evicted) == (0.0, 0.0)


def test_rates_are_of_one_engine_though_others_have_its_name_or_it_was_started_again():
    history, names = History(5.0), ("prompt_tokens", "hit_tokens_from_host", "uptime_s")
    for at, engines in enumerate([[(1000, 0, 9), (900, 0, 60)], [(1100, 0, 10), (1100, 600, 2)]]):
        one, other = (replica(counters=dict(zip(names, counts, strict=True))) for counts in engines)
        shards = [{"shard": "a", "replicas": [one]}, {"shard": "b", "replicas": [other]}]
        history.add(100.0 + at, {"shards": shards})
    one, other = history.replicas()
    assert (one.prompt, other.prompt) == (100.0, 1100.0)
    assert source_shares(other.counters)["host"] == "55%"


NO_NIXL = {"available": False, "reason": "NIXL is not installed"}
HAS = {"available": True}
RDMA = {"available": True, "rdma": True}
BOTH = "nixl: both have it; "


@pytest.mark.parametrize(
    ("sender", "receiver", "chosen"),
    [
        ({"nixl": RDMA, "object_ref": HAS}, {"nixl": RDMA, "object_ref": HAS}, BOTH + "RDMA"),
        ({"nixl": RDMA}, {"nixl": HAS}, BOTH + "TCP: no RDMA device"),
        (
            {"nixl": NO_NIXL, "object_ref": HAS},
            {"nixl": HAS, "object_ref": HAS},
            "object_ref: a has no nixl: NIXL is not installed",
        ),
        ({"nixl": HAS}, {"object_ref": HAS}, "None: a has no object_ref: not configured"),
    ],
    ids=["the first of both", "RDMA at one end only", "who lacks the better one", "none in common"],
)
def test_the_transport_between_two_movers_has_its_reason(sender, receiver, chosen):
    transport, why = choose("a", mover("a", **sender), "b", mover("b", **receiver))
    assert f"{transport}: {why}" == chosen


FAILING = {"source": "kvray-mover-a", "transport": "nixl", "left_out": True, "error": "It broke."}


@pytest.mark.parametrize(
    ("others", "link", "chosen", "is_why"),
    [
        ({"object_ref": HAS}, FAILING, "object_ref", True),
        ({"object_ref": HAS}, {**FAILING, "left_out": False}, "nixl", False),
        ({"object_ref": HAS}, {**FAILING, "source": "kvray-mover-c"}, "nixl", False),
        ({}, FAILING, "nixl", True),
    ],
    ids=["it is passed over", "it is no more", "from another", "nothing else is there"],
)
def test_a_transport_that_keeps_failing_between_them(others, link, chosen, is_why):
    sender, receiver = (mover(name, nixl=HAS, **others) for name in "ab")
    receiver["failing_links"] = [link]
    transport, why = choose("a", sender, "b", receiver)
    assert (transport, why == "nixl keeps failing from a: It broke.") == (chosen, is_why)


@pytest.mark.parametrize("end", ["a", "b"])
def test_a_mover_that_does_not_serve_moves_nothing(end):
    ends = {name: mover(name, nixl=HAS) for name in "ab"}
    ends[end] = {"mover": end, "state": "unreachable", "message": "It did not answer."}
    why = f"the mover of {end} is unreachable: It did not answer."
    assert choose("a", ends["a"], "b", ends["b"]) == (None, why)


def test_each_way_has_what_its_target_measured():
    peer = {"peer": "kvray-mover-a", "bytes_per_s": 5.0, "breaker": "open", "error": "No answer."}
    lookup = {"peer": "kvray-lookup", "bytes_per_s": None, "breaker": "closed", "error": ""}
    asked = {"peer": "kvray-shard-a", "bytes_per_s": None, "breaker": "closed", "error": ""}
    small = {"peer": "kvray-mover-b", "bytes_per_s": None, "latency_s": 0.35}
    found = {
        "shards": [
            {"shard": "kvray-shard-a", "staging": {"peers": [small]}},
            {"shard": "kvray-shard-b", "staging": {"peers": [lookup, peer, asked]}},
        ],
        "movers": [mover("a", nixl=HAS), mover("b", nixl=HAS)],
    }
    made = {(link.source, link.target): link for link in node_links(found)}
    assert made.keys() == {("a", "b"), ("b", "a")}
    assert (made["a", "b"].bytes_per_s, made["a", "b"].breaker) == (5.0, "open")
    assert (made["b", "a"].bytes_per_s, made["b", "a"].breaker) == (None, "closed")
    table = node_links_table(list(made.values()))
    assert sorted(table.columns[3].cells) == ["0.0 MiB/s", "350 ms"]


@pytest.mark.parametrize(
    ("rates", "slow"),
    [
        ({"ca": 4e6, "cb": 4e6, "ac": 2e9, "bc": 2e9}, ["c gives its blocks"]),
        ({"ca": 2e9, "cb": 2e9, "ac": 4e6, "bc": 3e6}, ["c gets blocks"]),
        ({"ca": 4e6, "cb": 2e9, "ac": 2e9, "bc": 2e9}, []),
        ({"ba": 4e8, "ca": None, "cb": None}, []),
        ({"ab": 4e6, "ba": None}, []),
    ],
    ids=["one gives slowly", "one gets slowly", "one link is slow", "some are unknown", "only one"],
)
def test_a_slow_node_is_named(rates, slow):
    rates = {"ab": 2e9, "ba": 1e9} | rates
    links = [NodeLink(*ends, "nixl", "", bytes_per_s=rate) for ends, rate in rates.items()]
    said = [f"{node} {says}" for node, says in slow_nodes(links)]
    assert [one.split(" at ")[0] for one in said] == slow
    assert all("3.8 MiB/s at most, others at 1,907 MiB/s" in one for one in said)


def test_blocks_and_hits_of_all_nodes_are_summed_by_namespace():
    fields = {"3f0a91c2": {"model": "key:m", "kv_dtype": "bf16"}}
    shards: list[dict[str, Any]] = [{"shard": "c", "state": "preparing"}]
    for name, rank, hit in (("a", "one", 10), ("b", "two", 50)):
        replicas = [replica(rank, prompt_tokens=100, hit_tokens=hit)]
        shards.append({"shard": name, "namespaces": fields, "replicas": replicas})
    other = {"nvme_blocks": 9, "nvme_bytes": 90}
    contents = {
        "a": {"namespaces": {"3f0a91c2": {"host_blocks": 2, "host_bytes": 20}}},
        "b": {"namespaces": {"3f0a91c2": {"host_blocks": 1, "host_bytes": 10}, "00ff00ff": other}},
    }
    other, mine = namespaces(shards, contents)
    assert (other["namespace"], other["nvme_bytes"], other["replicas"]) == ("00ff00ff", 90, [])
    assert (mine["host_blocks"], mine["host_bytes"], mine["hit_tokens"]) == (3, 30, 60)
    assert mine["replicas"] == ["one", "two"]
    assert namespaces_table([other, mine]).row_count == 2


def test_a_prefix_that_several_nodes_have_is_one():
    def one(key: str, uses: int, age: float | None) -> dict[str, Any]:
        return {"key": key, "num_blocks": 4, "uses": uses, "used_s_ago": age}

    contents = {
        "kvray-shard-a": {"prefixes": [one("aa", 3, 9.0), one("bb", 4, 1.0)]},
        "kvray-shard-b": {"prefixes": [one("aa", 2, 5.0), one("cc", 0, None)]},
    }
    first, second, third = prefixes(contents)
    assert first == {**one("aa", 5, 5.0), "nodes": ["a", "b"]}
    assert (second["key"], third["used_s_ago"]) == ("bb", None)


def said(*nodes: dict[str, Any], more: Sequence[int] = ()) -> str:
    """Return what `kvray size` says of nodes, for sizes to add."""
    return shown(*_report(combined(nodes), list(more)))


def test_it_says_what_more_memory_would_bring_and_what_the_disk_gives():
    text = said(node("a", disk=[0.2, 0.1, 0.04, 0.0], measured=0.31))
    now = "31 % hit; predicted for today's 40B of host memory is 30 %: 10 % from the engines' own"
    more = "With +40B of host memory 40 % of prompt tokens would hit instead of 30 %"
    for words in (now, more, "m (3f0a91c2)", "give or take 6 points"):
        assert words in text
    assert "The disk gives 4 points." in text
    assert "Below 10B it is not worth running." in text
    assert "too fast to be looked at: 1." in text


def test_a_size_beyond_the_curve_or_of_all_that_came_gets_no_figure():
    text = said(node("a"), more=[1000])
    assert "The curve ends at 80B" in text
    assert "fit into" not in text
    one = node("a")
    one["traffic"]["distinct_bytes"] = 30
    assert "fit into 30B" in said(one)


@pytest.mark.parametrize("nodes", [[], [node("a", measured=0.34)], [node("a", measured=0.25)]])
def test_with_too_little_traffic_it_says_so_instead_of_a_figure(nodes):
    text, found = said(*nodes), combined(nodes)
    assert "Not enough traffic yet" in text
    assert not set("%+") & set(text), "no figure, no advice"
    assert sizing_line(found).startswith("Not enough traffic yet")
    assert make_figure(found).axes == []


def test_status_has_a_sentence_the_picture_each_namespace_and_json_everything():
    found = combined([node("a")])
    line = sizing_line(found)
    assert line.startswith("With +40B of host memory 40 % of prompt tokens would hit instead of 30")
    assert "30 % were counted in these 1 min. `kvray size`" in line
    assert json.loads(json.dumps(found)) == found
    (axes,) = make_figure(found).axes
    labels = [line.get_label() for line in axes.lines[:2]]
    assert labels == ["and disk and other nodes", "engines' pools and host memory"]
