from dataclasses import replace
from typing import Any

from kvray.lab.demo.record import WITH_KVRAY, WITHOUT_KVRAY, Record, Verdict, count_wrong, judge


def make_record(**fields: Any) -> Record:
    defaults: dict[str, Any] = {
        "phase": "a",
        "replica": "replica-1",
        "prompt": "long",
        "prompt_tokens": 64,
        "reused_tokens": 0,
        "hit_tokens": 0,
        "ttft_s": 1.0,
        "text": "yes",
        "token_ids": (1, 2, 3),
    }
    return Record(**{**defaults, **fields})


TRUTH = make_record(phase="oracle", replica="oracle")
COLD = make_record(ttft_s=2.0, expected_hit_tokens=0)
SHARED = make_record(replica="replica-2", ttft_s=0.1, hit_tokens=32, expected_hit_tokens=32)
WITHOUT = make_record(phase="c", replica=WITHOUT_KVRAY)
WITH = make_record(phase="c", replica=WITH_KVRAY, hit_tokens=32)
GOOD = (COLD, SHARED, WITHOUT, WITH)


def verdict_of(*records: Record) -> Verdict:
    return judge(records, oracle={"long": TRUTH})


def test_equal_answers_and_expected_hits_pass() -> None:
    verdict = verdict_of(*GOOD)
    assert verdict.failures == ()
    assert verdict.identical_text
    assert verdict.wrong_tokens == 0


def test_ratio_is_that_of_the_first_prompt() -> None:
    assert verdict_of(*GOOD).ttft_ratio == 20.0


def test_other_token_fails() -> None:
    wrong = replace(SHARED, token_ids=(1, 9, 3), text="no")
    verdict = verdict_of(COLD, wrong, WITHOUT, WITH)
    assert not verdict.identical_text
    assert verdict.wrong_tokens == 1
    assert "'long' with 1 other tokens" in verdict.failures[0]


def test_other_token_of_equal_text_fails() -> None:
    verdict = verdict_of(COLD, replace(SHARED, token_ids=(1, 9, 3)), WITHOUT, WITH)
    assert not verdict.identical_text
    assert verdict.failures


def test_missing_and_surplus_tokens_count() -> None:
    assert count_wrong(make_record(token_ids=(1,)), TRUTH) == 2
    assert count_wrong(make_record(token_ids=(1, 2, 3, 4)), TRUTH) == 1


def test_fewer_hits_than_must_be_fail() -> None:
    verdict = verdict_of(COLD, replace(SHARED, hit_tokens=0), WITHOUT, WITH)
    assert "found 0 tokens" in verdict.failures[0]
    assert verdict.identical_text


def test_more_hits_than_can_be_fail() -> None:
    assert verdict_of(COLD, replace(SHARED, hit_tokens=64), WITHOUT, WITH).failures


def test_offloading_without_effect_fails() -> None:
    verdict = verdict_of(COLD, SHARED, WITHOUT, replace(WITH, hit_tokens=0))
    assert "Phase c" in verdict.failures[0]


def test_reuse_without_kvray_fails() -> None:
    verdict = verdict_of(COLD, SHARED, replace(WITHOUT, reused_tokens=32), WITH)
    assert "Phase c" in verdict.failures[0]
