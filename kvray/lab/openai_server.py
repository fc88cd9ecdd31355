"""A small OpenAI server of the reference engine: `kvray.serve`'s default where there is no GPU.

It answers greedily, and says in a sentence what it does not do. `trtllm-serve` and `vllm serve` are
the real thing; this one has their paths: chat, completions, models, health and KV events.
"""

import argparse
import asyncio
import codecs
import contextlib
import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Annotated, Any, Literal

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from starlette.exceptions import HTTPException

from kvray.errors import ConfigError, KVRayError
from kvray.reference.engine import ReferenceEngine
from kvray.reference.engine_options import KvConnectorConfig
from kvray.reference.output import Call, Output
from kvray.serve.render import Prompts, load_prompts
from kvray.serve.settings import Settings

_NEUTRAL: dict[str, Any] = {
    "best_of": 1,
    "temperature": 0,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
    "logprobs": False,
    "top_logprobs": 0,
    "echo": False,
    "suffix": "",
    "tools": [],
    "tool_choice": "none",
    "response_format": {"type": "text"},
}
"""What may be asked for because it changes nothing in a greedy answer. Anything else is refused: an
answer that is not what was asked for is worse than none."""
_WITHOUT_EFFECT = frozenset(
    ("top_p", "seed", "user", "metadata", "store", "parallel_tool_calls", "prompt_cache_key")
)
_PROMPTS_MAX = 64


class _Asked(BaseModel):
    """What both kinds of request have."""

    model_config = ConfigDict(extra="allow")

    model: str
    n: int = Field(default=1, ge=1, le=16)
    stop: str | Annotated[list[str], Field(max_length=4)] | None = None
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    cache_salt: str | None = Field(default=None, min_length=1, max_length=1024)

    @model_validator(mode="after")
    def _refuse_what_is_not_done(self) -> "_Asked":
        for name, value in (self.model_extra or {}).items():
            if value is None or name in _WITHOUT_EFFECT or value == _NEUTRAL.get(name):
                continue
            if name in _NEUTRAL:
                raise ValueError(
                    f"{name}={value!r:.80} is not supported: the reference engine samples greedily,"
                    " text alone; leave it out."
                )
            raise ValueError(f"there is no argument {name!r:.80} here; leave it out.")
        return self

    @property
    def stops(self) -> list[str]:
        """The texts that end the answer."""
        asked = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [one for one in asked if one]


def _several(prompt: Any) -> Any:
    """Return a list of prompts; token ids are one prompt."""
    is_one = isinstance(prompt, str) or (prompt and all(isinstance(item, int) for item in prompt))
    return [prompt] if is_one else prompt


class CompletionRequest(_Asked):
    """The body of /v1/completions."""

    prompt: Annotated[
        list[str | list[int]],
        BeforeValidator(_several),
        Field(min_length=1, max_length=_PROMPTS_MAX),
    ]
    max_tokens: int | None = Field(default=None, ge=1)


class TextPart(BaseModel):
    """A piece of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] | None = None


class ChatRequest(_Asked):
    """The body of /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)


class Refused(Exception):
    """An answer with an error's status, in OpenAI's form."""

    def __init__(self, message: str, status: int = 400, *, code: str = "", param: str = "") -> None:
        super().__init__(message)
        self.status = status
        kind = "invalid_request_error" if status < 500 else "server_error"
        told = {"message": message, "type": kind, "param": param or None, "code": code or None}
        self.body = {"error": told}


class Text:
    """An answer's text as its tokens come: never more than one character is held back.

    But for what may begin a stop text. The pieces are the same text whatever their number.
    """

    def __init__(self, engine: ReferenceEngine, stops: Sequence[str]) -> None:
        self.is_stopped = False
        self.num_tokens = 0
        self._bytes_of = engine.tokenizer.bytes_of
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        self._stops = stops
        self._held = ""

    def add(self, tokens: Sequence[int]) -> str:
        """Return the text that is certain now."""
        pieces = []
        for token in tokens:
            if self.is_stopped:
                break
            self.num_tokens += 1
            pieces.append(self._release(self._decode(self._bytes_of(token)), is_last=False))
        return "".join(pieces)

    def finish(self) -> str:
        """Return what was held back; the answer has ended."""
        return "" if self.is_stopped else self._release(self._decode(b"", final=True), is_last=True)

    def _release(self, new: str, *, is_last: bool) -> str:
        text, self._held = self._held + new, ""
        ends = [end for stop in self._stops if (end := text.find(stop)) >= 0]
        if ends:
            self.is_stopped = True
            return text[: min(ends)]
        held = 0 if is_last else max((_overlap(text, stop) for stop in self._stops), default=0)
        text, self._held = text[: len(text) - held], text[len(text) - held :]
        return text


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` may be the beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if stop.startswith(text[-size:])), 0)


class Answer:
    """One choice of an answer: its pieces as they come, and how it ended."""

    def __init__(self, engine: ReferenceEngine, index: int, stops: Sequence[str]) -> None:
        self.index = index
        self.text = Text(engine, stops)
        self.finish_reason = "stop"
        self.output: Output | None = None
        self._engine = engine
        self._heard: asyncio.Queue[list[int] | None] = asyncio.Queue()
        self._call: Call | None = None

    async def pieces(
        self, tokens: list[int], max_tokens: int, salt: str | None
    ) -> AsyncGenerator[str, None]:
        """Have the engine answer; yield the text, empty once it has begun.

        Refused: the engine cannot do what is asked.
        """
        loop = asyncio.get_running_loop()

        def hear(new: list[int] | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended; nobody listens
                loop.call_soon_threadsafe(self._heard.put_nowait, new)

        def end(_: Future[Output]) -> None:
            hear(None)

        try:
            self._call = self._engine.submit(
                tokens, max_tokens=max_tokens, salt=salt, listener=hear
            )
            self._call.future.add_done_callback(end)
            yield ""
            while not self.text.is_stopped and (new := await self._heard.get()) is not None:
                if text := self.text.add(new):
                    yield text
            if not self.text.is_stopped:
                self.output = self._call.result(0)
                self.finish_reason = self.output.finish_reason
                if text := self.text.finish():
                    yield text
        except ConfigError as error:
            raise Refused(str(error)) from None
        except KVRayError as error:
            raise Refused(str(error), 500) from None
        finally:
            if self._call is not None and not self._call.future.done():
                self._engine.cancel(self._call)


class Writer:
    """Writes the answers of one request: whole, or as the chunks of a stream."""

    def __init__(self, model: str, *, is_chat: bool) -> None:
        self._is_chat = is_chat
        name = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._head = {"id": name, "created": int(time.time()), "model": model}

    def whole(
        self, choices: Sequence[tuple[Answer, str]], used: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the answer of a request that is no stream."""
        made = [
            {"index": one.index, **self._said(text), "finish_reason": one.finish_reason}
            for one, text in choices
        ]
        kind = "chat.completion" if self._is_chat else "text_completion"
        return {**self._head, "object": kind, "choices": made, "usage": used}

    def chunk(self, choices: Sequence[Mapping[str, Any]], **more: Any) -> str:
        """Return an event of a stream."""
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        return _event({**self._head, "object": kind, "choices": list(choices), **more})

    def opening(self, index: int) -> str:
        """Return the event that says who speaks; empty if it goes without saying."""
        if not self._is_chat:
            return ""
        delta = {"role": "assistant", "content": ""}
        return self.chunk([{"index": index, "delta": delta, "finish_reason": None}])

    def piece(self, index: int, text: str, finish_reason: str | None = None) -> str:
        """Return the event of a text, or of the end."""
        said = {"delta": {"content": text} if text else {}} if self._is_chat else {"text": text}
        return self.chunk([{"index": index, **said, "finish_reason": finish_reason}])

    def _said(self, text: str) -> dict[str, Any]:
        if self._is_chat:
            return {"message": {"role": "assistant", "content": text}}
        return {"text": text}


def _event(content: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


def _usage(prompts: Sequence[Sequence[int]], answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the counts; without those of the cache if a stop text ended the engine's answer."""
    prompt, completion = sum(map(len, prompts)), sum(one.text.num_tokens for one in answers)
    used: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    firsts = [one.output for one in answers[:: len(answers) // len(prompts)]]
    outputs = [one for one in firsts if one is not None]
    if len(outputs) == len(prompts):
        pool = sum(one.reused_tokens for one in outputs)
        tier = sum(one.hit_tokens for one in outputs)
        by_source = {"pool": pool, "tier": tier}
        used["prompt_tokens_details"] = {
            "cached_tokens": pool + tier,
            "cached_tokens_by_source": by_source,
        }
    return used


class Server:
    """The paths of one engine."""

    def __init__(self, engine: ReferenceEngine, prompts: Prompts, name: str) -> None:
        self._engine = engine
        self._prompts = prompts
        self._name = name
        self._created = int(time.time())
        self._rendering = asyncio.Lock()  # what is kept of texts is not safe for several threads

    def application(self) -> FastAPI:
        """Return the ASGI application."""
        # FastAPI's own telemetry would quote prompts that it refuses.
        app = FastAPI(title="kvray's reference engine", telemetry={"tracing": False, "logs": False})
        app.get("/health")(self.health)
        app.get("/v1/models")(self.models)
        app.get("/v1/models/{name:path}")(self.model)
        app.post("/v1/completions")(self.complete)
        app.post("/v1/chat/completions")(self.chat)
        app.post("/kv_cache_events")(self.events)
        app.exception_handler(Refused)(_refuse)
        app.exception_handler(RequestValidationError)(_refuse_form)
        app.exception_handler(HTTPException)(_refuse_path)
        return app

    async def health(self) -> dict[str, str]:
        """Say that the engine lives."""
        if self._engine.failure is not None:
            raise Refused(f"The engine has ended ({self._engine.failure!r}).", 503)
        return {"status": "ok"}

    async def models(self) -> dict[str, Any]:
        """List the one model."""
        return {"object": "list", "data": [await self.model(self._name)]}

    async def model(self, name: str) -> dict[str, Any]:
        """Describe the model."""
        self._check_model(name)
        return {"id": name, "object": "model", "created": self._created, "owned_by": "kvray"}

    async def events(self) -> list[Any]:
        """Return the events of the pool since the last call."""
        return self._engine.get_kv_cache_events()

    async def complete(self, asked: CompletionRequest, request: Request) -> Any:
        """Go on with texts or with tokens."""
        self._check_model(asked.model)
        render = self._prompts.completion
        try:
            prompts = [await self._render(render, {"prompt": one}) for one in asked.prompt]
        except UnicodeError as error:
            raise Refused(f"The prompt is no text: {error}", param="prompt") from None
        return await self._respond(
            asked, prompts, asked.max_tokens or 16, is_chat=False, request=request
        )

    async def chat(self, asked: ChatRequest, request: Request) -> Any:
        """Answer a chat."""
        self._check_model(asked.model)
        body = {"messages": [one.model_dump() for one in asked.messages]}
        try:
            tokens = await self._render(self._prompts.chat, body)
        except Exception as error:  # noqa: BLE001 - what the checkpoint's own template raises
            raise Refused(f"The chat template refuses this: {error}", param="messages") from None
        limit = asked.max_completion_tokens or asked.max_tokens or 256
        return await self._respond(asked, [tokens], limit, is_chat=True, request=request)

    async def _render(self, render: Callable[[Any], Any], body: dict[str, Any]) -> Any:
        async with self._rendering:
            return await asyncio.to_thread(render, body)  # a long text keeps no stream waiting

    def _check_model(self, name: str) -> None:
        if name != self._name:
            raise Refused(
                f"The model {name!r:.80} does not exist; this server has {self._name!r}.",
                404,
                code="model_not_found",
                param="model",
            )

    async def _respond(
        self,
        asked: _Asked,
        prompts: Sequence[Any],
        max_tokens: int,
        *,
        is_chat: bool,
        request: Request,
    ) -> Any:
        """Return the answer, or the beginning of a stream, once the engine has the request."""
        prompts = [[int(token) for token in one] for one in prompts]
        answers = [Answer(self._engine, at, asked.stops) for at in range(len(prompts) * asked.n)]
        streams = [
            one.pieces(prompts[one.index // asked.n], max_tokens, asked.cache_salt)
            for one in answers
        ]
        try:
            for stream in streams:  # so that what the engine refuses has a status of its own
                await anext(stream)
        except Refused:
            for stream in streams:
                await stream.aclose()
            raise
        writer = Writer(self._name, is_chat=is_chat)
        if asked.stream:
            wants_usage = bool((asked.stream_options or {}).get("include_usage"))
            lines = _lines(writer, answers, streams, prompts if wants_usage else None)
            return StreamingResponse(lines, media_type="text/event-stream")
        whole: asyncio.Future[list[str]] = asyncio.gather(*map(_whole, streams))
        # The body is read: what comes now is that the client has left.
        gone: asyncio.Future[Any] = asyncio.ensure_future(request.receive())
        await asyncio.wait([whole, gone], return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not whole.done():
            whole.cancel()
            await asyncio.gather(whole, return_exceptions=True)
            return JSONResponse(None, 499)
        texts = await whole
        used = _usage(prompts, answers)
        return JSONResponse(writer.whole([*zip(answers, texts, strict=True)], used))


async def _whole(pieces: AsyncGenerator[str, None]) -> str:
    return "".join([piece async for piece in pieces])


async def _lines(
    writer: Writer,
    answers: Sequence[Answer],
    streams: Sequence[AsyncGenerator[str, None]],
    prompts: Sequence[Sequence[int]] | None,
) -> AsyncIterator[str]:
    """Yield the events of a stream; what goes wrong now is one of them."""
    lines: asyncio.Queue[str | None] = asyncio.Queue()

    async def write(answer: Answer, pieces: AsyncGenerator[str, None]) -> None:
        try:
            async with contextlib.aclosing(pieces):
                lines.put_nowait(writer.opening(answer.index))
                async for text in pieces:
                    lines.put_nowait(writer.piece(answer.index, text))
            lines.put_nowait(writer.piece(answer.index, "", answer.finish_reason))
        except Refused as error:
            lines.put_nowait(_event(error.body))
        finally:
            lines.put_nowait(None)

    tasks = [asyncio.ensure_future(write(*one)) for one in zip(answers, streams, strict=True)]
    try:
        num_left = len(tasks)
        while num_left:
            line = await lines.get()
            num_left -= line is None
            if line:
                yield line
        if prompts is not None:
            yield writer.chunk([], usage=_usage(prompts, answers))
        yield "data: [DONE]\n\n"
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _refuse(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, Refused)
    return JSONResponse(error.body, error.status)


async def _refuse_form(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param = ".".join(str(part) for part in first["loc"][1:])
    message = str(first["msg"]).removeprefix("Value error, ")
    return await _refuse(request, Refused(message, param=param))


async def _refuse_path(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return await _refuse(request, Refused(str(error.detail), error.status_code))


def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--options", type=json.loads, default={}, help="of the engine, as JSON")
    asked = parser.parse_args()
    options = dict(asked.options)
    name = options.pop("served_name", None) or options.get("model", "smollm2")
    if options.pop("connector", False):
        options["connector"] = KvConnectorConfig()
    prompts = load_prompts(Settings(model=options.get("model", "smollm2")), engine="reference")
    with ReferenceEngine(**options) as engine:
        app = Server(engine, prompts, name).application()
        uvicorn.run(app, host=asked.host, port=asked.port, log_level="warning")


if __name__ == "__main__":
    main()
