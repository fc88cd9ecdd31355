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

from kvray.client import Prefetched
from kvray.serve.protocol import RequestError
from kvray.serve.traced import TracedRequests
from kvray.trace import spans
from tests.unit.serve.test_dispatch import ASKED, ENDING, Bringer, Handle, dispatcher
from tests.unit.tracing import CALLER, TRACE, TRACEPARENT, id_of, parent_of, sdk

__all__ = ["sdk"]

HEADERS = {"traceparent": TRACEPARENT}
TOKENS = [{"engine": "engine-a"}, {"tokens": [1]}, {"tokens": [2, 3]}]
SOURCES = {"cached_tokens_by_source": {"pool": 1, "tier": 1}}


def app_with(handle: Any, brought: Prefetched | None = None) -> ASGIApp:
    """Return an endpoint whose answers are those of a handle."""
    prefetcher = Bringer(handle.log)
    prefetcher.brought = brought
    answer = dispatcher(handle, prefetcher)

    async def chat(_: Request) -> Response:
        return StreamingResponse(str(event) async for event in answer.answer(ASKED))

    async def complete(_: Request) -> Response:
        try:
            return JSONResponse([event async for event in answer.answer(ASKED)])
        except RequestError as error:
            return JSONResponse(error.body(), error.status)

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
    handle = Handle([*TOKENS, {**ENDING, "cached_tokens": 2, **SOURCES}])
    nothing = Prefetched(num_tokens=0, staged_tokens=0, reason="none")
    assert post(app_with(handle, nothing)) == 200
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
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "kvray.tokens.pool": 1,
        "kvray.tokens.host": 1,
        "kvray.tokens.disk": 0,
        "kvray.tokens.remote": 0,
    }
    assert [event.name for event in ingress.events] == ["taken", "first token"]
    assert route.attributes["kvray.replica"] == "engine-a"
    assert handle.traces == [f"00-{TRACE}-{id_of(ingress)}-01"]
    assert ingress.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize(
    ("events", "status", "kind"),
    [
        ([{"engine": "engine-a"}, {"error": "no room", "is_config": False}], 500, "refused"),
        ([{"engine": "engine-a"}, StopAsyncIteration()], 503, "replica_gone"),
    ],
)
def test_an_answer_that_breaks_off_is_an_error(sdk, events, status, kind):
    assert post(app_with(Handle(events)), "/v1/completions") == status
    ingress = sdk.one("ingress")
    assert ingress.status.status_code is StatusCode.ERROR
    assert ingress.attributes["error.type"] == kind
    assert ingress.attributes["http.response.status_code"] == status


def test_a_choice_that_fails_ends_its_span_as_an_error(sdk):
    handle = Handle(failure=asyncio.TimeoutError())
    assert post(app_with(handle), "/v1/completions") == 504
    assert {one.status.status_code for one in sdk.named("route")} == {StatusCode.ERROR}


def test_what_is_no_request_for_an_answer_has_no_span(sdk):
    assert TestClient(app_with(Handle())).get("/v1/models").status_code == 200
    assert sdk.names() == []


@pytest.mark.anyio
async def test_a_client_that_goes_away_ends_the_span_as_an_error(sdk):
    app = app_with(Handle([*TOKENS, "silence"]))
    heard = asyncio.Event()

    async def receive() -> dict[str, Any]:
        await heard.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if b"tokens" in message.get("body", b""):
            heard.set()

    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions"}
    scope |= {"query_string": b"", "root_path": "", "http_version": "1.1"}
    scope["headers"] = [(b"traceparent", TRACEPARENT.encode())]
    await asyncio.wait_for(app(scope, receive, send), 20)
    ingress = sdk.one("ingress")
    assert ingress.status.status_code is StatusCode.ERROR
    assert ingress.attributes["error.type"] == "disconnected"


def test_without_an_sdk_a_request_is_answered_as_ever():
    assert not spans.is_on()
    assert post(app_with(Handle([*TOKENS, ENDING]))) == 200
