"""The note of a router on one request, for people who ask why it went where it went; pure."""

from typing import Annotated, Literal, NamedTuple

import msgpack
from pydantic import Field, TypeAdapter

from kvray.errors import ConfigError
from kvray.trace.prefix_digest import PREFIX_DIGEST_BYTES

CANDIDATES_MAX = 16
"""Candidates in one note, the best first."""
ROUTING_NOTES_MAX = 128  # notes in one report of a router
_PACKED_MAX = 16 * 2**10

_Count = Annotated[int, Field(ge=0, lt=2**31)]
_Name = Annotated[str, Field(min_length=1, max_length=256)]
Outcome = Literal["under_way", "answered", "not_answered"]


class CandidateNote(NamedTuple):
    """What a request would have cost on one replica: tokens by source, and seconds by part."""

    replica: _Name
    pool_tokens: _Count
    """That the engine's own pool most likely had."""
    host_tokens: _Count
    disk_tokens: _Count
    remote_tokens: _Count
    computed_tokens: _Count
    queue_s: float
    bring_s: float
    compute_s: float
    later_s: float
    """What later requests would have waited for work that another replica saved."""
    crowd_s: float
    """The credit that it lost, as it lately got more than its share."""


class RoutingNote(NamedTuple):
    """One request, as the router sent it to a replica."""

    request: _Name
    """Serve's own id of it."""
    at: float
    """When it was chosen for, in seconds since the epoch."""
    replica: _Name
    """The one that took it."""
    num_tokens: _Count
    """Of its prompt; 0: the router did not see it."""
    prefix_digest: Annotated[bytes, Field(max_length=PREFIX_DIGEST_BYTES)]
    """See `kvray.trace.prefix_digest`; empty: not known."""
    reason: Literal["prefix", "queue", "fallback"]
    num_candidates: _Count = 0
    candidates: Annotated[tuple[CandidateNote, ...], Field(max_length=CANDIDATES_MAX)] = ()
    """The one that took it first, then the best of the others; empty if nobody knew the costs."""
    outcome: Outcome = "under_way"
    first_token_s: float = 0.0
    """From the choice to its first token; 0: there is none yet, or nobody told."""


_NOTE = TypeAdapter(RoutingNote)


def pack_routing(note: RoutingNote) -> bytes:
    """Return a note as bytes."""
    packed: bytes = msgpack.packb(note)
    return packed


def unpack_routing(packed: object) -> RoutingNote:
    """Return the note that `pack_routing` has packed; ConfigError if these bytes are none."""
    if not isinstance(packed, bytes) or len(packed) > _PACKED_MAX:
        raise ConfigError(f"A router's note on a request is at most {_PACKED_MAX} bytes.")
    try:
        fields = msgpack.unpackb(packed, use_list=False)
        return _NOTE.validate_python(fields, strict=True)
    except (TypeError, ValueError, OverflowError, msgpack.UnpackException):
        raise ConfigError("These bytes are no router's note on a request.") from None
