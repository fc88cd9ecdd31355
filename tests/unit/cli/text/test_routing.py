"""What people read about the way of a request to its replica."""

import io
from typing import Any

import pytest
from rich.console import Console

from kvray.cli.text.routing import routing_report

COSTS = {
    "pool_tokens": 0,
    "host_tokens": 512,
    "disk_tokens": 0,
    "remote_tokens": 0,
    "computed_tokens": 1512,
    "queue_s": 0.1,
    "bring_s": 0.002,
    "compute_s": 0.5,
    "first_token_s": 0.602,
    "later_s": 0.0,
    "crowd_s": 0.0,
}


def routing(**changes: Any) -> dict[str, Any]:
    candidates = [{**COSTS, "replica": "one"}, {**COSTS, "replica": "two", "queue_s": 2.0}]
    return {
        "request": "r",
        "at": 1.0,
        "reason": "prefix",
        "replica": "one",
        "outcome": "answered",
        "first_token_s": 0.65,
        "predicted_s": 0.602,
        "num_candidates": 5,
        "candidates": candidates,
        **changes,
    }


def printed(told: dict[str, Any] | None) -> str:
    console = Console(file=io.StringIO(), width=200)
    for line in routing_report(told):
        console.print(line)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_each_candidate_has_its_costs_by_part_and_a_sentence_says_how_it_turned_out() -> None:
    text = printed(routing())
    (one,) = [line for line in text.splitlines() if line.strip().startswith("one")]
    assert " ".join(one.split()) == "one 0 512 0 0 1,512 100.0 2.0 500.0 602.0 0.0 0.0"
    assert "and 3 more" in text
    assert "sent it to one (prefix): there its prompt was least work." in text
    assert "Predicted first token: 602.0 ms. Its first token came after 650.0 ms." in text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"reason": "queue"}, "that replica was busier"),
        ({"reason": "fallback"}, "the same work everywhere"),
        ({"outcome": "not_answered", "first_token_s": None}, "No first token came"),
        ({"outcome": "under_way", "first_token_s": None}, "nothing has been told"),
        (
            {"reason": "fallback", "candidates": [], "num_candidates": 0, "predicted_s": None},
            "one had the shorter queue. Its first token",
        ),
    ],
)
def test_each_reason_and_outcome_has_its_words(changes: dict[str, Any], said: str) -> None:
    assert said in printed(routing(**changes))


def test_of_a_request_that_no_router_noted_nothing_is_said() -> None:
    assert printed(None) == ""
