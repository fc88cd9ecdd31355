"""Rates of a tier from its statuses, and how they are shown."""

from typing import Any

from rich.console import Console

from kvray.cli.text.hits import History, headline, replicas_table, source_shares


def status(
    *, prompt: int = 0, hit: int = 0, missed: int = 0, evicted: int = 0, staged: int = 0
) -> dict[str, Any]:
    counters = {
        "prompt_tokens": prompt,
        "hit_tokens": hit,
        "hit_tokens_from_host": hit,
        "miss_tokens_not_stored": missed,
        "miss_tokens_too_slow": missed // 2,
    }
    return {
        "cluster_name": "prod",
        "shards": [
            {
                "shard": "kvray-shard-a",
                "state": "serving",
                "arena": {
                    "resident_bytes": 2**20,
                    "capacity_bytes": 2**22,
                    "evicted": evicted,
                },
                "staging": {"staged_bytes": staged},
                "replicas": [
                    {"replica": "one", "rank": 0, "connected": True, "counters": counters}
                ],
            },
            {"shard": "kvray-shard-b", "state": "unreachable", "message": "gone"},
        ],
    }


def test_rates_are_those_of_the_time_that_is_kept() -> None:
    history = History(5.0)
    for second in range(8):
        now = 100.0 + second
        history.add(
            now, status(prompt=1000 * second, hit=250 * second, missed=100 * second, staged=second)
        )
    assert history.seconds == 5.0
    (one,) = history.replicas()
    assert one.prompt == 1000.0
    assert source_shares(one.counters)["host"] == "25%"
    assert one.missed == {"not_stored": 100.0, "too_slow": 50.0}
    assert [node.staged_bytes for node in history.nodes()] == [1.0, 0.0]


def test_an_engine_that_was_restarted_has_no_negative_rate() -> None:
    history = History(5.0)
    history.add(1.0, status(prompt=1000, evicted=50))
    history.add(2.0, status(prompt=10))
    assert history.replicas()[0].prompt == 0.0
    assert history.nodes()[0].evicted == 0.0


def test_rates_of_replicas_are_shown_with_why_tokens_were_missed() -> None:
    history = History(5.0)
    history.add(1.0, status())
    history.add(2.0, status(prompt=1000, hit=900, missed=50))
    replicas = history.replicas()
    said = headline("prod", history, replicas)
    assert "1,000 prompt tokens/s: own pool 0.0%, host 90.0%" in said
    console = Console(width=160)
    with console.capture() as captured:
        console.print(replicas_table(replicas))
    assert "not stored 50, too slow 25" in captured.get()
