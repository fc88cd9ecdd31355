"""What a shard keeps of requests, and its curve, worked out a little at a time."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvray.actors.shard import traffic
from kvray.actors.shard.traffic import RequestLog, Traffic
from kvray.actors.staging.replicas import Origin
from kvray.errors import ConfigError
from kvray.trace.request_note import NOTES_MAX, RequestNote, pack, unpack
from tests.unit.actors.small_shard import NAMESPACE, settings_for
from tests.unit.store.sizing.prompts import sampled

MINE = replace(NAMESPACE, part_bytes=1000)
ORIGIN = Origin(replica="r", rank=0, namespace=MINE)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Traffic:
    monkeypatch.setattr(traffic, "_CURVE_S", 0.0)
    return Traffic(settings_for(Path("/dev/shm/kvray-test-none")))


def prompts(limit: int, seed: int = 0) -> Any:
    """Return a sample of 60 prompts of ten blocks each."""
    numbers = np.random.default_rng(seed).integers(0, 2**64, (60, 10), dtype="u8")
    return sampled(list(numbers), limit=limit)


def report(made: Traffic, seed: int = 0) -> None:
    made.note(ORIGIN, 1000, prompts(made.note(ORIGIN, 1000, b""), seed).pack())


def until_drawn(made: Traffic) -> dict[str, Any]:
    before = made._curve
    for _ in range(20_000):
        made.step(made._stepped_at + 1.0)
        if made._curve is not before:
            return made.status()
    raise AssertionError("no curve")


def test_a_step_takes_no_more_than_its_share_of_a_core(made):
    report(made)
    now, began_s = time.monotonic(), time.thread_time()
    for at in range(1000):
        made.step(now + at / 20)
    # In 50 s; one step more than it has earned may be under way.
    assert time.thread_time() - began_s < 50 * 0.01


def test_a_curve_tells_what_memory_is_worth_and_is_drawn_when_there_are_new_prompts_only(made):
    for second in range(100):
        made.step(time.monotonic() + second)
    assert made.status() == {"namespaces": {}, "age_s": None, "lost_prompts": 0}
    report(made)
    report(made)
    found = until_drawn(made)
    ((name, curve),) = found["namespaces"].items()
    assert name == MINE.digest().hex()[:8]
    # 600 blocks of 1,000 bytes, in 1/16 of the memory and in all of it.
    assert curve["host"][-1] > 0.4 > curve["host"][0]
    assert len(curve["host"]) == len(found["sizes"])
    assert found["host_bytes"] in found["sizes"]
    assert found["sampled_prompts"] == 120
    made.step(time.monotonic() + 1e6)
    assert made._drawing is None
    report(made, seed=1)
    assert until_drawn(made)["sampled_prompts"] > 120


def test_a_shard_that_starts_again_takes_a_sample_that_is_dense_enough_and_no_other(made):
    before_restart = prompts(limit=2**60)
    limit = made.note(ORIGIN, 1000, before_restart.pack())
    assert made.status()["lost_prompts"] == len(before_restart.ages) > 0
    made.note(ORIGIN, 1000, prompts(limit).pack())
    assert made.plan().window.trace.num_refs == 600


def test_a_block_counts_as_its_slot_with_its_share_of_the_slabs_rest(made):
    geometry = made._geometry
    assert made.slot_bytes(1) == made.slot_bytes(geometry.slot_min) == geometry.slot_min
    third = geometry.slab_bytes // 3
    assert made.slot_bytes(third - geometry.slot_min) >= third - geometry.slot_min
    assert made.slot_bytes(geometry.slab_bytes // 2 + 1) == geometry.slab_bytes


# -- notes of requests ----------------------------------------------------------------------------

ONE, TWO = (Origin(replica=name, rank=0, namespace=MINE) for name in ("one", "two"))


def note(request_id: int, *, end: int = 0, name: str = "") -> bytes:
    return pack(RequestNote(request_id, 1.0, 40, 4, 0, end, 9, "not_stored", name=name))


def found(log: RequestLog, **which: object) -> list[tuple[str, int, int]]:
    asked = {"replica": None, "request": None, "last": 100, **which}
    notes = [(name, unpack(packed)) for name, _, packed in log.find(**asked)]
    return [(name, one.request_id, one.end) for name, one in notes]


def test_the_latest_come_first_and_a_second_note_takes_the_place_of_the_first():
    log = RequestLog()
    log.note(ONE, [note(1), note(2, name="cmpl-9c1d-0")])
    log.note(TWO, [note(1, name="cmpl-7f3a-0")])
    log.note(ONE, [note(1, end=4, name="chatcmpl-7f3a")])
    of_one, of_two = ("one", 1, 4), ("two", 1, 0)
    assert found(log) == [of_one, of_two, ("one", 2, 0)]
    assert found(log, replica="one", last=1) == [of_one]
    assert found(log, request=1) == found(log, request="7f3a") == [of_one, of_two]
    assert found(log, request="7f3a", replica="one") == [of_one]
    assert found(log, request=9) == found(log, request="7f3b") == []


def test_of_too_many_the_oldest_go():
    log = RequestLog(bytes_max=4000)
    for number in range(100):
        log.note(ONE, [note(number)])
    kept = [request_id for _, request_id, _ in found(log)]
    assert kept == list(range(99, 99 - len(kept), -1))
    assert 5 < len(kept) < 20


def test_what_is_no_list_of_notes_is_refused():
    for notes in ("no list", None, [note(1)] * (NOTES_MAX + 1)):
        with pytest.raises(ConfigError):
            RequestLog().note(ONE, notes)  # type: ignore[arg-type]
