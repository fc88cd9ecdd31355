"""The endpoint: what clients send and get beside the body, and the span of a request."""

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("ray.serve")
pytest.importorskip("openai")

from opentelemetry.trace import StatusCode
from ray.serve.exceptions import RayServeException
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from kvray.serve import Settings
from kvray.serve.engine import Head
from kvray.serve.ingress import Ingress, Renderers
from kvray.trace import spans
from tests.unit.serve.test_dispatch import HEAD, HINT, SSE, Bringer, Handle, whole
from tests.unit.tracing import CALLER, TRACE, TRACEPARENT, id_of, parent_of, sdk

__all__ = ["sdk"]

CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"


def ingress_of(handle: Handle, **options: Any) -> Ingress:
    """Return an endpoint before the engines of a handle."""

    async def hint(_path: str, _body: bytes) -> Any:
        return HINT

    engines: Any = handle
    settings = Settings(model="tiny", renderers=0, prefetch_timeout_s=0, **options)
    made = Ingress(settings, engines)
    rendering: Any = SimpleNamespace(hint=hint)
    bringing: Any = Bringer(handle.log)
    made._renderers, made._dispatcher._prefetcher = rendering, bringing
    return made


def client_of(handle: Handle, root_path: str = "", **options: Any) -> TestClient:
    app = ingress_of(handle, **options).__serve_build_asgi_app__()
    where: Any = {"base_url": "http://example.org", "root_path": root_path}
    return TestClient(app, **where, follow_redirects=False)


def post(handle: Handle, path: str = CHAT, *, traceparent: str = TRACEPARENT) -> Any:
    return client_of(handle).post(path, headers={"traceparent": traceparent})


WHOLE = {"type": "http.request", "body": b"{}"}


def scope_of(*headers: tuple[bytes, bytes]) -> dict[str, Any]:
    scope = {"type": "http", "method": "POST", "path": CHAT, "root_path": ""}
    return scope | {"query_string": b"", "http_version": "1.1", "headers": [*headers]}


async def told(
    ingress: Ingress, body: dict[str, Any] | None = None, *headers: tuple[bytes, bytes]
) -> list[Any]:
    """Return the messages of an answer to a body, which may never come."""
    sent: list[Any] = []

    async def receive() -> Any:
        return body or await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    await ingress.__serve_build_asgi_app__()(scope_of(*headers), receive, send)
    return sent


REDIRECTS = {
    "/v1/models/": "/llm/v1/models/",
    "http://example.org/v1/models?a=1": "/llm/v1/models?a=1",
    "http://127.0.0.1:41234/v1/models": "/llm/v1/models",
    "//127.0.0.1:41234": "/llm/",
    "http://example.org//elsewhere.org/": "/llm/elsewhere.org/",
    "https://elsewhere.org/v1": "https://elsewhere.org/v1",
    "models": "models",
}


@pytest.mark.parametrize("target", REDIRECTS)
def test_a_redirect_leads_to_the_endpoint_and_not_to_an_engine(target):
    head = Head(307, [(b"Location", target.encode())])
    client = client_of(Handle(["engine-a", head, b""]), "/llm")
    assert client.get("/llm/v1/models").headers["location"] == REDIRECTS[target]


def test_headers_of_serves_proxy_are_not_there_twice_and_others_pass_byte_for_byte():
    odd = b"caf\xe9 \xc3\xa9"
    head = Head(200, [(b"Date", b"now"), (b"server", b"own"), (b"X-Name", odd)])
    handle = Handle(["engine-a", head, b"text", b""])
    start, *_ = asyncio.run(told(ingress_of(handle), WHOLE, (b"x-name", odd)))
    assert start["headers"][0] == (b"X-Name", odd)
    assert (b"x-name", odd) in handle.asked[0].headers


@pytest.mark.parametrize("flags", ["00", "01", "02", "03"])
@pytest.mark.parametrize("is_on", [False, True])
def test_whether_a_callers_trace_is_sampled_reaches_the_engine_unchanged(request, is_on, flags):
    made = request.getfixturevalue("sdk") if is_on else None
    handle = Handle(whole("a"))
    caller = f"00-{TRACE}-{CALLER}-{flags}"
    post(handle, traceparent=caller)
    (sent,) = [value for name, value in handle.asked[0].headers if name == b"traceparent"]
    parent = id_of(made.one("ingress")) if made and int(flags) & 1 else CALLER
    assert sent.decode() == f"00-{TRACE}-{parent}-{flags}"


LONG = {"x-long": "a" * 70_000}


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "field", "said"),
    [
        ("/v2/models", b"", {}, 404, "code", "not_found"),
        (COMPLETIONS, b"12345", {}, 413, "code", "body_too_long"),
        (COMPLETIONS, b"", LONG, 431, "code", "headers_too_long"),
        (MESSAGES, b"12345", {}, 413, "type", "request_too_large"),
        (MESSAGES, b"", LONG, 431, "type", "api_error"),
    ],
)
def test_what_no_engine_gets_is_refused_in_the_form_of_its_protocol(
    path, body, headers, status, field, said
):
    answer = client_of(Handle(), body_bytes_max=4).post(path, content=body, headers=headers)
    assert (answer.status_code, answer.json()["error"][field]) == (status, said)
    assert answer.json().get("type") == ("error" if path == MESSAGES else None)


@pytest.mark.parametrize(("prefix", "status"), [("/", 200), ("/v1/", 200), ("/v", 404)])
def test_a_path_is_handed_on_with_all_below(prefix, status):
    client = client_of(Handle(whole("a")), paths=[prefix])
    assert client.get("/v1/models").status_code == status


def test_a_request_that_is_no_http_is_refused_before_an_engine_gets_it():
    handle = Handle(whole("a"))
    start, *_ = asyncio.run(told(ingress_of(handle), WHOLE, (b"host", b"a"), (b"host", b"b")))
    assert (start["status"], handle.log) == (400, [])


def test_a_request_that_has_no_prompt_waits_for_no_tokens():
    made = object.__new__(Renderers)
    made._actors, made._num_open = [None], [0]
    assert asyncio.run(made.hint("/v1/embeddings", b"{}")) is None


def test_a_slow_body_is_given_up():
    ingress = ingress_of(Handle(), body_timeout_s=0.05)
    assert asyncio.run(told(ingress))[0]["status"] == 408


@pytest.mark.parametrize(
    ("path", "begins"),
    [(CHAT, b'data: {"error": {"message": "engine-a is gone'), (MESSAGES, b"event: error\n")],
)
def test_a_stream_that_breaks_off_ends_with_an_error_of_its_protocol(path, begins):
    handle = Handle(["engine-a", SSE, b"data: 1\n\n", StopAsyncIteration()])
    assert post(handle, path).content.startswith(b"data: 1\n\n" + begins)


def test_other_answers_that_break_off_end_early():
    with pytest.raises(Exception, match="engine-a is gone"):
        post(Handle(["engine-a", HEAD, b"te", StopAsyncIteration()]))


def test_answers_are_counted_by_their_status_and_an_engine_that_has_just_answered_is_healthy(
    monkeypatch,
):
    monkeypatch.setattr("ray.serve.status", Mock(side_effect=RayServeException))
    assert not spans.is_on()
    client = client_of(Handle(whole("a")))
    assert client.get("/health").status_code == 503
    client.post(CHAT)
    assert client.get("/health").status_code == 200
    client.post("/nowhere")
    counts = client.get("/metrics").text
    assert 'kvray_ingress_answers_total{status="200"} 1.0' in counts
    assert 'kvray_ingress_answers_total{status="404"} 1.0' in counts
    assert "kvray_ingress_first_byte_seconds_count 1.0" in counts


def test_a_websocket_is_closed():
    with pytest.raises(WebSocketDisconnect):
        with client_of(Handle()).websocket_connect(CHAT):
            pass


def test_a_streams_span_lasts_to_its_end_and_has_the_conventions_names(sdk):
    assert post(Handle(whole("a"))).status_code == 200
    ingress, route = sdk.one("ingress"), sdk.one("route")
    assert (parent_of(ingress), parent_of(route)) == (CALLER, id_of(ingress))
    about = dict(ingress.attributes)
    assert about.pop("gen_ai.response.time_to_first_chunk") >= 0
    assert about == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "kvray",
        "gen_ai.usage.input_tokens": 3,
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "kvray.replica": "engine-a",
    }
    assert [event.name for event in ingress.events] == ["first token"]
    assert route.attributes["kvray.replica"] == "engine-a"
    assert ingress.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize(
    ("handle", "status", "kind"),
    [
        (lambda: Handle(*[["engine-a", StopAsyncIteration()]] * 2), 503, "replica_gone"),
        (lambda: Handle(["engine-a", asyncio.TimeoutError()]), 504, "timeout"),
        (lambda: Handle(["engine-a", Head(500, []), b""]), 500, "500"),
        (lambda: Handle(failures=[asyncio.TimeoutError()] * 3), 504, "timeout"),
    ],
    ids=["gone", "silent", "its own failure", "no choice"],
)
def test_an_answer_that_fails_is_an_error(sdk, handle, status, kind):
    asked = handle()
    assert post(asked, COMPLETIONS).status_code == status
    ingress = sdk.one("ingress")
    assert ingress.status.status_code is StatusCode.ERROR
    assert ingress.attributes["error.type"] == kind
    assert ingress.attributes["http.response.status_code"] == status
    routes = {one.status.status_code for one in sdk.named("route")}
    assert routes == {StatusCode.UNSET if asked.asked else StatusCode.ERROR}


def test_what_is_no_request_for_an_answer_has_no_span(sdk):
    assert client_of(Handle(whole("a"))).get("/v1/models").status_code == 200
    assert "ingress" not in sdk.names()


@pytest.mark.anyio
@pytest.mark.parametrize(("is_cut", "kind"), [(True, "CancelledError"), (False, "disconnected")])
async def test_a_client_that_goes_away_ends_the_span_as_an_error(sdk, is_cut, kind):
    heard = asyncio.Event()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request" if is_cut else "http.disconnect", "body": b""}

    async def send(message: Any) -> None:
        if b"text" in message.get("body", b""):
            heard.set()

    handle = Handle(["engine-a", HEAD, b"text", "silence"])
    app = ingress_of(handle).__serve_build_asgi_app__()
    asked = asyncio.ensure_future(app(scope_of(), receive, send))
    if is_cut:  # as Serve does it
        await heard.wait()
        asked.cancel()
    await asyncio.wait({asked})
    ingress = sdk.one("ingress")
    assert ingress.status.status_code is StatusCode.ERROR
    assert ingress.attributes["error.type"] == kind
    assert [one.is_cancelled for one in handle.answers] == [is_cut]
