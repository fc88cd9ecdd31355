"""What a router hears of the tier, and how long it waits for it."""

import asyncio
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvray.actors.routers.surveys import Surveys
from kvray.errors import ShardUnavailable
from kvray.routing import Link, Outcomes, Stretch, Survey

TOKENS = np.arange(100, dtype="<i4")
ANSWER = {
    "shard": "s1",
    "tokens_per_block": 32,
    "block_bytes": 4096,
    "words": b"abcdefgh" + b"ijklmnop" + b"qrstuvwx",
    "runs": [[2, ["s1", "s2"]], [3, ["s1"]]],
    "on_disk": [False, True],
    "links": {"s2": [0.001, None], "s3": [0.002, 5e9]},
}


class Tier:
    """The `Ask` of a tier of two shards."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, tuple[Any, ...]]] = []
        self.delay_s = 0.0
        self.is_gone = False

    async def __call__(self, actor: str, method: str, *args: Any, timeout_s: float) -> Any:
        self.calls.append((actor, method, args))
        if self.is_gone or self.delay_s > timeout_s:
            await asyncio.sleep(min(self.delay_s, timeout_s))
            raise ShardUnavailable("No answer.")
        if method == "replica":
            return {0: "s1"} if args[0] == "known" else {}
        return ANSWER


@pytest.fixture
def tier() -> Tier:
    return Tier()


def surveys_of(tier: Tier) -> Surveys:
    return Surveys(tier, "test", timeout_s=0.05, outcomes=Outcomes())


async def heard(surveys: Surveys, **marks: Any) -> Survey | None:
    """Return the survey once the homes of the replicas are known."""
    await surveys.survey(TOKENS, ["unknown", "known"])
    await asyncio.sleep(0.01)
    return await surveys.survey(TOKENS, ["unknown", "known"], **marks)


def test_a_survey_has_stretches_words_and_links(tier: Tier) -> None:
    surveys = surveys_of(tier)
    found = asyncio.run(heard(surveys, salt="t", lora="/l"))
    assert found == Survey(
        tokens_per_block=32,
        token_bytes=128.0,
        words=(b"abcdefgh", b"ijklmnop", b"qrstuvwx"),
        stretches=(
            Stretch(num_tokens=64, holders={"s1": "host", "s2": "host"}),
            Stretch(num_tokens=32, holders={"s1": "disk"}),
        ),
        links={
            "s2": Link(latency_s=0.001, bytes_per_s=2e9),
            "s3": Link(latency_s=0.002, bytes_per_s=5e9),
        },
    )
    assert tier.calls[-1] == ("s1", "survey", ("known", TOKENS.tobytes(), "t", "/l"))
    assert (surveys.home("known"), surveys.home("unknown")) == ("s1", "")


def test_no_request_waits_for_the_place_of_a_replica(tier: Tier) -> None:
    tier.delay_s = 10.0

    async def ask() -> float:
        began = time.monotonic()
        assert await surveys_of(tier).survey(TOKENS, ["known"]) is None
        return time.monotonic() - began

    assert asyncio.run(ask()) < 1.0


def test_a_tier_that_does_not_answer_costs_the_deadline_once(
    tier: Tier, caplog: pytest.LogCaptureFixture
) -> None:
    async def ask() -> tuple[float, float]:
        surveys = surveys_of(tier)
        assert await heard(surveys)
        tier.delay_s = 10.0
        began = time.monotonic()
        assert await surveys.survey(TOKENS, ["known"]) is None
        first_s = time.monotonic() - began
        began = time.monotonic()
        for _ in range(50):
            assert await surveys.survey(TOKENS, ["known"]) is None
        return first_s, time.monotonic() - began

    first_s, others_s = asyncio.run(ask())
    assert 0.04 < first_s < 1.0
    assert others_s < 0.1
    assert len([one for one in caplog.records if "where prompts are" in one.message]) == 1


def test_replicas_that_the_tier_does_not_know_are_named_once(
    tier: Tier, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvray.actors.routers.surveys._UNKNOWN_S", 0.02)

    async def ask() -> None:
        surveys = surveys_of(tier)
        for _ in range(10):
            assert await surveys.survey(TOKENS, ["unknown"]) is None
            await asyncio.sleep(0.01)

    asyncio.run(ask())
    (said,) = [one.message for one in caplog.records]
    assert "knows none of the replicas unknown" in said


def test_a_tier_that_is_back_is_asked_again(tier: Tier) -> None:
    async def ask() -> Survey | None:
        surveys = surveys_of(tier)
        assert await heard(surveys)
        tier.is_gone = True
        assert await surveys.survey(TOKENS, ["known"]) is None
        tier.is_gone = False
        deadline = time.monotonic() + 5
        while (found := await surveys.survey(TOKENS, ["known"])) is None:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        return found

    assert asyncio.run(ask())


def test_what_a_node_has_in_memory_needs_no_prefetch(tier: Tier) -> None:
    found = asyncio.run(heard(surveys_of(tier)))
    assert found is not None
    assert [found.is_in_memory_of(node) for node in ("s1", "s2")] == [False, False]
    first = replace(found, stretches=found.stretches[:1])
    assert [first.is_in_memory_of(node) for node in ("s1", "s2", "s3")] == [True, True, False]
    assert replace(found, stretches=()).is_in_memory_of("s3"), "nobody has anything"
