"""A router's note over a wire, whole and broken."""

import msgpack
import pytest

from kvray.errors import ConfigError
from kvray.trace.routing_note import (
    CANDIDATES_MAX,
    CandidateNote,
    RoutingNote,
    pack_routing,
    unpack_routing,
)

CANDIDATE = CandidateNote("one", 32, 64, 0, 128, 800, 0.1, 0.02, 0.8, 0.3, 0.0)
NOTE = RoutingNote(
    "request", 1.5, "one", 1024, b"12345678", "queue", 3, (CANDIDATE,) * 3, "answered", 0.75
)


def test_a_note_comes_back_as_it_was() -> None:
    assert unpack_routing(pack_routing(NOTE)) == NOTE
    shortest = RoutingNote("request", 1.5, "one", 0, b"", "fallback")
    assert unpack_routing(pack_routing(shortest)) == shortest


def test_the_longest_names_of_the_most_candidates_fit() -> None:
    longest = CANDIDATE._replace(replica="n" * 256)
    note = NOTE._replace(candidates=(longest,) * CANDIDATES_MAX)
    assert unpack_routing(pack_routing(note)) == note


@pytest.mark.parametrize(
    "broken",
    [
        b"",
        None,
        b"\xc1",
        b"x" * 20_000,
        msgpack.packb(list(NOTE)[:3]),
        msgpack.packb(NOTE._replace(reason="luck")),  # type: ignore[arg-type]
        msgpack.packb(NOTE._replace(num_tokens=-1)),
        msgpack.packb(NOTE._replace(replica="")),
        msgpack.packb(NOTE._replace(prefix_digest=b"123456789")),
        msgpack.packb(NOTE._replace(candidates=(CANDIDATE,) * (CANDIDATES_MAX + 1))),
        msgpack.packb(NOTE._replace(candidates=(CANDIDATE[:4],))),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_note_is_refused(broken: object) -> None:
    with pytest.raises(ConfigError):
        unpack_routing(broken)
