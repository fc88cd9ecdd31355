"""What people read of requests and prompts."""

from collections.abc import Iterable
from typing import Any

import pytest
from rich.console import Console, RenderableType

from kvray.cli.text.explanation import (
    CAUSES,
    REASONS,
    clock,
    prompt_report,
    request_report,
    requests_sentence,
    requests_table,
)
from kvray.store.block_history import CAUSES as CAUSE_NAMES
from kvray.trace.reasons import MISS_REASONS

NOW = 1_700_000_000.0


def shown(lines: Iterable[RenderableType]) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        for line in lines:
            console.print(line, soft_wrap=isinstance(line, str))
    return captured.get()


def request(**changes: Any) -> dict[str, Any]:
    return {
        "request_id": 7,
        "replica": "one",
        "rank": 0,
        "at": NOW - 3,
        "namespace": "3f0a91c2",
        "num_tokens": 320,
        "own_tokens": 0,
        "hit_tokens": 160,
        "missed_tokens": 144,
        "reason": "evicted",
        "stage_s": 0.012,
        "lease_s": 0.0004,
        "is_sampled": False,
        "log_since": NOW - 7200,
        "leaving": [],
        "ranges": [
            {
                "start": 0,
                "stop": 160,
                "what": "hit",
                "way": "nixl",
                "source": "kvray-shard-0123456789ab",
            },
            {
                "start": 160,
                "stop": 304,
                "what": "miss",
                "reason": "evicted",
                "left_at": [NOW - 60, NOW - 50],
                "left_node": "kvray-shard-a",
                "left_tier": "host",
                "left_by": "writer",
                "places": [],
            },
            {"start": 304, "stop": 320, "what": "computed"},
        ],
        **changes,
    }


def test_a_request_is_told_range_by_range_and_in_a_sentence() -> None:
    text = shown(request_report(request(), now=NOW))
    assert "Request 7 of replica one" in text
    assert "brought over NIXL from node 0123456789ab" in text
    assert "evicted: left the memory of node a" in text
    assert "by a writer of that node, because the memory was full" in text
    assert "160 of 320 tokens were hits" in text
    assert "144 were missed because they were stored, and had left the tier" in text
    assert "Raise arena.capacity" in text


def test_what_was_never_stored_is_so_as_far_as_is_remembered() -> None:
    missed = {"start": 0, "stop": 304, "what": "miss", "reason": "never_stored", "places": []}
    one = request(reason="never_stored", hit_tokens=0, missed_tokens=304, ranges=[missed])
    text = shown(request_report(one, now=NOW))
    assert "never stored, at least not since" in text
    assert "(2 h ago)" in text
    assert "0 of 320 tokens were hits" in text


def test_a_request_that_had_nothing_to_miss_says_why() -> None:
    one = request(reason="bypassed", num_tokens=0, hit_tokens=0, missed_tokens=0, ranges=[])
    assert "the request has no keys" in shown(request_report(one, now=NOW))


def test_several_requests_are_one_line_each_and_a_sentence() -> None:
    some = [request(), request(request_id=8, reason="none", hit_tokens=304, missed_tokens=0)]
    table = shown([requests_table(some, now=NOW)])
    assert [line.split()[0] for line in table.splitlines() if " one " in line] == ["7", "8"]
    assert "464 of 640 tokens of these 2 requests were hits" in shown([requests_sentence(some)])


def test_a_prompt_is_told_by_where_its_blocks_are() -> None:
    prompt = {
        "replica": "one",
        "namespace": "3f0a91c2",
        "num_tokens": 330,
        "stored_tokens": 160,
        "reason": "never_stored",
        "log_since": NOW - 100,
        "leaving": ["kvray-shard-a"],
        "ranges": [
            {
                "start": 0,
                "stop": 160,
                "what": "stored",
                "places": [{"node": "kvray-shard-a", "tier": "nvme"}],
            },
            {"start": 160, "stop": 320, "what": "never_stored", "places": []},
            {"start": 320, "stop": 330, "what": "computed"},
        ],
    }
    text = shown(prompt_report(prompt, now=NOW))
    assert "on the disk of node a" in text
    assert "Node a is to go; what only it has goes to others." in text
    assert "160 of 330 tokens are stored now" in text
    whole = {**prompt, "reason": "none", "stored_tokens": 320}
    assert "only whole blocks are stored" in shown(prompt_report(whole, now=NOW))


def test_every_reason_and_cause_has_its_words() -> None:
    assert REASONS.keys() == MISS_REASONS
    assert set(CAUSE_NAMES) == CAUSES.keys()


@pytest.mark.parametrize(
    ("seconds", "ago"), [(0.2, "0 s"), (90, "2 min"), (7200, "2 h"), (200_000, "2 d")]
)
def test_moments_are_told_with_how_long_ago_they_were(seconds: float, ago: str) -> None:
    assert clock(NOW - seconds, NOW).endswith(f"({ago} ago)")
    assert clock(0.0, NOW) == "never"
