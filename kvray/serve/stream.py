"""An answer's events as pieces of text, and those as the events of a stream."""

import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from kvray.serve.protocol import RequestError, Writer
from kvray.serve.text import Answer
from kvray.serve.traced import Event


class Piece(NamedTuple):
    """A piece of an answer's text; the last has how the answer ended."""

    text: str
    ending: Mapping[str, Any] = MappingProxyType({})


async def pieces_of(
    first: Event, events: AsyncGenerator[Event, None], answer: Answer
) -> AsyncGenerator[Piece, None]:
    """Yield the answer's text in pieces, the last with how it ended."""
    event = first
    async with contextlib.aclosing(events):
        while "finish_reason" not in event:
            text = answer.add(event["tokens"])
            if answer.is_stopped:
                yield Piece(text, {"finish_reason": "stop"})
                return
            if text:
                yield Piece(text)
            event = await anext(events)
    yield Piece(answer.finish(), event)


async def lines_of(
    pieces: AsyncGenerator[Piece, None],
    writer: Writer,
    count: Callable[[Mapping[str, Any]], dict[str, Any]],
    *,
    wants_usage: bool,
) -> AsyncIterator[str]:
    """Yield the events of a stream; what goes wrong now is one of them."""
    for chunk in writer.opening():
        yield _line(chunk)
    try:
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                if piece.text:
                    yield _line(writer.chunk(piece.text))
    except RequestError as error:
        yield _line(error.body())
        return
    yield _line(writer.chunk("", piece.ending["finish_reason"]))
    if wants_usage:
        yield _line(writer.usage_chunk(count(piece.ending)))
    yield "data: [DONE]\n\n"


def _line(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"
