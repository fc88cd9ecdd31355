"""`kvray bench serve`: its requests, how they are sent, and what the answers come to."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse, StreamingResponse

from kvray.errors import ConfigError, KVRayError
from kvray.lab.bench.serving.load import (
    KINDS,
    Answer,
    Due,
    Endpoint,
    Request,
    ask_model,
    from_trace,
    generate,
    parse_endpoint,
    play,
    reusable_tokens,
)
from kvray.lab.bench.serving.report import Round, Section, round_figures, serving_report
from kvray.lab.replay.reading import TraceBuilder
from kvray.store.replay import Trace
from tests.kit.web import app_served


class Stub:
    """An OpenAI-compatible endpoint without a model; it streams `text`, and notes its requests."""

    def __init__(self, *, text: str = "one two", wait_s: float = 0) -> None:
        self.asked: list[dict[str, Any]] = []
        self.at_once = self.most_at_once = 0
        self.app = FastAPI()
        self._text, self._wait_s = text, wait_s
        one = {"id": "stub", "object": "model", "created": 0, "owned_by": "test"}
        self.app.get("/v1/models")(lambda: {"object": "list", "data": [one]})
        self.app.post("/v1/completions")(self._complete)

    async def _complete(self, asked: dict[str, Any]) -> Any:
        self.asked.append(asked)
        if self._text == "":
            return JSONResponse({"error": {"message": "full"}}, 429)
        headers = {"x-kvray-replica": "engine-1", "content-type": "text/event-stream"}
        return StreamingResponse(self._lines(len(asked["prompt"])), headers=headers)

    async def _lines(self, num_tokens: int) -> AsyncIterator[str]:
        base = {"id": "1", "object": "text_completion", "created": 0, "model": "stub"}
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(self._wait_s)
        self.at_once -= 1
        for word in self._text.split():
            choice = {"index": 0, "text": word, "finish_reason": None, "logprobs": None}
            yield f"data: {json.dumps({**base, 'choices': [choice]})}\n\n"
        usage: dict[str, Any] = {"prompt_tokens": num_tokens, "completion_tokens": 2}
        usage |= {"total_tokens": num_tokens + 2}
        usage |= {"prompt_tokens_details": {"cached_tokens": num_tokens // 2}}
        yield f"data: {json.dumps({**base, 'choices': [], 'usage': usage})}\n\n"
        yield "data: [DONE]\n\n"


REQUESTS = [Due(at_s=float(at), tokens=[1] * 100) for at in range(4)]


def answer(first_token_s: float, **changes: Any) -> Answer:
    usual: dict[str, Any] = {"text": "x", "replica": "a", "cached_tokens": 50}
    times = {"first_token_s": first_token_s, "whole_s": first_token_s + 1}
    return Answer(**{**usual, **times, **changes})


FAILED = Answer(error="gone")
FAST = [answer(0.1), answer(0.2, replica="b"), answer(0.3), answer(1.0, cached_tokens=0)]
SLOW = [answer(2.0), answer(0.4, text="y"), answer(0.6), FAILED]


def one_round(fast: list[Answer] = FAST, slow: list[Answer] = SLOW) -> Round:
    return Round(requests=REQUESTS, reusable=[0, 64, 64, 64], answers={"fast": fast, "slow": slow})


def figures(one: Round, *, num_replicas: int = 0) -> dict[str, dict[str, float]]:
    return round_figures(one, in_time_s=0.5, num_replicas=num_replicas)


@pytest.mark.parametrize(
    ("name", "fast", "slow"),
    [
        ("first_token_p50_s", 0.2, 0.6),
        ("first_token_p90_s", 1.0, None),  # the one that failed never came
        ("requests_per_s", 4 / 5, 3 / 3.6),
        ("in_time_per_s", 3 / 5, 1 / 3.6),
        ("failed", 0, 1),
        # Reuse stands beside that of an infinite cache; of a failed answer nothing counts.
        ("cached_share", 150 / 400, 150 / 300),
        ("reusable_share", 192 / 400, 128 / 300),
        ("reuse", 150 / 192, 150 / 128),
        # The most loaded replica over the mean.
        ("most_requests", 3 * 2 / 4, 1),
        ("most_computed", 200 * 2 / 250, 1),
        ("other_text", 0, 1),  # than that of the first endpoint
    ],
)
def test_a_round_comes_to_figures_of_each_endpoint(name, fast, slow):
    found = figures(one_round())
    assert found["fast"][name] == pytest.approx(fast)
    assert found["slow"].get(name) == (None if slow is None else pytest.approx(slow))


def test_an_endpoint_that_answers_few_requests_or_tells_little_looks_no_better():
    found = figures(one_round(slow=[answer(0.1), FAILED, FAILED, FAILED]))["slow"]
    assert not {"first_token_p50_s", "first_token_p90_s"} & found.keys()
    assert found["requests_per_s"] < 1 / max(one.at_s for one in REQUESTS) + 0.01
    found = figures(one_round(slow=[FAILED] * 4))["slow"]
    assert found["requests_per_s"] == 0
    assert "first_token_p90_s" not in found
    silent = [Answer(text="x", first_token_s=0.1, whole_s=0.2)] * 4
    found = figures(one_round(slow=silent), num_replicas=3)
    assert not {"cached_share", "reuse", "most_requests"} & found["slow"].keys()
    assert found["fast"]["most_requests"] == 3 * 3 / 4  # with a replica that nobody heard of


def test_rounds_come_to_medians_of_figures_and_ratios_and_failures_to_their_sum(capsys):
    rounds = [
        one_round(fast=[answer(fast)] * 4, slow=[answer(slow)] * num + [FAILED] * (4 - num))
        for fast, slow, num in ((0.1, 0.1, 4), (0.1, 0.3, 4), (0.2, 1.6, 3))
    ]
    section = Section.of("one-prefix", rounds, in_time_s=0.5, num_replicas=3)
    report = serving_report([section], {"rate": 1.0})
    found = report.facts
    assert found["serving_one_prefix_first_token_p50_s_slow"] == 0.3
    assert found["serving_one_prefix_first_token_p50_s_ratio_slow"] == pytest.approx(3.0)
    assert found["serving_one_prefix_requests_per_s_ratio_slow"] == 1.0488  # 4.3 / 4.1
    assert found["serving_one_prefix_failed_slow"] == 1
    assert found["rate"] == 1.0
    assert len(found["workloads"][0]["rounds"]) == 3
    report.show(as_json=False)
    shown = capsys.readouterr().out
    for words in ("fast", "3.00x", "slow: gone"):
        assert words in shown


LOAD_REQUESTS = [Due(at_s=at / 20, tokens=[40 + at] * 64) for at in range(4)]


def ask_all(url: str, requests: list[Due], *, timeout_s: float = 10) -> Any:
    endpoint = Endpoint(name="stub", url=url, model="stub")
    return asyncio.run(play(endpoint, requests, max_tokens=2, timeout_s=timeout_s))


def test_requests_are_sent_when_they_are_due_and_answers_have_all_that_is_told():
    with app_served((stub := Stub(wait_s=0.5)).app) as url:
        answers = ask_all(url, LOAD_REQUESTS)
    assert stub.most_at_once > 1, "none waits until another is answered"
    told = {(one.text, one.replica, one.cached_tokens) for one in answers}
    assert told == {("onetwo", "engine-1", 32)}
    assert all(0.5 <= one.first_token_s <= one.whole_s for one in answers)
    assert sorted(one["prompt"] for one in stub.asked) == [due.tokens for due in LOAD_REQUESTS]
    assert all(one["stream_options"] == {"include_usage": True} for one in stub.asked)


def test_a_late_answer_and_a_refusal_have_failed_and_an_endpoint_that_is_gone_is_named():
    with app_served(Stub(wait_s=5).app) as url:
        (late,) = ask_all(url, LOAD_REQUESTS[:1], timeout_s=0.3)
    with app_served(Stub(text="").app) as url:
        (refused,) = ask_all(url, LOAD_REQUESTS[:1])
        assert asyncio.run(ask_model("stub", url)) == "stub", "what it lists"
    assert late.error
    assert "full" in refused.error
    with pytest.raises(KVRayError, match=f"mine does not answer at {url}"):
        asyncio.run(ask_model("mine", url))


def test_endpoints_are_named_and_what_is_no_url_is_refused():
    assert parse_endpoint("a=http://host:1/") == ("a", "http://host:1")
    assert parse_endpoint("a=http://host:1/x/v1") == ("a", "http://host:1/x")
    assert parse_endpoint("http://host:1") == ("http://host:1", "http://host:1")
    for wrong in ("a=host:1", "a=http://host:80OO", "a=http://[::1", "a=http://"):
        with pytest.raises(ConfigError, match="give NAME=http"):
            parse_endpoint(wrong)


def test_command_compares_two_endpoints(run_kvray, tmp_path):
    picture, other = tmp_path / "found.png", Stub(text="other", wait_s=0.1)
    load = "--rate 20 --seconds 1 --rounds 2 --answer-tokens 2 --json --plot"
    with app_served(Stub().app) as one, app_served(other.app) as two:
        urls = ("--url", f"one={one}", "--url", f"two={two}")
        done = run_kvray("bench", "serve", *urls, *load.split(), picture)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["serving_conversations_first_token_p50_s_ratio_two"] > 1
    assert found["serving_conversations_other_text_two"] == 40
    assert found["serving_conversations_failed_one"] == 0
    assert 0 < found["serving_conversations_reusable_share_one"] < 1
    assert len(other.asked) == 2 + 40
    assert picture.exists()


SIZE = 32


def generated(kind: str) -> list[Request]:
    return generate(kind, num_requests=60, seconds=30.0, seed=1)


def trace(*prompts: tuple[int, list[int]]) -> Trace:
    builder = TraceBuilder(name="trace", block_tokens=512)
    for at, (num_tokens, ids) in enumerate(prompts):
        builder.add(time_s=10.0 * at, num_tokens=num_tokens, ids=ids)
    return builder.build()


def scaled(found: Trace, **asked: Any) -> list[Request]:
    usual = {"num_requests": found.num_requests, "scale": 16.0, "tokens_max": 1000}
    return from_trace(found, seconds=4.0, **{**usual, **asked})


@pytest.mark.parametrize("kind", KINDS)
def test_same_seed_makes_the_same_requests_which_fill_the_seconds_and_rounds_share_no_block(kind):
    first, again = generated(kind), generated(kind)
    assert first == again
    assert [one.tokens(3) for one in first] == [one.tokens(3) for one in again]
    times = [one.at_s for one in first]
    assert times == sorted(times)
    assert (times[0], times[-1]) == (0.0, pytest.approx(30.0))
    blocks = [
        {tuple(tokens[at : at + SIZE]) for tokens in prompts for at in range(0, len(tokens), SIZE)}
        for prompts in ([one.tokens(seed) for one in first] for seed in (1, 2))
    ]
    assert not blocks[0] & blocks[1]


def test_turns_of_a_conversation_begin_with_those_before():
    requests = generated("conversations")
    longer = [one for one in requests if len(one.stretches) > 2]
    assert len(longer) > len(requests) / 2
    known = {one.stretches for one in requests}
    assert all(one.stretches[:-1] in known for one in longer)
    assert len({one.stretches[1][0] for one in requests}) > 3, "several conversations"


def test_an_infinite_cache_has_whole_blocks_of_what_prompts_have_in_common_never_the_last_token():
    long = list(range(100))
    prompts = [long, long[:96], long[:95], [*long[:40], 7, *long[41:]], long[50:]]
    assert reusable_tokens(prompts, tokens_per_block=SIZE) == [0, 64, 64, 32, 0]
    for kind, shared in (("one-prefix", 512), ("no-prefix", 0)):
        prompts = [one.tokens(1) for one in generated(kind)]
        assert reusable_tokens(prompts, tokens_per_block=SIZE) == [0, *[shared] * 59]


def test_blocks_of_a_trace_become_shorter_and_stay_equal_and_what_comes_after_is_nobody_elses():
    requests = scaled(trace((1024, [1, 2]), (1400, [1, 2, 3]), (1536, [1, 5, 3])))
    assert [one.num_tokens for one in requests] == [64, 88, 96]
    assert [one.at_s for one in requests] == [0.0, 2.0, 4.0]
    first, second, third = (one.tokens(1) for one in requests)
    assert first == second[:64]
    assert first[:32] == third[:32]
    assert first[32:] != third[32:64]
    assert second[64:] != third[64:88], "the same id after other blocks is another block"
    first, second = (one.tokens(1) for one in scaled(trace((1000, [1]), (1000, [1]))))
    assert len(first) == len(second) == 62
    assert first[:32] == second[:32]
    assert first[32:] != second[32:]


def test_a_factor_that_divides_no_block_shifts_no_other_and_long_prompts_lose_their_end():
    long = trace(*[(5120, list(range(10)))] * 2)
    first, second = scaled(long, scale=3.0, tokens_max=5000)
    assert first.num_tokens == 1707
    assert first.tokens(1) == second.tokens(1)
    (first, _), (cut, _) = scaled(long), scaled(long, tokens_max=100)
    assert cut.tokens(1) == first.tokens(1)[:100]


def test_whole_conversations_of_a_trace_are_drawn_from_all_of_it():
    turns = [
        (512 * (2 + turn), [0, talk, *range(1000 * talk, 1000 * talk + turn)])
        for turn in range(4)
        for talk in range(1, 51)
    ]
    requests = scaled(trace(*turns), num_requests=20)
    talks = Counter(one.stretches[1][0] for one in requests)
    assert [*talks.values()] == [4] * 5
    assert max(talks) > 20, "not only the first ones"
    assert [one.at_s for one in requests] == sorted(one.at_s for one in requests)
    assert all(one.stretches[0] == requests[0].stretches[0] for one in requests)


def test_a_trace_that_is_too_short_or_made_too_small_is_refused():
    with pytest.raises(ConfigError, match="has 1 requests and 5 are asked for"):
        scaled(trace((512, [1])), num_requests=5)
    with pytest.raises(ConfigError, match="most 512"):
        scaled(trace((512, [1])), scale=1024.0)


@pytest.mark.parametrize(("vocabulary", "low"), [(16_384, 1000), (256, 32)])
def test_tokens_are_words_of_the_vocabulary(vocabulary, low):
    requests = generated("no-prefix")
    tokens = np.array([one.tokens(9, vocabulary=vocabulary) for one in requests])
    assert low <= tokens.min() < 2 * low
    assert vocabulary * 0.9 < tokens.max() < vocabulary
