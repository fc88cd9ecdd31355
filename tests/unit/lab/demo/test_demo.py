"""The verdict on the demo's requests, and the picture of them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvray.config import load_config
from kvray.console.interrupts import Interrupts
from kvray.lab.demo import play, report
from kvray.lab.runner import running
from kvray.reference import Output


def test_without_room_in_shared_memory_the_arena_is_on_disk_and_allowed_there(monkeypatch):
    monkeypatch.setattr("kvray.lab.demo.play._SHM", Path("/nowhere"))
    with running(Interrupts()) as runner:
        arena = load_config(play._write_config(runner, 2**26, model="tiny"), environ={}).arena
        assert arena.mount == "any"


def make_output(**fields: Any) -> Output:
    known: dict[str, Any] = {"prompt_tokens": 64, "reused_tokens": 0, "hit_tokens": 0}
    known |= {"ttft_s": 1.0, "text": "yes", "token_ids": (1, 2, 3), "finish_reason": "length"}
    return Output(**{**known, **fields})


def make_record(
    phase: str, replica: str, expected: int | None = None, **fields: Any
) -> report.Record:
    known: dict[str, Any] = {"phase": phase, "replica": replica, "prompt": "long"}
    return report.Record(**known, output=make_output(**fields), expected_hit_tokens=expected)


def changed(record: report.Record, **fields: Any) -> report.Record:
    return replace(record, output=replace(record.output, **fields))


TRUTH = make_record(report.ORACLE, report.ORACLE)
COLD = make_record("a", "replica-1", 0, ttft_s=2.0)
SHARED = make_record("a", "replica-2", 32, ttft_s=0.1, hit_tokens=32)
WITHOUT = make_record("c", report.WITHOUT_KVRAY)
WITH = make_record("c", report.WITH_KVRAY, hit_tokens=32)
GOOD = (COLD, SHARED, WITHOUT, WITH)


def verdict_of(*records: report.Record) -> report.Verdict:
    return report.judge(records, oracle={"long": TRUTH})


def test_equal_answers_and_expected_hits_pass():
    verdict = verdict_of(*GOOD)
    assert verdict.failures == ()
    assert verdict.identical_text
    assert verdict.wrong_tokens == 0
    assert verdict.ttft_ratio == 20.0, "that of the first prompt"


@pytest.mark.parametrize(
    ("tokens", "count", "text"),
    [((1, 9, 3), 1, "no"), ((1, 9, 3), 1, "yes"), ((1,), 2, "yes"), ((1, 2, 3, 4), 1, "yes")],
)
def test_other_missing_and_surplus_tokens_fail_also_of_equal_text(tokens, count, text):
    wrong = changed(SHARED, token_ids=tokens, text=text)
    verdict = verdict_of(COLD, wrong, WITHOUT, WITH)
    assert not verdict.identical_text
    assert verdict.wrong_tokens == count
    assert f"'long' with {count} other tokens" in verdict.failures[0]


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


def test_bars_tell_where_prefixes_came_from():
    outputs = (make_output(), make_output(reused_tokens=32), make_output(hit_tokens=32))
    both = make_output(reused_tokens=32, hit_tokens=32)
    assert len({report.source_of(output) for output in outputs}) == 3
    assert report.source_of(both) == report.source_of(outputs[2])
