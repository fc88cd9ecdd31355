"""Takes the events of TensorRT-LLM's own server, `POST /kv_cache_events`."""

import http.client
import json
import time
import urllib.request
from typing import Any

from kvray.errors import TransferError

_TIMEOUT_S = 4.0  # 1.x waits two seconds for an event before it answers that there is none
_BYTES_MAX = 64 * 2**20
_PIECE = 2**16


class HttpDrain:
    """Empties a server's buffer at each call, for a `PoolFeed`; there can be one such reader."""

    def __init__(self, url: str) -> None:
        """Ask the server at `url`, such as `http://127.0.0.1:8000`."""
        self._request = urllib.request.Request(
            f"{url.rstrip('/')}/kv_cache_events", data=b"", method="POST"
        )

    def __call__(self) -> list[Any]:
        """Return the events since the last call.

        Raises:
            TransferError: the server does not answer with a list of events.
        """
        try:
            with urllib.request.urlopen(self._request, timeout=_TIMEOUT_S) as answer:
                kind = answer.headers.get_content_type()
                if kind == "text/event-stream":
                    raise TransferError(
                        "This server streams the hashes of blocks without their tokens, and no"
                        " prompt can be found by them; use its ZMQ publisher."
                    )
                found = json.loads(_body(answer, time.monotonic() + _TIMEOUT_S))
        except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
            raise TransferError(f"{self._request.full_url} gives no KV events ({error}).") from None
        if not isinstance(found, list):
            raise TransferError(f"{self._request.full_url} gives {type(found).__name__}, no list.")
        return found


def _body(answer: http.client.HTTPResponse, until: float) -> bytes:
    """Return an answer's body; TimeoutError or ValueError: it has no end, in time or in bytes."""
    body = bytearray()
    while piece := answer.read1(_PIECE):
        body += piece
        if len(body) > _BYTES_MAX:
            raise ValueError(f"more than {_BYTES_MAX >> 20} MiB")
        if time.monotonic() > until:
            raise TimeoutError("it takes too long")
    return bytes(body)
