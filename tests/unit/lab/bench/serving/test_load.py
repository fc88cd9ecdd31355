"""The load generator, with endpoints that have no model."""

import asyncio
import json
import socket
import time
from pathlib import Path

import pytest

from kvray.errors import ConfigError, KVRayError
from kvray.lab.bench.serving.load import Due, Endpoint, ask_model, parse_endpoint, play
from tests.forks import RunKvray
from tests.unit.lab.bench.serving.stub import Stub, running

REQUESTS = [Due(at_s=at / 20, tokens=[40 + at] * 64) for at in range(4)]
LOAD = ("--rate", "20", "--seconds", "1", "--rounds", "2", "--answer-tokens", "2")


def endpoint(url: str) -> Endpoint:
    return Endpoint(name="stub", url=url, model="stub")


def test_answers_have_text_times_replica_and_cached_tokens() -> None:
    with running(stub := Stub()) as url:
        answers = asyncio.run(play(endpoint(url), REQUESTS, max_tokens=2, timeout_s=10))
    assert {(one.text, one.replica, one.cached_tokens) for one in answers} == {
        ("onetwo", "engine-1", 32)
    }
    assert all(0 < one.first_token_s <= one.whole_s for one in answers)
    assert sorted(one["prompt"] for one in stub.asked) == [due.tokens for due in REQUESTS]
    assert all(one["stream_options"] == {"include_usage": True} for one in stub.asked)


def test_requests_are_sent_when_they_are_due_and_not_when_others_are_answered() -> None:
    with running(Stub(wait_s=0.5)) as url:
        began = time.monotonic()
        answers = asyncio.run(play(endpoint(url), REQUESTS, max_tokens=2, timeout_s=10))
        took_s = time.monotonic() - began
    assert took_s < 2
    assert all(one.first_token_s >= 0.5 for one in answers)


def test_an_answer_that_does_not_come_in_time_has_failed() -> None:
    with running(Stub(wait_s=5)) as url:
        answers = asyncio.run(play(endpoint(url), REQUESTS[:1], max_tokens=2, timeout_s=0.3))
    assert answers[0].error


def test_a_refusal_has_failed_with_its_words() -> None:
    with running(Stub(text="")) as url:
        answers = asyncio.run(play(endpoint(url), REQUESTS[:1], max_tokens=2, timeout_s=5))
    assert "full" in answers[0].error


def test_the_model_is_what_the_endpoint_lists() -> None:
    with running(Stub()) as url:
        assert asyncio.run(ask_model("stub", url)) == "stub"


def test_an_endpoint_that_is_not_there_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(KVRayError, match=f"mine does not answer at {url}"):
        asyncio.run(ask_model("mine", url))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a=http://host:1/", ("a", "http://host:1")),
        ("a=http://host:1/x/v1", ("a", "http://host:1/x")),
        ("http://host:1", ("http://host:1", "http://host:1")),
    ],
)
def test_endpoints_are_named(text: str, expected: tuple[str, str]) -> None:
    assert parse_endpoint(text) == expected


def test_what_is_no_url_is_refused() -> None:
    with pytest.raises(ConfigError, match="give NAME=http"):
        parse_endpoint("a=host:1")


def test_command_compares_two_endpoints(run_kvray: RunKvray, tmp_path: Path) -> None:
    picture = tmp_path / "found.png"
    with running(Stub()) as one, running(other := Stub(text="other", wait_s=0.1)) as two:
        urls = ("--url", f"one={one}", "--url", f"two={two}")
        done = run_kvray("bench", "serve", *urls, *LOAD, "--json", "--plot", str(picture))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["serving_conversations_first_token_p50_s_ratio_two"] > 1
    assert found["serving_conversations_other_text_two"] == 40
    assert found["serving_conversations_failed_one"] == 0
    assert 0 < found["serving_conversations_reusable_share_one"] < 1
    assert len(other.asked) == 2 + 40
    assert picture.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "Give the endpoints with --url, or --local."),
        (("--url", "a=http://x", "--local"), "Give the endpoints with --url, or --local."),
        (("--url", "a=http://x", "--url", "a=http://y"), "the same name"),
        (("--url", "a=http://x", "--workload", "none"), "one-prefix"),
    ],
)
def test_wrong_options_are_refused(
    run_kvray: RunKvray, arguments: tuple[str, ...], words: str
) -> None:
    done = run_kvray("bench", "serve", *arguments)
    assert done.returncode == 2
    assert words in " ".join(done.stderr.split())
