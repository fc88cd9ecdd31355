"""Rates of a tier from its statuses, and the frame that `kvray top` makes of them."""

from typing import Any

from rich.console import Console

from kvray.cli.text.hits import source_shares
from kvray.cli.text.rates import History
from kvray.cli.text.top_view import view


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


def shown(history: History, trouble: str = "") -> str:
    console = Console(width=160)
    with console.capture() as captured:
        console.print(view(history, trouble))
    return captured.get()


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


def test_a_frame_shows_nodes_replicas_and_why_tokens_were_missed() -> None:
    history = History(5.0)
    history.add(1.0, status())
    history.add(2.0, status(prompt=1000, hit=900, missed=50, evicted=7, staged=2**20))
    frame = shown(history)
    assert "1,000 prompt tokens/s: own pool 0.0%, host 90.0%" in frame
    assert "1MiB/4MiB" in frame
    assert "unreachable" in frame
    assert "not stored 50, too slow 25" in frame


def test_a_tier_that_does_not_answer_is_said() -> None:
    history = History(5.0)
    assert "Asking the tier" in shown(history)
    assert "No answer: no tier runs. Trying again." in shown(history, "no tier runs.")


def test_view_says_that_the_lookup_does_not_answer_beside_the_rates() -> None:
    history = History(5.0)
    history.add(1.0, {**status(), "lookup": {"state": "unreachable", "message": "No answer."}})
    frame = shown(history)
    assert "The lookup does not answer: No answer." in frame
    assert "serving" in frame
