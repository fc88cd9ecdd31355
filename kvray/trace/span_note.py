"""The note of an engine's rank on what took time for a request, of which its shard makes a span.

The engine's thread makes it, so it is a plain tuple. Pure.
"""

import contextlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError

from kvray.errors import ConfigError
from kvray.identity.block import KEY_BYTES

SPAN_NOTES_MAX = 1000  # notes in one report of a rank

_Text = Annotated[str, Field(max_length=64)]
_Time = Annotated[float, Field(ge=0, lt=2**33, allow_inf_nan=False)]


class SpanNote(NamedTuple):
    """What took time, from `began` to `ended` in seconds since the epoch."""

    name: Literal["promise", "load"]
    request_id: Annotated[int, Field(ge=0, lt=2**63)]
    began: _Time
    ended: _Time
    attributes: Annotated[
        Mapping[_Text, Annotated[int, Field(lt=2**63)] | float | _Text], Field(max_length=16)
    ]
    key: Annotated[bytes, Field(max_length=KEY_BYTES)] = b""
    """Of a promise: the last key that could be promised, by which the prompt is known."""
    error: _Text = ""
    """The class of what went wrong."""


_NOTE = TypeAdapter(SpanNote)


def read_notes(notes: Any) -> list[SpanNote]:
    """Return the valid ones of a report's notes; ConfigError if they are no notes at all."""
    if not isinstance(notes, list | tuple) or len(notes) > SPAN_NOTES_MAX:
        raise ConfigError(f"Notes on what took time are a list of at most {SPAN_NOTES_MAX}.")
    found = []
    for note in notes:
        with contextlib.suppress(ValidationError):
            found.append(_NOTE.validate_python(note))
    return found
