import logging
from typing import Any

import pytest

from kvray.node import Openings
from kvray.node import openings as openings_module

REASON = "miss_tokens_not_stored"


def opening(number: int) -> bytes:
    return number.to_bytes(8, "little")


def answer(num_tokens: int, **difference: tuple[object, object]) -> dict[str, Any]:
    return {
        "num_tokens": num_tokens,
        "replica": "b",
        "difference": {name: list(pair) for name, pair in difference.items()},
    }


def test_notes_wait_in_order_until_they_are_reported() -> None:
    openings = Openings()
    openings.note_missed(opening(1), 640)
    openings.note_stored(opening(1))
    assert openings.waiting() == [(opening(1), 640), (opening(1), 0)]
    openings.note_missed(opening(2), 64)
    openings.reported(2, [])
    assert openings.waiting() == [(opening(2), 64)]


def test_a_miss_of_no_tokens_is_no_note() -> None:
    openings = Openings()
    openings.note_missed(opening(1), 0)
    assert openings.waiting() == []


def test_what_is_stored_again_and_again_is_noted_once() -> None:
    openings = Openings()
    for _ in range(5):
        openings.note_stored(opening(1))
    assert len(openings.waiting()) == 1


def test_another_shard_is_told_again_of_what_is_in_use() -> None:
    openings = Openings()
    openings.note_stored(opening(1))
    openings.reported(1, [])
    openings.tell_again()
    openings.note_stored(opening(1))
    assert len(openings.waiting()) == 1


def test_notes_are_bounded_and_what_was_dropped_is_noted_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(openings_module, "_WAITING_MAX", 2)
    openings = Openings()
    for number in range(5):
        openings.note_stored(opening(number))
    assert len(openings.waiting()) == 2
    openings.reported(2, [])
    openings.note_stored(opening(4))
    assert openings.waiting() == [(opening(4), 0)]


def test_known_openings_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openings_module, "_KNOWN_MAX", 3)
    openings = Openings()
    for number in (0, 1, 2, 3, 0):
        openings.note_stored(opening(number))
    assert len(openings.waiting()) == 5


def test_incompatible_tokens_leave_the_reason_under_which_they_were_counted() -> None:
    openings = Openings()
    counters = {REASON: 100, "requests": 2}
    assert openings.counted(counters, REASON) == counters
    openings.reported(0, [answer(64, tp_layout=("tp2", "tp4"))])
    assert openings.counted(counters, REASON) == {
        REASON: 36,
        "miss_tokens_incompatible": 64,
        "requests": 2,
    }
    assert counters[REASON] == 100


def test_each_difference_is_explained_once(caplog: pytest.LogCaptureFixture) -> None:
    openings = Openings()
    for _ in range(3):
        openings.reported(0, [answer(64, tp_layout=("tp2", "tp4"))])
    openings.reported(0, [answer(64, kv_dtype=("bfloat16", "float8"))])
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 2
    assert openings.incompatible_tokens == 4 * 64


def test_explanations_are_bounded(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openings_module, "_EXPLAINED_MAX", 3)
    openings = Openings()
    openings.reported(0, [answer(1, model=("mine", f"sha256:{n}")) for n in range(9)])
    assert len(caplog.records) == 3
