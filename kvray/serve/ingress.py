"""The endpoint before the engines: it forwards what clients say, and knows where a request goes.

A request and its answer pass as they are. Of a body the ingress wants the prompt's tokens alone,
and other processes find them out: nothing heavy runs on its loop.
"""

import asyncio
import json
import logging
import secrets
import time
from contextlib import aclosing
from typing import Any

import ray
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvray.config import load_config
from kvray.errors import KVRayError
from kvray.serve.dispatch import Dispatcher, Prefetcher, RequestError
from kvray.serve.engine import HOP_BY_HOP, Forwarded, Head
from kvray.serve.render import Hint, load_prompts
from kvray.serve.server import engine_of
from kvray.serve.settings import Settings
from kvray.serve.traced import TracedRequests
from kvray.trace.spans import current, fail, is_on, start_sdk, traceparent

_log = logging.getLogger("ray.serve")

_HEADER_BYTES_MAX = 64 << 10
_RENDERED_BYTES_MAX = 4 << 20
"""A longer body goes by load alone."""
_RENDER_S = 0.3
"""How long a request waits for its prompt's tokens; then it goes by load alone."""
_RENDERS_MAX = 32
"""Prompts that wait for one process; while it loads, too."""
_STATE_S = 1.0
"""How long an answer of Serve's about the engines counts."""
_WELL = ("HEALTHY", "UPSCALING", "DOWNSCALING")
"""States of Serve's in which an engine answers, or comes when it is asked."""
_ASKED_S = 0.15
"""How long `/health` waits for Serve."""
_OURS = frozenset((b"date", b"server", b"x-request-id"))
"""Headers of an answer that Serve's proxy sets itself."""
_NOT_SENT = HOP_BY_HOP | {b"content-length", b"expect"}
"""Headers of a request that the connection to an engine has of its own."""


class Renderer:
    """A process that renders prompts; `load_prompts` takes seconds."""

    def __init__(self, settings: Settings, engine: str) -> None:
        self._prompts = None
        try:
            self._prompts = load_prompts(settings, engine=engine)
        except KVRayError as error:
            _log.warning("Requests go by load alone: %s", error)

    def hint(self, path: str, body: bytes) -> Hint | None:
        """See `Prompts.hint`."""
        return None if self._prompts is None else self._prompts.hint(path, body)


class Renderers:
    """The rendering processes of one ingress, on its node; they end with it."""

    def __init__(self, settings: Settings) -> None:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        options: Any = {"num_cpus": 0, "max_restarts": -1, "scheduling_strategy": here}
        made = ray.remote(Renderer).options(**options)
        engine = engine_of(settings)
        self._actors: list[Any] = [made.remote(settings, engine) for _ in range(settings.renderers)]
        self._num_open = [0 for _ in self._actors]

    async def hint(self, path: str, body: bytes) -> Hint | None:
        """Return what is known of the prompt of a request within `_RENDER_S`; None: nothing.

        The process with the least to do is asked; of equal ones always the same for a beginning of
        a conversation, which it has kept.
        """
        num = len(self._actors)
        if not num or not body or len(body) > _RENDERED_BYTES_MAX:
            return None
        first = hash(body[:1024]) % num
        place = min(range(num), key=lambda one: (self._num_open[one], (one - first) % num))
        if self._num_open[place] >= _RENDERS_MAX:
            return None
        asked = asyncio.ensure_future(self._ask(place, path, body))
        await asyncio.wait({asked}, timeout=_RENDER_S)
        return asked.result() if asked.done() else None

    async def _ask(self, place: int, path: str, body: bytes) -> Hint | None:
        self._num_open[place] += 1
        try:
            found: Hint | None = await self._actors[place].hint.remote(path, body)
            return found
        except RayError as error:
            _log.warning("a prompt was not rendered: %r", error)
            return None
        finally:
            self._num_open[place] -= 1


class Ingress:
    """Forwards requests to the engines, and answers what is asked of the endpoint itself."""

    def __init__(self, settings: Settings, engines: DeploymentHandle[Any]) -> None:
        start_sdk(load_config(settings.kvray_config).tracing.startup_hook)
        self._settings = settings
        self._engines = engines
        self._renderers = Renderers(settings)
        self._dispatcher = Dispatcher(
            engines,
            Prefetcher(settings),
            request_timeout_s=settings.request_timeout_s,
            queued_max=settings.queued_max,
        )
        self._state: tuple[float, bool] = float("-inf"), False
        self._asking: asyncio.Task[None] | None = None
        self.registry = CollectorRegistry()
        self._answers = Counter(
            "kvray_ingress_answers", "Answers by status.", ["status"], registry=self.registry
        )
        self._first_s = Histogram(
            "kvray_ingress_first_byte_seconds",
            "From a request's last byte to its answer's first.",
            registry=self.registry,
            buckets=(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60),
        )

    async def health(self) -> bool:
        """Return whether an engine can answer, or comes when it is asked; Serve knows."""
        if time.monotonic() - self._state[0] > _STATE_S:
            if self._asking is None or self._asking.done():
                self._asking = asyncio.ensure_future(self._ask_serve())
            await asyncio.wait({self._asking}, timeout=_ASKED_S)
        return self._state[1]

    async def _ask_serve(self) -> None:
        try:
            status = await asyncio.to_thread(serve.status)
        except (RayError, RayServeException) as error:  # what it said last counts
            _log.warning("Serve does not say how its engines are: %r", error)
            return
        application: Any = status.applications.get(self._engines.app_name)
        found = application and application.deployments.get(self._engines.deployment_name)
        is_well = found and (found.status in _WELL or found.replica_states.get("RUNNING", 0))
        self._state = time.monotonic(), bool(is_well)

    async def forward(self, request: Request, send: Send) -> None:
        """Answer a request by an engine's answer."""
        path = _path_of(request.scope)
        is_begun = is_stream = False
        try:
            asked = await self._asked(request, path)
            began = time.monotonic()
            hint = await self._renderers.hint(path, asked.body)
            if hint is not None:
                current().set_attribute("gen_ai.usage.input_tokens", len(hint.tokens))
            async with aclosing(self._dispatcher.forward(asked, hint)) as answer:
                async for one in answer:
                    if not isinstance(one, Head):
                        await send({"type": "http.response.body", "body": one, "more_body": True})
                        continue
                    headers = [each for each in one.headers if each[0].lower() not in _OURS]
                    is_stream = any(b"text/event-stream" in value for _, value in headers)
                    is_begun = True
                    self._answers.labels(str(one.status)).inc()
                    self._first_s.observe(time.monotonic() - began)
                    start = {"type": "http.response.start", "status": one.status}
                    await send(start | {"headers": headers})
            await send({"type": "http.response.body", "body": b""})
        except RequestError as error:
            fail(current(), error.code)
            told = _told(error, path)
            if not is_begun:
                self._answers.labels(str(error.status)).inc()
                later = {"retry-after": "1"} if error.status == 429 else None
                refusal = JSONResponse(told, error.status, later)
                await refusal(request.scope, request.receive, send)
                return
            if not is_stream:
                raise  # the connection ends before the body does, and clients take it for an error
            kind = b"event: error\n" if path == "/v1/messages" else b""
            line = b"%sdata: %s\n\n" % (kind, json.dumps(told).encode())
            await send({"type": "http.response.body", "body": line})

    async def _asked(self, request: Request, path: str) -> Forwarded:
        """Return a client's request once it is whole.

        Raises:
            RequestError: it is too long, too slow, or for nobody here.
            ClientDisconnect: the client has gone.
        """
        if not any(path == one or path.startswith(f"{one}/") for one in self._settings.paths):
            told = f"Nothing is at {path:.80}; `paths` in the settings has what engines answer."
            raise RequestError(told, status=404, code="not_found")
        raw = request.headers.raw  # their names are in lower case
        if sum(len(key) + len(value) for key, value in raw) > _HEADER_BYTES_MAX:
            told = f"The headers are longer than {_HEADER_BYTES_MAX} bytes; send fewer."
            raise RequestError(told, status=431, code="headers_too_long")
        timeout_s = self._settings.body_timeout_s
        try:
            body = await asyncio.wait_for(self._body(request), timeout_s)
        except asyncio.TimeoutError:
            told = f"The body was not whole after {timeout_s:g} s; send it again."
            raise RequestError(told, status=408, code="timeout") from None
        headers = [one for one in raw if one[0] not in _NOT_SENT]
        names = dict(headers)
        if body or request.method not in ("GET", "HEAD"):
            headers.append((b"content-length", str(len(body)).encode()))
        if b"x-request-id" not in names:
            headers.append((b"x-request-id", secrets.token_hex(16).encode()))
        trace = traceparent()
        if trace or b"traceparent" not in names:
            # What a sampler left out here is in no trace of the engine's either.
            flags = "00" if is_on() else "01"
            trace = trace or f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-{flags}"
            headers = [one for one in headers if one[0] != b"traceparent"]
            headers.append((b"traceparent", trace.encode()))
        query = request.scope.get("query_string", b"").decode("latin-1")
        target = f"{path}?{query}" if query else path
        return Forwarded(request.method, target, headers, body)

    async def _body(self, request: Request) -> bytes:
        """Return the body, of which no more is read than it may have."""
        most, pieces, size = self._settings.body_bytes_max, [], 0
        async for piece in request.stream():
            size += len(piece)
            if size > most:
                told = f"The body is longer than {most} bytes, `body_bytes_max`; send less."
                raise RequestError(told, status=413, code="body_too_long")
            pieces.append(piece)
        return b"".join(pieces)


def _path_of(scope: Scope) -> str:
    """Return a request's path as it came, without the prefix of the application."""
    raw = scope.get("raw_path") or scope["path"].encode()
    return str(raw.decode("latin-1").removeprefix(scope.get("root_path", "")))


def _told(error: RequestError, path: str) -> dict[str, Any]:
    """Return an error as the protocol of a path has it."""
    if path == "/v1/messages":
        kind = "rate_limit_error" if error.status == 429 else "api_error"
        return {"type": "error", "error": {"type": kind, "message": str(error)}}
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    about = {"message": str(error), "type": kind, "param": None, "code": error.code}
    return {"error": about}


def _ingress() -> Ingress:
    found: Any = serve.get_replica_context().servable_object
    return found  # type: ignore[no-any-return]


async def _health(_: Request) -> Response:
    if await _ingress().health():
        return JSONResponse({"status": "ok"})
    told = RequestError("No engine can answer; see `serve status`.", status=503, code="no_engine")
    return JSONResponse(_told(told, ""), 503)


async def _metrics(_: Request) -> Response:
    counts = generate_latest(_ingress().registry)
    return PlainTextResponse(counts, media_type="text/plain; version=0.0.4")


class _Rest:
    """Every other path, as an ASGI application."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _ingress().forward(Request(scope, receive), send)
        except ClientDisconnect:
            return  # before its body was whole


def build() -> Any:
    """Return the ASGI application; `serve.ingress` calls it in the replica."""
    routes = [
        Route("/health", _health),
        Route("/metrics", _metrics),
        Route("/{path:path}", _Rest()),
    ]
    return TracedRequests(Starlette(routes=routes))


Endpoint = serve.ingress(build)(Ingress)
