"""What the endpoint tells OpenTelemetry of a request: the first span of its trace.

Names are of OpenTelemetry's conventions for generative AI where it has one. Nothing of a prompt or
of an answer is among them but their lengths.
"""

import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Any, TypeAlias

from opentelemetry.trace import Span, StatusCode
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvray.serve.protocol import RequestError
from kvray.trace import spans

Event: TypeAlias = dict[str, Any]

_OPERATIONS = {"/v1/completions": "text_completion", "/v1/chat/completions": "chat"}
_FAULT = 500  # status from which on the server is to blame


class TracedRequests:
    """An ASGI middleware: the span `ingress` around each request that asks for an answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, until the last byte of a stream."""
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        operation = _OPERATIONS.get(path)
        if operation is None or not spans.is_on():
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): one.decode("latin-1") for name, one in scope["headers"]}
        about = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "kvray",
            "http.request.method": scope["method"],
            "http.route": path,
        }
        with spans.request("ingress", headers, about) as made:
            is_whole = False

            async def tell(message: Message) -> None:
                nonlocal is_whole
                if message["type"] == "http.response.start":
                    made.set_attribute("http.response.status_code", message["status"])
                    if message["status"] >= _FAULT:
                        made.set_status(StatusCode.ERROR)
                else:
                    is_whole = not message.get("more_body", False)
                await send(message)

            await self._app(scope, receive, tell)
            if not is_whole:
                spans.fail(made, "disconnected")


class AnswerSpan:
    """Tells a request's span how its answer goes."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self._began = time.monotonic()
        self._num_tokens = 0

    async def along(self, events: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
        """Yield the events of the answer, and tell of each."""
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    self._tell(event)
                    yield event
        except RequestError as error:
            spans.fail(self._span, error.code or "refused")
            raise
        finally:
            if self._span.is_recording():  # an answer may be left after its request
                self._span.set_attribute("gen_ai.usage.output_tokens", self._num_tokens)

    def _tell(self, event: Event) -> None:
        if "engine" in event:
            self._span.set_attribute("kvray.replica", event["engine"])
            self._span.add_event("taken")
        elif "tokens" in event:
            if not self._num_tokens:
                first_s = time.monotonic() - self._began
                self._span.set_attribute("gen_ai.response.time_to_first_chunk", first_s)
                self._span.add_event("first token")
            self._num_tokens += len(event["tokens"])
        else:
            self._span.set_attribute("gen_ai.response.finish_reasons", (event["finish_reason"],))
            cached, by_source = event["cached_tokens"], event.get("cached_tokens_by_source", {})
            self._span.set_attribute("gen_ai.usage.cache_read.input_tokens", cached)
            for source, count in by_source.items():
                self._span.set_attribute(f"kvray.tokens.{source}", count)
