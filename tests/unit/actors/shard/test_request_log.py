"""What a shard keeps of requests."""

import pytest

from kvray.actors.shard.traffic import RequestLog
from kvray.actors.staging.replicas import Origin
from kvray.errors import ConfigError
from kvray.trace.request_note import NOTES_MAX, RequestNote, pack, unpack
from tests.ray.engine import NAMESPACE

ONE, TWO = (Origin(replica=name, rank=0, namespace=NAMESPACE) for name in ("one", "two"))


def note(request_id: int, *, end: int = 0) -> bytes:
    return pack(RequestNote(request_id, 1.0, 40, 4, 0, end, 9, "not_stored"))


def found(log: RequestLog, **which: object) -> list[tuple[str, int, int]]:
    asked = {"replica": None, "request_id": None, "last": 100, **which}
    notes = [(name, unpack(packed)) for name, _, packed in log.find(**asked)]
    return [(name, one.request_id, one.end) for name, one in notes]


def test_the_latest_come_first_and_a_second_note_takes_the_place_of_the_first():
    log = RequestLog()
    log.note(ONE, [note(1), note(2)])
    log.note(TWO, [note(1)])
    log.note(ONE, [note(1, end=4)])
    assert found(log) == [("one", 1, 4), ("two", 1, 0), ("one", 2, 0)]
    assert found(log, replica="one", last=1) == [("one", 1, 4)]
    assert found(log, request_id=1) == [("one", 1, 4), ("two", 1, 0)]
    assert found(log, request_id=9) == []


def test_of_too_many_the_oldest_go():
    log = RequestLog(bytes_max=4000)
    for number in range(100):
        log.note(ONE, [note(number)])
    kept = [request_id for _, request_id, _ in found(log)]
    assert kept == list(range(99, 99 - len(kept), -1))
    assert 5 < len(kept) < 20


def test_a_broken_note_costs_itself():
    log = RequestLog()
    negative = pack(RequestNote(3, 1.0, 40, 4, 0, 0, -1, "not_stored"))
    assert log.note(ONE, [note(1), b"junk", negative, None, note(2)]) == 3
    assert found(log) == [("one", 2, 0), ("one", 1, 0)]


def test_what_is_no_list_of_notes_is_refused():
    for notes in ("no list", None, [note(1)] * (NOTES_MAX + 1)):
        with pytest.raises(ConfigError):
            RequestLog().note(ONE, notes)  # type: ignore[arg-type]
