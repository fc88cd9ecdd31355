"""The note of an engine's rank on what took time for a request, of which its shard makes a span.

The engine's thread makes it, so it is a plain tuple. Pure.
"""

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


_NOTES: TypeAdapter[tuple[SpanNote, ...]] = TypeAdapter(
    Annotated[tuple[SpanNote, ...], Field(max_length=SPAN_NOTES_MAX)]
)


def read_notes(notes: Any) -> tuple[SpanNote, ...]:
    """Return the notes of a report; ConfigError if they are none."""
    try:
        return _NOTES.validate_python(notes)
    except ValidationError:
        raise ConfigError("These are no notes on what took time for requests.") from None
