"""The endpoint before the engines: it forwards what clients say, and knows where a request goes.

A request and its answer pass as they are. Of a body the ingress wants the prompt's tokens alone,
and other processes find them out: nothing heavy runs on its loop.
"""

import asyncio
import json
import logging
import re
import secrets
import time
from contextlib import AbstractContextManager, aclosing, nullcontext
from typing import Any

import h11
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
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from kvray.config import load_config
from kvray.errors import KVRayError
from kvray.serve.dispatch import Dispatcher, RequestError
from kvray.serve.engine import Forwarded, Head, Headers, in_time, request_of
from kvray.serve.render import READERS, Hint, load_prompts
from kvray.serve.server import HOST, engine_of
from kvray.serve.settings import Settings
from kvray.trace import spans

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
_ANTHROPIC = {
    400: "invalid_request_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}
"""Kinds of errors by status, where the protocol is Anthropic's."""
_FLAGS_AT = 53
"""Where the flags of a `traceparent` begin."""
_ORIGIN = re.compile(rb"(?i:https?:)?//([^/?#]*)")


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
        self._actors = [_start_renderer(settings) for _ in range(settings.renderers)]
        self._num_open = [0 for _ in self._actors]

    async def hint(self, path: str, body: bytes) -> Hint | None:
        """Return what is known of the prompt of a request within `_RENDER_S`; None: nothing.

        The process with the least to do is asked; of equal ones always the same for a beginning of
        a conversation, which it has kept.
        """
        num = len(self._actors)
        if not num or path not in READERS or not body or len(body) > _RENDERED_BYTES_MAX:
            return None
        first = hash(body[:1024]) % num
        place = min(range(num), key=lambda one: (self._num_open[one], (one - first) % num))
        if self._num_open[place] >= _RENDERS_MAX:
            return None

        def end(asked: "asyncio.Future[Hint | None]") -> None:
            self._num_open[place] -= 1
            if error := asked.exception():
                _log.warning("a prompt was not rendered: %r", error)

        self._num_open[place] += 1
        asked = asyncio.ensure_future(self._actors[place].hint.remote(path, body))
        asked.add_done_callback(end)
        await asyncio.wait({asked}, timeout=_RENDER_S)
        return asked.result() if asked.done() and not asked.exception() else None


def _start_renderer(settings: Settings) -> Any:
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options: Any = {"num_cpus": 0, "max_restarts": -1, "scheduling_strategy": here}
    return ray.remote(Renderer).options(**options).remote(settings, engine_of(settings))


class Ingress:
    """Forwards requests to the engines, and answers what is asked of the endpoint itself."""

    def __init__(self, settings: Settings, engines: DeploymentHandle[Any]) -> None:
        spans.start_sdk(load_config(settings.kvray_config).tracing.startup_hook)
        self._settings = settings
        self._engines = engines
        self._renderers = Renderers(settings)
        self._dispatcher = Dispatcher(engines, settings)
        self._is_well, self._heard_at = False, float("-inf")
        self._asking: asyncio.Task[None] | None = None
        self._registry = CollectorRegistry()
        self._answers = Counter(
            "kvray_ingress_answers", "Answers by status.", ["status"], registry=self._registry
        )
        self._first_s = Histogram(
            "kvray_ingress_first_byte_seconds",
            "From a request's last byte to its answer's first.",
            registry=self._registry,
            buckets=(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60),
        )

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return what Serve has answer requests, see `serve.ingress`."""
        own = Route("/health", self.health), Route("/metrics", self._metrics)
        return Starlette(routes=[*own, Mount("/", self.forward)])

    async def health(self, _: Request) -> Response:
        """Say whether an engine can answer, or comes when it is asked; Serve knows."""
        if time.monotonic() - self._heard_at > _STATE_S:
            if self._asking is None or self._asking.done():
                self._asking = asyncio.ensure_future(self._ask_serve())
            await asyncio.wait({self._asking}, timeout=_ASKED_S)
        if self._is_well:
            return JSONResponse({"status": "ok"})
        said = "No engine can answer; see `serve status`."
        return _refusal(RequestError(said, status=503, code="no_engine"), "")

    async def _ask_serve(self) -> None:
        try:
            status = await asyncio.to_thread(serve.status)
        except (RayError, RayServeException) as error:  # what it said last counts
            _log.warning("Serve does not say how its engines are: %r", error)
            return
        application: Any = status.applications.get(self._engines.app_name)
        found = application and application.deployments.get(self._engines.deployment_name)
        is_well = found and (found.status in _WELL or found.replica_states.get("RUNNING", 0))
        self._is_well, self._heard_at = bool(is_well), time.monotonic()

    async def _metrics(self, _: Request) -> Response:
        counts = generate_latest(self._registry)
        return PlainTextResponse(counts, media_type="text/plain; version=0.0.4")

    async def forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request by an engine's answer, as an ASGI application."""
        if scope["type"] != "http":
            await WebSocketClose()(scope, receive, send)
            return
        request, path = Request(scope, receive), _path_of(scope)
        with _span(request, path):
            await self._forward(request, path, send)

    async def _forward(self, request: Request, path: str, send: Send) -> None:
        head: Head | None = None
        try:
            asked = await self._asked(request, path)
            began = time.monotonic()
            hint = await self._renderers.hint(path, asked.body)
            if hint is not None:
                spans.current().set_attribute("gen_ai.usage.input_tokens", len(hint.tokens))
            async with aclosing(self._dispatcher.forward(asked, hint)) as answer:
                async for one in answer:
                    if not isinstance(one, Head):
                        await send({"type": "http.response.body", "body": one, "more_body": True})
                        continue
                    head = one
                    self._is_well, self._heard_at = True, time.monotonic()  # an engine answers
                    self._first_s.observe(self._heard_at - began)
                    self._note(one.status)
                    start = {"type": "http.response.start", "status": one.status}
                    await send(start | {"headers": _headers_of(one, request)})
            await send({"type": "http.response.body", "body": b""})
        except ClientDisconnect:  # before its body was whole
            spans.fail(spans.current(), "disconnected")
        except RequestError as error:
            if head is None:
                self._note(error.status)
            spans.fail(spans.current(), error.code)
            if head is None:
                await _refusal(error, path)(request.scope, request.receive, send)
                return
            if not head.is_stream:
                raise  # the connection ends before the body does, and clients take it for an error
            kind = b"event: error\n" if path == "/v1/messages" else b""
            line = b"%sdata: %s\n\n" % (kind, json.dumps(_told(error, path)).encode())
            await send({"type": "http.response.body", "body": line})

    def _note(self, status: int) -> None:
        self._answers.labels(str(status)).inc()
        spans.current().set_attribute("http.response.status_code", status)
        if status >= 500:
            spans.fail(spans.current(), str(status))

    async def _asked(self, request: Request, path: str) -> Forwarded:
        """Return a client's request once it is whole.

        Raises:
            RequestError: it is too long, too slow, no HTTP, or for nobody here.
            ClientDisconnect: the client has gone.
        """
        paths = (one.rstrip("/") for one in self._settings.paths)
        if not any(f"{path}/".startswith(f"{one}/") for one in paths):
            told = f"Nothing is at {path:.80}; `paths` in the settings has what engines answer."
            raise RequestError(told, status=404, code="not_found")
        headers = list(request.headers.raw)  # their names are in lower case
        if sum(len(key) + len(value) for key, value in headers) > _HEADER_BYTES_MAX:
            told = f"The headers are longer than {_HEADER_BYTES_MAX} bytes; send fewer."
            raise RequestError(told, status=431, code="headers_too_long")
        timeout_s = self._settings.body_timeout_s
        try:
            body = await in_time(self._body(request), timeout_s)
        except asyncio.TimeoutError:
            told = f"The body was not whole after {timeout_s:g} s; send it again."
            raise RequestError(told, status=408, code="timeout") from None
        caller = request.headers.get("traceparent", "")
        # What a sampler left out here is in no trace of the engine's either.
        new = f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-{'00' if spans.is_on() else '01'}"
        trace = spans.traceparent() or caller or new
        if trace.split("-")[:2] == caller.split("-")[:2]:
            trace = trace[:_FLAGS_AT] + caller[_FLAGS_AT:]  # whether it is sampled is the caller's
        headers = [one for one in headers if one[0] != b"traceparent"]
        headers.append((b"traceparent", trace.encode("latin-1")))
        query = request.scope.get("query_string", b"").decode("latin-1")
        target = f"{path}?{query}" if query else path
        asked = Forwarded(request.method, target, headers, body)
        try:
            request_of(asked)
        except h11.LocalProtocolError as error:  # as Serve's proxy lets pass
            told = f"It is no request of HTTP ({error}); correct it."
            raise RequestError(told, status=400, code="bad_request") from None
        return asked

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


def _span(request: Request, path: str) -> AbstractContextManager[Any]:
    """Return the span of a request that asks for an answer, to its last byte.

    Nothing of a prompt or of an answer is in it but their lengths.
    """
    if path not in READERS or not spans.is_on():
        return nullcontext()
    about = {
        "gen_ai.operation.name": "text_completion" if path == "/v1/completions" else "chat",
        "gen_ai.provider.name": "kvray",
        "http.request.method": request.method,
        "http.route": path,
    }
    return spans.request("ingress", dict(request.headers), about)


def _headers_of(head: Head, request: Request) -> Headers:
    """Return the headers that a client gets of an engine's answer."""
    return [
        (name, _location(value, request) if name.lower() == b"location" else value)
        for name, value in head.headers
        if name.lower() not in _OURS
    ]


def _location(target: bytes, request: Request) -> bytes:
    """Return where a redirect leads the client: one within the engine's server, to the same here.

    Servers write their own address there, or the client's `Host`, and know of no prefix.
    """
    if origin := _ORIGIN.match(target):
        host = origin[1].decode("latin-1")
        is_here = host == request.headers.get("host") or host.partition(":")[0] == HOST
        path = target[origin.end() :]
    else:
        is_here, path = target.startswith(b"/"), target
    root: str = request.scope.get("root_path", "")
    return root.encode() + b"/" + path.lstrip(b"/") if is_here else target


def _refusal(error: RequestError, path: str) -> Response:
    later = {"retry-after": "1"} if error.status == 429 else None
    return JSONResponse(_told(error, path), error.status, later)


def _told(error: RequestError, path: str) -> dict[str, Any]:
    """Return an error as the protocol of a path has it."""
    if path == "/v1/messages":
        kind = _ANTHROPIC.get(error.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": str(error)}}
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    about = {"message": str(error), "type": kind, "param": None, "code": error.code}
    return {"error": about}
