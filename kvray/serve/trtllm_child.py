"""TensorRT-LLM's LLM API in a process of its own; its calls are those of a `Replica`.

Started by `engine.spawn`; it never imports ray, and ends when its parent does. It has not been run
with TensorRT-LLM itself, for which there is no machine where kvray is developed.
"""

import asyncio
import os
import sys
import threading
import time
import traceback
from functools import partial
from typing import Any

from kvray.errors import ConfigError, KVRayError
from kvray.lab.reference.child_process import JsonPipe, PipeClosed, join_parent

_SEND_TIMEOUT_S = 30.0
_GRACE_S = 15.0


class _Child:
    """Answers calls on an event loop; a thread takes them from the pipe.

    Calls cross to the loop by `call_soon_threadsafe`; only the loop sends.
    """

    def __init__(self, pipe: JsonPipe, llm: Any) -> None:
        self._pipe = pipe
        self._llm = llm
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._results: dict[int, Any] = {}
        self._unwanted: set[int] = set()
        self._is_over = asyncio.Event()

    async def run(self) -> None:
        """Answer until the parent is gone."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, args=(loop,), daemon=True).start()
        self._send({"id": 0})
        await self._is_over.wait()

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            while True:
                loop.call_soon_threadsafe(self._take, self._pipe.receive(timeout_s=None))
        except PipeClosed:
            loop.call_soon_threadsafe(self._is_over.set)
        time.sleep(_GRACE_S)
        os._exit(1)

    def _take(self, message: dict[str, Any]) -> None:
        call_id = message["id"]
        if "call" in message:
            task = asyncio.create_task(self._answer(call_id, message["call"]))
            self._tasks[call_id] = task
            task.add_done_callback(partial(self._end, call_id))
        elif call_id in self._results:
            self._results[call_id].abort()
        elif call_id in self._tasks:
            self._unwanted.add(call_id)  # it has not begun yet

    async def _answer(self, call_id: int, call: dict[str, Any]) -> None:
        from tensorrt_llm import SamplingParams

        began, first_at, num_told = time.monotonic(), 0.0, 0
        try:
            result = self._llm.generate_async(
                call["prompt"],
                SamplingParams(max_tokens=call["max_tokens"], temperature=0.0, top_k=1),
                streaming=True,
                **({} if call["salt"] is None else {"cache_salt": call["salt"]}),
            )
            self._results[call_id] = result
            if call_id in self._unwanted:
                result.abort()
            async for step in result:
                tokens = step.outputs[0].token_ids
                first_at = first_at or time.monotonic()
                if call["is_stream"] and len(tokens) > num_told:
                    self._send({"id": call_id, "tokens": list(tokens[num_told:])})
                    num_told = len(tokens)
        except (ValueError, RuntimeError) as error:  # the first: what was asked cannot be done
            is_config = isinstance(error, ValueError)
            self._send({"id": call_id, "error": str(error), "is_config": is_config})
        else:
            self._send({"id": call_id, "output": _output(result, first_at - began)})

    def _end(self, call_id: int, task: "asyncio.Task[None]") -> None:
        """Forget a call; one that ended by a defect is answered too, or its client would wait."""
        self._results.pop(call_id, None)
        self._tasks.pop(call_id, None)
        self._unwanted.discard(call_id)
        if not task.cancelled() and (defect := task.exception()) is not None:
            traceback.print_exception(defect)
            self._send({"id": call_id, "error": repr(defect), "is_config": False})

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._pipe.send(message, timeout_s=_SEND_TIMEOUT_S)
        except PipeClosed:
            self._is_over.set()


def _output(result: Any, ttft_s: float) -> dict[str, Any]:
    """Return the fields of `kvray.lab.reference.Output`; the engine's and kvray's hits are one."""
    answer = result.outputs[0]
    return {
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "prompt_tokens": len(result.prompt_token_ids),
        "reused_tokens": getattr(result, "cached_tokens", 0) or 0,
        "hit_tokens": 0,
        "ttft_s": ttft_s,
        "finish_reason": answer.finish_reason or "cancelled",
    }


def _start(options: dict[str, Any]) -> Any:
    """Start the engine that `engine_options` of the settings describe."""
    from tensorrt_llm import LLM
    from tensorrt_llm.llmapi.llm_args import KvCacheConfig, KvCacheConnectorConfig

    cache = {"enable_block_reuse": True, "enable_partial_reuse": False}
    return LLM(
        backend="pytorch",
        kv_cache_config=KvCacheConfig(**{**options.pop("kv_cache_config", {}), **cache}),
        kv_connector_config=KvCacheConnectorConfig(**options.pop("connector")),
        **options,
    )


def main() -> None:
    """Serve the parent until it closes its pipe."""
    pipe = join_parent()
    try:
        options = pipe.receive(timeout_s=_SEND_TIMEOUT_S)
        try:
            llm = _start(options)
        except (KVRayError, ImportError, RuntimeError, TypeError, ValueError) as error:
            failure = {"id": 0, "error": str(error), "is_config": isinstance(error, ConfigError)}
            pipe.send(failure, timeout_s=_SEND_TIMEOUT_S)
            sys.exit(1)
    except PipeClosed:
        sys.exit(1)
    with llm:
        asyncio.run(_Child(pipe, llm).run())


if __name__ == "__main__":
    main()
