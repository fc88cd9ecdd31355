"""Two replicas behind Ray Serve, as a user of the example has them: over HTTP, with `openai`."""

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import pytest

from kvray.actors.tier.local_ray import LocalRay
from tests.kit.ray.served import DEADLINE_S, Served, ask, end, open_served
from tests.kit.same_answers import cases, told_by
from tests.waiting import wait_for

openai = pytest.importorskip("openai")
pytest.importorskip("ray.serve")

pytestmark = [pytest.mark.ray]

BLOCK = 32
LONG_TOKENS = 3000


@pytest.fixture(scope="module")
def served(local: LocalRay) -> Iterator[Served]:
    # One at a time: what a client has left must have ended before the next begins.
    with open_served(local, "serve", requests_max=1, queued_max=2, prefetch_timeout_s=1.0) as made:
        yield made


def hold_all(served: Served, stack: contextlib.ExitStack) -> list[Any]:
    """Begin a long answer at each of the two replicas, which take one request at a time."""
    streams = [
        stack.enter_context(served.ask(max_tokens=LONG_TOKENS, stream=True)) for _ in range(2)
    ]
    for stream in streams:
        next(iter(stream))
    return streams


def _hit_tokens(served: Served, replica: str) -> int:
    """Return how many tokens the tier says that a replica has found in it."""
    replicas = [one for shard in served.shards() for one in shard["replicas"]]
    (found,) = [one["counters"] for one in replicas if one["replica"] == replica]
    return int(found.get("hit_tokens", 0))  # a replica counts when it has been asked


def test_the_second_replica_gives_the_same_answer_with_a_hit(served):
    stored = served.stored()
    one, first = served.ask_by_name()
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    num_blocks = first.usage.prompt_tokens // BLOCK
    wait_for(lambda: served.stored() >= stored + num_blocks, "the save")
    deadline = time.monotonic() + DEADLINE_S
    while (found := served.ask_by_name())[0] == one:  # until Serve chooses the other one
        assert time.monotonic() < deadline
    other, second = found
    assert second.choices[0].message.content == first.choices[0].message.content
    assert second.choices[0].finish_reason == "length"
    shareable = (first.usage.prompt_tokens - 1) // BLOCK * BLOCK
    details = second.usage.prompt_tokens_details
    assert details.cached_tokens == shareable
    assert details.cached_tokens_by_source == {"pool": 0, "tier": shareable}
    wait_for(lambda: _hit_tokens(served, other) == shareable, "the count")
    assert _hit_tokens(served, one) == 0
    assert served.connected() == sorted([one, other])
    status = partial(served.shell.run, "status", **served.environ)
    assert other in status("--wide").stdout

    def has_times() -> bool:
        with served.ask(max_tokens=1, stream=True) as stream:  # a prompt rendered late tells none
            assert [*stream]
        return "Time to the first token" in status().stdout

    wait_for(has_times, "the router's times")
    assert [model.id for model in served.client.models.list()] == ["tiny"]
    raw = ask(served.client.with_raw_response, max_tokens=1)
    assert raw.headers["x-kvray-route"] in ("prefix", "queue", "fallback")


def test_a_salt_shares_blocks_with_its_like_only(served):
    whole = served.ask().choices[0].message.content

    def cached(salt: str) -> int:
        answer = served.ask(extra_body={"cache_salt": salt})
        assert answer.choices[0].message.content == whole
        return int(answer.usage.prompt_tokens_details.cached_tokens)

    stored = served.stored()
    assert cached("acme/1") == 0
    wait_for(lambda: served.stored() > stored, "the save")
    assert cached("acme/1") > 0
    assert cached("other/1") == 0
    with pytest.raises(openai.BadRequestError):
        served.ask(extra_body={"cache_salt": ""})


def test_a_full_replica_is_passed_over(served):
    with contextlib.ExitStack() as stack:
        streams = hold_all(served, stack)
        names = {stream.response.headers["x-kvray-replica"] for stream in streams}
    assert sorted(names) == served.connected()


@pytest.mark.parametrize("case", cases("tiny"), ids=str)
def test_an_answer_is_the_engines_own(served, case):
    assert told_by(str(served.client.base_url), case) == told_by(served.direct(), case)


def test_a_client_that_goes_away_ends_its_request(served):
    stored = served.stored()
    for _ in range(2):  # the second time begins when the others have ended
        with contextlib.ExitStack() as stack:
            hold_all(served, stack)
    assert served.stored() - stored < 4 * LONG_TOKENS // BLOCK // 2


def ask_too_many(served: Served) -> BaseException | None:
    """Ask more than fits beside long answers; return why the first that ended was refused."""
    with ThreadPoolExecutor(3) as threads, contextlib.ExitStack() as stack:
        streams = hold_all(served, stack)
        asked = [threads.submit(served.ask, max_tokens=1) for _ in range(3)]
        (first,), queued = wait(asked, DEADLINE_S, FIRST_COMPLETED)
        streams[0].close()
        for one in queued:
            assert one.result(DEADLINE_S).choices[0].finish_reason == "length"
        return first.exception()


def test_a_request_too_many_is_told_to_come_later(served):
    error = None
    for _ in range(5):  # a starved machine may ask when the long answers are over
        error = error or ask_too_many(served)
    assert isinstance(error, openai.RateLimitError)
    assert error.code == "overloaded"


@pytest.mark.long
def test_without_the_tier_the_same_answers_come(served):
    before = served.ask().choices[0].message.content
    served.shell.say("down", **served.environ)
    began = time.monotonic()
    for _ in range(4):
        assert served.ask().choices[0].message.content == before
    assert time.monotonic() - began < 30
    served.shell.say("up", **served.environ)


def test_the_end_of_serve_leaves_no_engine(served):
    assert served.engines()
    end(served.serve)
    wait_for(lambda: not served.engines(), "the engines' end")
