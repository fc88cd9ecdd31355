"""The requests of `kvray bench serve`: what is equal in them, and when they come."""

from collections import Counter

import numpy as np
import pytest

from kvray.errors import ConfigError
from kvray.lab.bench.serving.workload import (
    KINDS,
    Request,
    from_trace,
    generate,
    reusable_tokens,
)
from kvray.lab.replay.reading import TraceBuilder
from kvray.store.replay.trace import Trace

SIZE = 32


def generated(kind: str, *, seed: int = 1, num_requests: int = 60) -> list[Request]:
    return generate(kind, num_requests=num_requests, seconds=30.0, seed=seed)


def reusable(requests: list[Request], *, seed: int = 1) -> list[int]:
    return reusable_tokens([one.tokens(seed) for one in requests], tokens_per_block=SIZE)


def trace(*prompts: tuple[int, list[int]], block_tokens: int = 512) -> Trace:
    builder = TraceBuilder(name="trace", block_tokens=block_tokens)
    for at, (num_tokens, ids) in enumerate(prompts):
        builder.add(time_s=10.0 * at, num_tokens=num_tokens, ids=ids)
    return builder.build()


def scaled(found: Trace, **options: float) -> list[Request]:
    asked = {"scale": 16.0, "tokens_max": 1000} | options
    return from_trace(found, num_requests=found.num_requests, seconds=4.0, **asked)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_same_seed_makes_the_same_requests(kind: str) -> None:
    first, again = generated(kind), generated(kind)
    assert first == again
    assert [one.tokens(3) for one in first] == [one.tokens(3) for one in again]


@pytest.mark.parametrize("kind", KINDS)
def test_arrivals_fill_the_seconds(kind: str) -> None:
    times = [one.at_s for one in generated(kind)]
    assert times == sorted(times)
    assert (times[0], times[-1]) == (0.0, pytest.approx(30.0))


@pytest.mark.parametrize("kind", KINDS)
def test_rounds_have_no_block_in_common(kind: str) -> None:
    requests = generated(kind)
    blocks = [
        {tuple(tokens[at : at + SIZE]) for tokens in prompts for at in range(0, len(tokens), SIZE)}
        for prompts in ([one.tokens(seed) for one in requests] for seed in (1, 2))
    ]
    assert not blocks[0] & blocks[1]


def test_turns_of_a_conversation_begin_with_those_before() -> None:
    requests = generated("conversations")
    longer = [one for one in requests if len(one.stretches) > 2]
    assert len(longer) > len(requests) / 2
    known = {one.stretches for one in requests}
    assert all(one.stretches[:-1] in known for one in longer)
    assert len({one.stretches[1][0] for one in requests}) > 3, "several conversations"


def test_one_prefix_is_all_that_prompts_have_in_common() -> None:
    assert reusable(generated("one-prefix")) == [0, *[512] * 59]


def test_prompts_without_a_prefix_have_nothing_in_common() -> None:
    assert sum(reusable(generated("no-prefix"))) == 0


def test_an_infinite_cache_has_whole_blocks_and_never_the_last_token() -> None:
    long = list(range(100))
    prompts = [long, long[:96], long[:95], [*long[:40], 7, *long[41:]], long[50:]]
    assert reusable_tokens(prompts, tokens_per_block=SIZE) == [0, 64, 64, 32, 0]


def test_blocks_of_a_trace_become_shorter_and_stay_equal() -> None:
    requests = scaled(trace((1024, [1, 2]), (1400, [1, 2, 3]), (1536, [1, 5, 3])))
    assert [one.num_tokens for one in requests] == [64, 88, 96]
    assert [one.at_s for one in requests] == [0.0, 2.0, 4.0]
    first, second, third = (one.tokens(1) for one in requests)
    assert first == second[:64]
    assert first[:32] == third[:32]
    assert first[32:] != third[32:64]
    assert second[64:] != third[64:88], "the same id after other blocks is another block"


def test_what_comes_after_the_last_block_is_nobody_elses() -> None:
    requests = scaled(trace((1000, [1]), (1000, [1])))
    first, second = (one.tokens(1) for one in requests)
    assert len(first) == len(second) == 62
    assert first[:32] == second[:32]
    assert first[32:] != second[32:]


def test_a_factor_that_divides_no_block_shifts_no_other() -> None:
    found = trace((5120, list(range(10))), (5120, list(range(10))))
    (first, second) = scaled(found, scale=3.0, tokens_max=5000)
    assert first.num_tokens == 1707
    assert first.tokens(1) == second.tokens(1)


def test_prompts_that_are_too_long_lose_their_end() -> None:
    found = trace((5120, list(range(10))), (5120, list(range(10))))
    (first, _) = scaled(found)
    (cut, _) = scaled(found, tokens_max=100)
    assert cut.tokens(1) == first.tokens(1)[:100]


def test_whole_conversations_of_a_trace_are_drawn_from_all_of_it() -> None:
    turns = [
        [0, talk, *range(1000 * talk, 1000 * talk + turn)]
        for turn in range(4)
        for talk in range(1, 51)
    ]
    found = trace(*((512 * len(ids), ids) for ids in turns))
    requests = from_trace(found, num_requests=20, seconds=4.0, scale=16.0, tokens_max=1000)
    talks = Counter(one.stretches[1][0] for one in requests)
    assert [*talks.values()] == [4] * 5
    assert max(talks) > 20, "not only the first ones"
    assert [one.at_s for one in requests] == sorted(one.at_s for one in requests)
    assert all(one.stretches[0] == requests[0].stretches[0] for one in requests)


def test_a_trace_that_is_too_short_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"has 1 requests and 5 are asked for"):
        from_trace(trace((512, [1])), num_requests=5, seconds=1.0, scale=16.0, tokens_max=1000)


def test_blocks_that_come_to_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="give at most 512"):
        scaled(trace((512, [1])), scale=1024.0)


@pytest.mark.parametrize(("vocabulary", "low"), [(16_384, 1000), (256, 32)])
def test_tokens_are_words_of_the_vocabulary(vocabulary: int, low: int) -> None:
    requests = generated("no-prefix")
    tokens = np.array([one.tokens(9, vocabulary=vocabulary) for one in requests])
    assert low <= tokens.min() < 2 * low
    assert vocabulary * 0.9 < tokens.max() < vocabulary
