import logging
from typing import Any

import pytest

from kvray.node import PrefixDigests
from kvray.node import prefix_digests as module

REASON = "miss_tokens_not_stored"


def digest(number: int) -> bytes:
    return number.to_bytes(8, "little")


def answer(num_tokens: int, **difference: tuple[object, object]) -> dict[str, Any]:
    return {
        "num_tokens": num_tokens,
        "replica": "b",
        "difference": {name: list(pair) for name, pair in difference.items()},
    }


def test_notes_wait_in_order_until_they_are_reported() -> None:
    digests = PrefixDigests()
    digests.note_missed(digest(1), 640)
    digests.note_stored(digest(1))
    assert digests.waiting() == [(digest(1), 640), (digest(1), 0)]
    digests.note_missed(digest(2), 64)
    digests.reported(2, [])
    assert digests.waiting() == [(digest(2), 64)]


def test_a_miss_of_no_tokens_is_no_note() -> None:
    digests = PrefixDigests()
    digests.note_missed(digest(1), 0)
    assert digests.waiting() == []


def test_what_is_stored_again_and_again_is_noted_once() -> None:
    digests = PrefixDigests()
    for _ in range(5):
        digests.note_stored(digest(1))
    assert len(digests.waiting()) == 1


def test_another_shard_is_told_again_of_what_is_in_use() -> None:
    digests = PrefixDigests()
    digests.note_stored(digest(1))
    digests.reported(1, [])
    digests.tell_again()
    digests.note_stored(digest(1))
    assert len(digests.waiting()) == 1


def test_notes_are_bounded_and_what_was_dropped_is_noted_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_WAITING_MAX", 2)
    digests = PrefixDigests()
    for number in range(5):
        digests.note_stored(digest(number))
    assert len(digests.waiting()) == 2
    digests.reported(2, [])
    digests.note_stored(digest(4))
    assert digests.waiting() == [(digest(4), 0)]


def test_known_prefix_digests_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_KNOWN_MAX", 3)
    digests = PrefixDigests()
    for number in (0, 1, 2, 3, 0):
        digests.note_stored(digest(number))
    assert len(digests.waiting()) == 5


def test_incompatible_tokens_leave_the_reason_under_which_they_were_counted() -> None:
    digests = PrefixDigests()
    counters = {REASON: 100, "requests": 2}
    assert digests.counted(counters, REASON) == counters
    digests.reported(0, [answer(64, tp_layout=("tp2", "tp4"))])
    assert digests.counted(counters, REASON) == {
        REASON: 36,
        "miss_tokens_incompatible": 64,
        "requests": 2,
    }
    assert counters[REASON] == 100


def test_each_difference_is_explained_once(caplog: pytest.LogCaptureFixture) -> None:
    digests = PrefixDigests()
    for _ in range(3):
        digests.reported(0, [answer(64, tp_layout=("tp2", "tp4"))])
    digests.reported(0, [answer(64, kv_dtype=("bfloat16", "float8"))])
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 2
    assert digests.incompatible_tokens == 4 * 64


def test_explanations_are_bounded(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_EXPLAINED_MAX", 3)
    digests = PrefixDigests()
    digests.reported(0, [answer(1, model=("mine", f"sha256:{n}")) for n in range(9)])
    assert len(caplog.records) == 3
