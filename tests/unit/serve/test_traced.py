"""The span of a request at the endpoint, from its header to its last byte."""

import asyncio
from typing import Any

import pytest

pytest.importorskip("ray.serve")
pytest.importorskip("openai")

from opentelemetry.trace import StatusCode
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient
from starlette.types import ASGIApp

from kvray.serve.dispatch import RequestError
from kvray.serve.traced import TracedRequests
from kvray.trace import spans
from tests.unit.serve.test_dispatch import ASKED, HEAD, HINT, Handle, dispatcher, whole
from tests.unit.tracing import CALLER, TRACEPARENT, id_of, parent_of, sdk

__all__ = ["sdk"]

HEADERS = {"traceparent": TRACEPARENT}


def app_with(handle: Any) -> ASGIApp:
    """Return an endpoint whose answers are those of a handle."""
    forward = dispatcher(handle).forward

    async def chat(_: Request) -> Response:
        pieces = forward(ASKED, HINT)
        await anext(pieces)
        return StreamingResponse(pieces)

    async def complete(_: Request) -> Response:
        try:
            return Response(b"".join([one async for one in forward(ASKED, HINT)][1:]))
        except RequestError as error:
            spans.fail(spans.current(), error.code)
            return Response(str(error), error.status)

    async def models(_: Request) -> Response:
        return JSONResponse([])

    routes = [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", complete, methods=["POST"]),
        Route("/v1/models", models),
    ]
    return Starlette(routes=routes, middleware=[Middleware(TracedRequests)])


def post(app: ASGIApp, path: str = "/v1/chat/completions") -> int:
    return TestClient(app).post(path, headers=HEADERS).status_code


def test_a_streams_span_lasts_to_its_end_and_has_the_conventions_names(sdk):
    assert post(app_with(Handle(whole("a")))) == 200
    ingress, route = sdk.one("ingress"), sdk.one("route")
    assert (parent_of(ingress), parent_of(route)) == (CALLER, id_of(ingress))
    about = dict(ingress.attributes)
    assert about.pop("gen_ai.response.time_to_first_chunk") >= 0
    assert about == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "kvray",
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "kvray.replica": "engine-a",
    }
    assert [event.name for event in ingress.events] == ["first token"]
    assert route.attributes["kvray.replica"] == "engine-a"
    assert ingress.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize(
    ("events", "status", "kind"),
    [
        (["engine-a", HEAD, StopAsyncIteration()], 503, "replica_gone"),
        (["engine-a", asyncio.TimeoutError()], 504, "timeout"),
    ],
)
def test_an_answer_that_breaks_off_is_an_error(sdk, events, status, kind):
    assert post(app_with(Handle(events)), "/v1/completions") == status
    ingress = sdk.one("ingress")
    assert ingress.status.status_code is StatusCode.ERROR
    assert ingress.attributes["error.type"] == kind
    assert ingress.attributes["http.response.status_code"] == status


def test_a_choice_that_fails_ends_its_span_as_an_error(sdk):
    handle = Handle(failures=[asyncio.TimeoutError()] * 3)
    assert post(app_with(handle), "/v1/completions") == 504
    assert {one.status.status_code for one in sdk.named("route")} == {StatusCode.ERROR}


def test_what_is_no_request_for_an_answer_has_no_span(sdk):
    assert TestClient(app_with(Handle())).get("/v1/models").status_code == 200
    assert sdk.names() == []


@pytest.mark.anyio
async def test_a_client_that_goes_away_ends_the_span_as_an_error(sdk):
    app = app_with(Handle(["engine-a", HEAD, b"text", "silence"]))
    heard = asyncio.Event()

    async def receive() -> dict[str, Any]:
        await heard.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if b"text" in message.get("body", b""):
            heard.set()

    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions"}
    scope |= {"query_string": b"", "root_path": "", "http_version": "1.1"}
    scope["headers"] = [(b"traceparent", TRACEPARENT.encode())]
    await asyncio.wait_for(app(scope, receive, send), 20)
    ingress = sdk.one("ingress")
    assert ingress.status.status_code is StatusCode.ERROR
    assert ingress.attributes["error.type"] == "disconnected"


def test_a_websocket_is_passed_on(sdk):
    seen = []

    async def app(scope: Any, _receive: Any, _send: Any) -> None:
        seen.append(scope["type"])

    scope = {"type": "websocket", "path": "/v1/chat/completions", "headers": []}
    asyncio.run(TracedRequests(app)(scope, None, None))  # type: ignore[arg-type]
    assert seen == ["websocket"]


def test_without_an_sdk_a_request_is_answered_as_ever():
    assert not spans.is_on()
    assert post(app_with(Handle(whole("a")))) == 200
