"""The demo's prompts, the verdict on its requests, and the picture of them."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvray.config import load_config
from kvray.console.interrupts import Interrupts
from kvray.lab.demo.play import (
    LONG,
    LONG_BLOCKS,
    SAME_SYSTEM,
    SYSTEM_BLOCKS,
    TOKENS_PER_BLOCK,
    UNALIGNED,
    UNALIGNED_TOKENS,
    _write_config,
    make_prompts,
    shareable_tokens,
)
from kvray.lab.demo.report import (
    ORACLE,
    WITH_KVRAY,
    WITHOUT_KVRAY,
    Record,
    Verdict,
    judge,
    source_of,
)
from kvray.lab.runner import running
from kvray.reference import Output
from kvray.reference.output import count_wrong
from kvray.reference.tokenizer import ByteTokenizer


def test_without_room_in_shared_memory_the_arena_is_on_disk_and_allowed_there(monkeypatch):
    monkeypatch.setattr("kvray.lab.demo.play._SHM", Path("/nowhere"))
    with running(Interrupts()) as runner:
        arena = load_config(_write_config(runner, 2**26, model="tiny"), environ={}).arena
        assert arena.mount == "any"


def make_output(**fields: Any) -> Output:
    defaults: dict[str, Any] = {
        "prompt_tokens": 64,
        "reused_tokens": 0,
        "hit_tokens": 0,
        "ttft_s": 1.0,
        "text": "yes",
        "token_ids": (1, 2, 3),
        "finish_reason": "length",
    }
    return Output(**{**defaults, **fields})


def make_record(phase: str, replica: str, expected: int | None = None, **fields: Any) -> Record:
    output = make_output(**fields)
    return Record(
        phase=phase, replica=replica, prompt="long", output=output, expected_hit_tokens=expected
    )


def changed(record: Record, **fields: Any) -> Record:
    return replace(record, output=replace(record.output, **fields))


TRUTH = make_record(ORACLE, ORACLE)
COLD = make_record("a", "replica-1", 0, ttft_s=2.0)
SHARED = make_record("a", "replica-2", 32, ttft_s=0.1, hit_tokens=32)
WITHOUT = make_record("c", WITHOUT_KVRAY)
WITH = make_record("c", WITH_KVRAY, hit_tokens=32)
GOOD = (COLD, SHARED, WITHOUT, WITH)


def verdict_of(*records: Record) -> Verdict:
    return judge(records, oracle={"long": TRUTH})


def test_equal_answers_and_expected_hits_pass():
    verdict = verdict_of(*GOOD)
    assert verdict.failures == ()
    assert verdict.identical_text
    assert verdict.wrong_tokens == 0
    assert verdict.ttft_ratio == 20.0, "that of the first prompt"


@pytest.mark.parametrize("text", ["no", "yes"])
def test_other_token_fails_also_of_equal_text(text):
    wrong = changed(SHARED, token_ids=(1, 9, 3), text=text)
    verdict = verdict_of(COLD, wrong, WITHOUT, WITH)
    assert not verdict.identical_text
    assert verdict.wrong_tokens == 1
    assert "'long' with 1 other tokens" in verdict.failures[0]


@pytest.mark.parametrize(
    ("tokens", "count"), [((1, 2, 3), 0), ((1, 9, 3), 1), ((1,), 2), ((1, 2, 3, 4), 1)]
)
def test_missing_and_surplus_tokens_count(tokens, count):
    assert count_wrong(tokens, (1, 2, 3)) == count


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ((COLD, changed(SHARED, hit_tokens=0), WITHOUT, WITH), "found 0 tokens"),
        ((COLD, changed(SHARED, hit_tokens=64), WITHOUT, WITH), "found 64 tokens"),
        ((COLD, SHARED, WITHOUT, changed(WITH, hit_tokens=0)), "Phase c"),
        ((COLD, SHARED, changed(WITHOUT, reused_tokens=32), WITH), "Phase c"),
    ],
    ids=["fewer hits", "more hits", "offloading without effect", "reuse without kvray"],
)
def test_other_hits_than_must_be_fail(records, words):
    verdict = verdict_of(*records)
    assert words in verdict.failures[0]
    assert verdict.identical_text


PROMPTS = make_prompts(ByteTokenizer())


def test_only_the_questions_to_one_system_prompt_share_a_block():
    for one, other in itertools.combinations(PROMPTS, 2):
        pairs = zip(PROMPTS[one], PROMPTS[other], strict=False)
        equal = [*itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]
        is_same = {one, other} <= set(SAME_SYSTEM)
        assert len(equal) // TOKENS_PER_BLOCK == (SYSTEM_BLOCKS if is_same else 0)
        assert PROMPTS[one] != PROMPTS[other]


def test_one_prompt_ends_with_a_block_and_one_within_and_the_last_token_is_always_computed():
    assert len(PROMPTS[LONG]) == LONG_BLOCKS * TOKENS_PER_BLOCK
    assert len(PROMPTS[UNALIGNED]) % TOKENS_PER_BLOCK == UNALIGNED_TOKENS
    assert shareable_tokens(2 * TOKENS_PER_BLOCK) == TOKENS_PER_BLOCK
    assert shareable_tokens(2 * TOKENS_PER_BLOCK + 1) == 2 * TOKENS_PER_BLOCK


def test_bars_tell_where_prefixes_came_from():
    outputs = (make_output(), make_output(reused_tokens=32), make_output(hit_tokens=32))
    both = make_output(reused_tokens=32, hit_tokens=32)
    assert len({source_of(output) for output in outputs}) == 3
    assert source_of(both) == source_of(outputs[2])
