"""Takes the events of TensorRT-LLM's own server, `POST /kv_cache_events`."""

import http.client
import json
import urllib.request
from typing import Any

from kvray.errors import TransferError

_TIMEOUT_S = 4.0  # 1.x waits two seconds for an event before it answers that there is none
_BYTES_MAX = 256 * 2**20


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
                found = json.loads(answer.read(_BYTES_MAX))
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise TransferError(f"{self._request.full_url} gives no KV events ({error}).") from None
        if not isinstance(found, list):
            raise TransferError(f"{self._request.full_url} gives {type(found).__name__}, no list.")
        return found
