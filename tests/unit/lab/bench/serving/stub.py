"""An OpenAI-compatible endpoint without a model, on a thread of the test."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse, StreamingResponse

from tests.waiting import HANG_S


class Stub:
    """Streams `text`, and remembers what it was asked."""

    def __init__(
        self, *, text: str = "one two", replica: str = "engine-1", wait_s: float = 0
    ) -> None:
        self.asked: list[dict[str, Any]] = []
        self.app = FastAPI()
        self._text, self._replica, self._wait_s = text, replica, wait_s
        self.app.get("/v1/models")(self._models)
        self.app.post("/v1/completions")(self._complete)

    async def _models(self) -> dict[str, Any]:
        one = {"id": "stub", "object": "model", "created": 0, "owned_by": "test"}
        return {"object": "list", "data": [one]}

    async def _complete(self, asked: dict[str, Any]) -> Any:
        self.asked.append(asked)
        if self._text == "":
            return JSONResponse({"error": {"message": "full"}}, 429)
        headers = {"x-kvray-replica": self._replica}
        lines = self._lines(len(asked["prompt"]))
        return StreamingResponse(lines, media_type="text/event-stream", headers=headers)

    async def _lines(self, num_tokens: int) -> AsyncIterator[str]:
        base = {"id": "1", "object": "text_completion", "created": 0, "model": "stub"}
        await asyncio.sleep(self._wait_s)
        for word in self._text.split():
            choice = {"index": 0, "text": word, "finish_reason": None, "logprobs": None}
            yield f"data: {json.dumps({**base, 'choices': [choice]})}\n\n"
        usage = {
            "prompt_tokens": num_tokens,
            "completion_tokens": 2,
            "total_tokens": num_tokens + 2,
            "prompt_tokens_details": {"cached_tokens": num_tokens // 2},
        }
        yield f"data: {json.dumps({**base, 'choices': [], 'usage': usage})}\n\n"
        yield "data: [DONE]\n\n"


@contextmanager
def running(stub: Stub) -> Iterator[str]:
    """Serve during the block; the URL is given."""
    config = uvicorn.Config(
        stub.app, host="127.0.0.1", port=0, log_level="error", loop="asyncio", lifespan="off"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, name="stub")
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(HANG_S)
