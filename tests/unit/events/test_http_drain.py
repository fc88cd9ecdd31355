"""The events of an engine's HTTP server."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from kvray.errors import TransferError
from kvray.events import pool_feed as http_drain
from kvray.events.pool_feed import HttpDrain


class Server(ThreadingHTTPServer):
    answer: tuple[int, str, bytes] = (200, "application/json", b"[]")


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        status, kind, body = self.server.answer
        if self.path != "/kv_cache_events":
            status = 404
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def drain(server: Server) -> list[Any]:
    return HttpDrain(f"http://127.0.0.1:{server.server_port}/")()


def test_events_are_taken_as_they_are(server: Server) -> None:
    events = [{"event_id": 0, "data": {"type": "created"}}]
    server.answer = 200, "application/json", json.dumps(events).encode()
    assert drain(server) == events


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((200, "text/event-stream", b"data: {}\n\n"), "use its ZMQ publisher"),
        ((404, "application/json", b"{}"), "404"),
        ((200, "application/json", b"{}"), "gives dict, no list"),
        ((200, "text/html", b"<html>"), "gives no KV events"),
    ],
)
def test_other_answers_are_told_in_a_sentence(
    server: Server, answer: tuple[int, str, bytes], said: str
) -> None:
    server.answer = answer
    with pytest.raises(TransferError, match=said):
        drain(server)


def test_an_answer_without_end_is_not_kept(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.answer = 200, "application/json", b"[" + b" " * 2**20 + b"]"
    monkeypatch.setattr(http_drain, "_BYTES_MAX", 2**19)
    with pytest.raises(TransferError, match="more than"):
        drain(server)
    monkeypatch.undo()
    monkeypatch.setattr(http_drain, "_TIMEOUT_S", 0.0)
    with pytest.raises(TransferError, match="gives no KV events"):
        drain(server)


def test_a_server_that_is_not_there_is_told_in_a_sentence() -> None:
    with pytest.raises(TransferError, match="gives no KV events"):
        HttpDrain("http://127.0.0.1:9")()
