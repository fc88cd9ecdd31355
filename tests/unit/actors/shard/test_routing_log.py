"""Which of the routers' notes belongs to an engine's note on a request."""

import pytest

from kvray.actors.shard.routing_log import RoutingLog
from kvray.errors import ConfigError
from kvray.trace.request_note import RequestNote
from kvray.trace.routing_note import ROUTING_NOTES_MAX, RoutingNote, pack_routing

DIGEST = b"12345678"


def routed(
    request: str, at: float, *, num_tokens: int = 40, digest: bytes = DIGEST, reason: str = "prefix"
) -> bytes:
    note = RoutingNote(request, at, "one", num_tokens, digest, reason)  # type: ignore[arg-type]
    return pack_routing(note)


def asked(at: float, *, num_tokens: int = 40, digest: bytes = DIGEST) -> RequestNote:
    return RequestNote(1, at, num_tokens, 4, 0, 0, 9, "not_stored", prefix_digest=digest)


def found(log: RoutingLog, note: RequestNote, replica: str = "one") -> str | None:
    one = log.find(replica, note)
    return None if one is None else one.request


def test_a_request_is_found_by_its_replica_prompt_and_time() -> None:
    log = RoutingLog()
    log.note([routed("early", 100.0), routed("late", 160.0)])
    log.note([routed("other length", 160.0, num_tokens=41)])
    assert found(log, asked(100.2)) == "early"
    assert found(log, asked(161.0)) == "late"
    assert found(log, asked(161.0, num_tokens=41)) == "other length"
    assert found(log, asked(161.0), replica="two") is None
    assert found(log, asked(161.0, digest=b"another.")) is None
    assert found(log, asked(99.0)) == "early", "clocks differ a little"
    assert found(log, asked(80.0)) is None
    assert found(log, asked(1000.0)) is None


def test_a_note_without_a_digest_may_be_any_prompt_of_its_length() -> None:
    log = RoutingLog()
    log.note([routed("one", 100.0, digest=b"")])
    assert found(log, asked(100.1, digest=b"another.")) == "one"


def test_a_later_note_takes_the_place_of_the_first() -> None:
    log = RoutingLog()
    log.note([routed("one", 100.0)])
    log.note([routed("one", 100.0, reason="queue")])
    note = log.find("one", asked(100.0))
    assert note is not None
    assert note.reason == "queue"


def test_of_too_many_the_oldest_go() -> None:
    log = RoutingLog(bytes_max=5000)
    for number in range(100):
        log.note([routed(str(number), 100.0 + 10 * number)])
    assert found(log, asked(100.0)) is None
    assert found(log, asked(100.0 + 990)) == "99"
    assert 5 < len(log._kept) < 20
    assert sum(map(len, log._of.values())) == len(log._kept)


@pytest.mark.parametrize("notes", [None, [b"broken"], [routed("one", 1.0)] * 129])
def test_what_is_no_list_of_notes_is_refused_whole(notes: object) -> None:
    assert ROUTING_NOTES_MAX == 128
    log = RoutingLog()
    with pytest.raises(ConfigError):
        log.note([routed("good", 1.0), *notes] if notes == [b"broken"] else notes)  # type: ignore
    assert found(log, asked(1.0)) is None
