"""Text to tokens and back: prompts by the checkpoint's chat template, answers piece by piece."""

import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from kvray.reference.tokenizer import ByteTokenizer, CheckpointTokenizer, import_transformers
from kvray.serve.protocol import RequestError, Writer
from kvray.serve.settings import Settings
from kvray.serve.traced import Event

_CONTEXT_TOKENS = 6
"""Of the prompt's end: some tokenizers write a word otherwise at the head of a text."""
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"

Message = dict[str, str]


class Prompts:
    """The tokenizer of the served model."""

    def __init__(self, tokenizer: ByteTokenizer | CheckpointTokenizer, template: Any) -> None:
        """Use `template`, transformers' tokenizer, for chats; None: there is no chat template."""
        self._tokenizer = tokenizer
        self._template = template

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text that is to be completed."""
        return self._tokenizer.encode(text)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of a chat, up to where the assistant begins to speak.

        A model without a template of its own, which was trained for no chat, is given one line
        `role: content` for each message.
        """
        if self._template is not None:
            text = self._template.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
        else:
            lines = [f"{message['role']}: {message['content']}\n" for message in messages]
            text = "".join([*lines, "assistant:"])
        return self._tokenizer.encode(text)

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of tokens; bytes that are no text as replacement characters."""
        text = self._tokenizer.decode(token_ids)
        return text.encode(errors="surrogateescape").decode(errors="replace")


def load_prompts(settings: Settings) -> Prompts:
    """Return the tokenizer that belongs to the engine's model."""
    if settings.is_tiny:
        return Prompts(ByteTokenizer(), None)
    name = settings.model
    if name == "smollm2":
        from kvray.reference.checkpoint import find_smollm2

        name = str(find_smollm2())
    tokenizer = import_transformers().AutoTokenizer.from_pretrained(name)
    has_template = getattr(tokenizer, "chat_template", None) is not None
    return Prompts(CheckpointTokenizer(tokenizer), tokenizer if has_template else None)


class Answer:
    """An answer's text as its tokens come; the pieces are the same text whatever their number."""

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        prompt: Sequence[int],
        stop: Sequence[str] = (),
    ) -> None:
        """Begin after `prompt`; a text of `stop` ends the answer and is no part of it."""
        self.is_stopped = False
        self.num_tokens = 0
        self._decode = decode
        self._stop = [text for text in stop if text]
        self._tokens = list(prompt[-_CONTEXT_TOKENS:])
        self._start, self._shown = 0, len(self._tokens)
        self._held = ""

    def add(self, tokens: Sequence[int]) -> str:
        """Return the text that is certain now: no part of a character, and of no stop text."""
        pieces = []
        for token in tokens:
            if not self.is_stopped:
                self.num_tokens += 1
                self._tokens.append(token)
                pieces.append(self._release(self._new_text(is_last=False), is_last=False))
        return "".join(pieces)

    def finish(self) -> str:
        """Return what was held back; the answer has ended."""
        return "" if self.is_stopped else self._release(self._new_text(is_last=True), is_last=True)

    def _new_text(self, *, is_last: bool) -> str:
        """Return what the tokens since the last piece add to the text."""
        before = self._decode(self._tokens[self._start : self._shown])
        text = self._decode(self._tokens[self._start :])
        if not is_last and text.endswith(_INCOMPLETE):
            return ""
        self._start, self._shown = self._shown, len(self._tokens)
        return text[len(before) :]

    def _release(self, new: str, *, is_last: bool) -> str:
        text, self._held = self._held + new, ""
        ends = [end for stop in self._stop if (end := text.find(stop)) >= 0]
        if ends:
            self.is_stopped = True
            return text[: min(ends)]
        if not is_last:
            held = max((_overlap(text, stop) for stop in self._stop), default=0)
            text, self._held = text[: len(text) - held], text[len(text) - held :]
        return text


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` may be the beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if stop.startswith(text[-size:])), 0)


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
