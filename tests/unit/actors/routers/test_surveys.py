"""What a router hears of the tier, and how long it waits for it."""

import asyncio
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvray.actors.lookup.delta import partition_of
from kvray.actors.names import lookup_name
from kvray.actors.routers.surveys import Surveys
from kvray.actors.shard.actor_requests import Prompt
from kvray.errors import ConfigError, ShardUnavailable
from kvray.identity.keys import chain_keys, request_seed
from kvray.index import Run
from kvray.routing import Link, Outcomes, Profile, Stretch, Survey
from tests.kit.ray.engine import NAMESPACE

pytestmark = pytest.mark.anyio

TOKENS = np.arange(100, dtype="<i4")
PROFILE = Profile(
    tokens_per_block=32,
    block_bytes=4096,
    parts=0b11,
    namespace=b"n" * 32,
    num_partitions=2,
    disk=Link(latency_s=0.0005, bytes_per_s=3e9),
)
RUNS = [
    Run(stop=2, holders={"s1": 0b11, "s2": 0b111, "s3": 0b01}),
    Run(stop=3, holders={"s1": 0b11}),
]


class Tier:
    """The `Ask` of a tier of two shards, one of which has a disk."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, tuple[Any, ...]]] = []
        self.delay_s = 0.0
        self.is_gone = False
        self.refusal = ""
        self.is_frozen: set[str] = set()
        self.profile = PROFILE

    async def __call__(self, actor: str, method: str, *args: Any, timeout_s: float) -> Any:
        self.calls.append((actor, method, args))
        if self.is_gone or self.delay_s > timeout_s:
            await asyncio.sleep(min(self.delay_s, timeout_s))
            raise ShardUnavailable("No answer.")
        if actor in self.is_frozen and method == "on_disk":
            await asyncio.Event().wait()
        if method == "replica":
            return {0: "s1"} if args[0] == "known" else {0: args[0]} if args[0][:2] == "at" else {}
        if method == "prompt":
            if self.refusal:
                raise ConfigError(self.refusal)
            return Prompt(keys=b"".join(KEYS), namespace=NAMESPACE)
        return {"profile": self.profile, "locate": RUNS, "on_disk": b"\0\1\1"}[method]


KEYS = chain_keys(TOKENS, tokens_per_block=32, seed=request_seed(b"n" * 32, salt="t"))


@pytest.fixture
def tier() -> Tier:
    return Tier()


@pytest.fixture
def surveys(tier: Tier) -> Surveys:
    return Surveys(tier, "test", timeout_s=0.05, outcomes=Outcomes())


async def heard(surveys: Surveys, *replicas: str, **marks: Any) -> Survey | None:
    """Return the survey once the homes of the replicas are known."""
    asked = replicas or ("unknown", "known")
    await surveys.survey(TOKENS, asked)
    await asyncio.sleep(0.05)
    return await surveys.survey(TOKENS, asked, **marks)


async def test_a_survey_says_who_holds_what_and_where(tier, surveys):
    assert await heard(surveys, salt="t") == Survey(
        tokens_per_block=32,
        token_bytes=128.0,
        words=tuple(key[:8] for key in KEYS),
        stretches=(
            Stretch(num_tokens=32, holders={"s1": "host", "s2": "host"}),
            Stretch(num_tokens=32, holders={"s1": "disk", "s2": "host"}),
            Stretch(num_tokens=32, holders={"s1": "disk"}),
        ),
    )
    partition = lookup_name(partition_of(KEYS[0], 2))
    assert tier.calls[-2:] == [
        (partition, "locate", (b"".join(KEYS),)),
        ("s1", "on_disk", (0b11, b"".join(KEYS))),
    ]
    assert (surveys.home("known"), surveys.home("unknown")) == ("s1", "")
    assert surveys.profile("known") == PROFILE


@pytest.mark.parametrize(("namespace", "lora"), [(b"", None), (b"n" * 32, "/l")])
async def test_keys_that_only_a_shard_can_make_are_asked_for(tier, surveys, namespace, lora):
    tier.profile = replace(PROFILE, namespace=namespace)
    found = await heard(surveys, salt="t", lora=lora)
    assert found.words == tuple(key[:8] for key in KEYS)
    assert ("s1", "prompt", ("known", TOKENS.tobytes(), "t", lora)) in tier.calls


@pytest.mark.parametrize("bad", [[2**40], [1, 2, 3]])
async def test_a_prompt_without_keys_is_nowhere_and_costs_others_nothing(tier, surveys, bad):
    tier.profile = replace(PROFILE, namespace=b"")
    assert await heard(surveys) is not None
    tier.refusal = "The prompt names no tenant."
    nowhere = await surveys.survey(bad, ["unknown", "known"])
    assert nowhere == Survey(tokens_per_block=32, token_bytes=128.0, words=(), stretches=())
    tier.refusal = ""
    found = await surveys.survey(TOKENS, ["unknown", "known"])
    assert found.stretches


async def test_a_prompt_without_keys_does_not_end_the_pause_of_a_silent_tier(tier, surveys):
    await heard(surveys)
    tier.is_gone = True
    assert await surveys.survey(TOKENS, ["unknown", "known"]) is None
    tier.is_gone = False
    await surveys.survey(TOKENS, ["known"])  # finds its home again, and asks nothing else
    await asyncio.sleep(0.3)
    tier.is_gone = True
    await surveys.survey([2**40], ["known"])
    assert surveys._breaker.state(time.monotonic()) != "closed"


async def test_blocks_after_one_that_nobody_has_whole_are_of_no_use(tier, surveys):
    tier.profile = replace(PROFILE, parts=0b111, disk=None)
    found = await heard(surveys)
    assert found.stretches == (Stretch(num_tokens=64, holders={"s2": "host"}),)
    assert "on_disk" not in [method for _, method, _ in tier.calls], "there is no disk"


@pytest.mark.parametrize("num_others", [1, 9])
async def test_only_holders_are_waited_for(tier, surveys, num_others):
    others = [f"at{number}" for number in range(num_others)]
    tier.is_frozen = set(others)
    found = await heard(surveys, "known", *others)
    assert all(map(surveys.profile, others))
    assert found.stretches[2].holders == {"s1": "disk"}
    asked = {actor for actor, method, _ in tier.calls if method == "on_disk"}
    assert asked == ({"s1", *others} if num_others == 1 else {"s1"}), "few disks are asked at once"


async def test_no_request_waits_for_the_place_of_a_replica(tier, surveys):
    tier.delay_s = 10.0
    began = time.monotonic()
    assert await surveys.survey(TOKENS, ["known"]) is None
    assert time.monotonic() - began < 8


async def test_a_tier_that_does_not_answer_costs_the_deadline_once_and_is_asked_again(
    tier, surveys, caplog
):
    assert await heard(surveys)
    tier.delay_s = 10.0
    began = time.monotonic()
    assert await surveys.survey(TOKENS, ["known"]) is None
    assert 0.04 < time.monotonic() - began < 8
    began = time.monotonic()
    for _ in range(50):
        assert await surveys.survey(TOKENS, ["known"]) is None
    assert time.monotonic() - began < 50 * 0.04
    assert len([one for one in caplog.records if "where prompts are" in one.message]) == 1
    tier.delay_s, deadline = 0.0, time.monotonic() + 10
    while await surveys.survey(TOKENS, ["known"]) is None:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def test_replicas_that_the_tier_does_not_know_are_named_once(surveys, caplog, monkeypatch):
    monkeypatch.setattr("kvray.actors.routers.surveys._UNKNOWN_S", 0.02)
    for _ in range(10):
        assert await surveys.survey(TOKENS, ["unknown"]) is None
        await asyncio.sleep(0.01)
    (said,) = [one.message for one in caplog.records]
    assert "knows none of the replicas unknown" in said


async def test_what_a_node_has_in_memory_needs_no_prefetch(surveys):
    found = await heard(surveys)
    assert [found.is_in_memory_of(node) for node in ("s1", "s2")] == [False, False]
    first = replace(found, stretches=found.stretches[:1])
    assert [first.is_in_memory_of(node) for node in ("s1", "s2", "s3")] == [True, True, False]
    assert replace(found, stretches=()).is_in_memory_of("s3"), "nobody has anything"
