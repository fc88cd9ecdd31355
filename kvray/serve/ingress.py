"""The OpenAI-compatible endpoint in front of the engines."""

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.exceptions import HTTPException

from kvray.config import load_config
from kvray.serve.dispatch import Dispatcher, GenerateArgs, Prefetcher
from kvray.serve.protocol import (
    ChatRequest,
    ChatWriter,
    CompletionRequest,
    RequestError,
    Writer,
    describe_model,
    usage,
)
from kvray.serve.settings import Settings
from kvray.serve.text import Answer, lines_of, load_prompts, pieces_of
from kvray.serve.traced import TracedRequests
from kvray.trace.spans import current, start_sdk

REPLICA_HEADER = "x-kvray-replica"
"""In an answer: the engine that gave it, by its name in kvray."""
ROUTE_HEADER = "x-kvray-route"
"""In an answer: why that engine was chosen, one of `routing.choice.REASONS`."""

_Text = TypeVar("_Text")

# Serve copies the application as it is where `serve.ingress` stands: what it uses comes before.
# FastAPI's own telemetry would quote prompts that it refuses.
app = FastAPI(title="kvray behind Ray Serve", telemetry={"tracing": False, "logs": False})
app.add_middleware(TracedRequests)


@app.exception_handler(RequestError)
async def _refuse(_: object, error: RequestError) -> JSONResponse:
    return JSONResponse(error.body(), error.status)


@app.exception_handler(RequestValidationError)
async def _refuse_form(_: object, error: RequestValidationError) -> JSONResponse:
    first = error.errors()[0]
    param = ".".join(str(part) for part in first["loc"][1:]) or None
    message = str(first["msg"]).removeprefix("Value error, ")
    return await _refuse(None, RequestError(message, param=param))


@app.exception_handler(HTTPException)
async def _refuse_path(_: object, error: HTTPException) -> JSONResponse:
    return await _refuse(None, RequestError(str(error.detail), status=error.status_code))


@app.exception_handler(Exception)
async def _fail(_: object, error: Exception) -> JSONResponse:
    # Starlette raises it again once this is sent, so that Serve logs it.
    told = f"A defect ended this request ({type(error).__name__}); see the log of the Ingress."
    return await _refuse(None, RequestError(told, status=500))


@serve.ingress(app)
class Ingress:
    """Tokenizes prompts, hands them to the engines, and writes the answers."""

    def __init__(self, settings: Settings, engines: DeploymentHandle[Any]) -> None:
        start_sdk(load_config(settings.kvray_config).tracing.startup_hook)
        self._name = settings.served_name
        self._created = int(time.time())
        self._prompts = load_prompts(settings)
        # A long prompt takes a while, and the streams of all others go on meanwhile.
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="kvray-tokenize")
        self._dispatcher = Dispatcher(
            engines, Prefetcher(settings), request_timeout_s=settings.request_timeout_s
        )

    @app.get("/health")
    async def health(self) -> dict[str, str]:
        """Say that an engine can answer; status 503 while none can."""
        if not await self._dispatcher.can_answer():
            raise RequestError("No engine can answer; see `serve status`.", status=503)
        return {"status": "ok"}

    @app.get("/v1/models")
    async def models(self) -> dict[str, Any]:
        """List the one model."""
        return {"object": "list", "data": [describe_model(self._name, self._created)]}

    @app.get("/v1/models/{name:path}")
    async def model(self, name: str) -> dict[str, Any]:
        """Describe the model."""
        self._check_model(name)
        return describe_model(self._name, self._created)

    @app.post("/v1/completions")
    async def complete(self, asked: CompletionRequest) -> Any:
        """Go on with a text or with tokens."""
        self._check_model(asked.model)
        prompt = asked.prompt
        if isinstance(prompt, str):
            prompt = await self._tokenized(self._prompts.encode, prompt)
        writer = Writer(self._name)
        return await self._respond(asked, prompt, asked.max_tokens, writer)

    @app.post("/v1/chat/completions")
    async def chat(self, asked: ChatRequest) -> Any:
        """Answer a chat."""
        self._check_model(asked.model)
        messages = [message.plain() for message in asked.messages]
        tokens = await self._tokenized(self._prompts.encode_chat, messages)
        writer = ChatWriter(self._name)
        return await self._respond(asked, tokens, asked.limit, writer)

    async def _tokenized(self, encode: Callable[[_Text], list[int]], text: _Text) -> list[int]:
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, encode, text)

    def _check_model(self, name: str) -> None:
        if name != self._name:
            raise RequestError(
                f"The model {name!r:.80} does not exist; this server has {self._name!r}.",
                status=404,
                code="model_not_found",
                param="model",
            )

    async def _respond(
        self,
        asked: CompletionRequest | ChatRequest,
        tokens: list[int],
        max_tokens: int,
        writer: Writer,
    ) -> Any:
        """Return the answer, or the beginning of a stream, once an engine has taken the request."""
        if not tokens:
            raise RequestError("The prompt is empty.", param="prompt")
        current().set_attributes(
            {
                "gen_ai.request.model": self._name,
                "gen_ai.request.max_tokens": max_tokens,
                "gen_ai.request.stream": bool(asked.stream),
                "gen_ai.usage.input_tokens": len(tokens),
            }
        )
        answer = Answer(self._prompts.decode, tokens, asked.stop_texts)
        events = self._dispatcher.answer(GenerateArgs(tokens, max_tokens, asked.cache_salt))
        taken = await anext(events)
        headers = {REPLICA_HEADER: taken["engine"], ROUTE_HEADER: taken["route"]}
        first = await anext(events)  # so that what the engine refuses has a status of its own
        pieces = pieces_of(first, events, answer)

        def count(ending: Mapping[str, Any]) -> dict[str, Any]:
            cached, by_source = map(ending.get, ("cached_tokens", "cached_tokens_by_source"))
            return usage(len(tokens), answer.num_tokens, cached, by_source)

        if asked.stream:
            lines = lines_of(pieces, writer, count, wants_usage=asked.wants_usage)
            return StreamingResponse(lines, media_type="text/event-stream", headers=headers)
        every = [piece async for piece in pieces]
        text, ending = "".join(piece.text for piece in every), every[-1].ending
        whole = writer.whole(text, ending["finish_reason"], count(ending))
        return JSONResponse(whole, headers=headers)
