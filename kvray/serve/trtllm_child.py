"""TensorRT-LLM's LLM API in a process of its own; its calls are those of a `Replica`.

Started by `engine.spawn`; it never imports ray, and ends when its parent does. It has not been run
with TensorRT-LLM itself, for which there is no machine where kvray is developed.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
import traceback
from dataclasses import asdict
from inspect import signature
from typing import Any

from kvray.errors import ConfigError, KVRayError
from kvray.reference.engine_options import KvConnectorConfig
from kvray.reference.output import Call, Listener, Output, Prompt
from kvray.reference.replica_child import serve

_TOKENS_PER_BLOCK = 32  # of `KvCacheConfig`, where nothing else is given


class TrtllmEngine:
    """The LLM API with the methods of an engine that a child serves.

    Calls cross to an event loop on a thread of its own, which answers them.
    """

    def __init__(
        self,
        *,
        connector: KvConnectorConfig,
        kv_cache_config: dict[str, Any] | None = None,
        event_buffer_max_size: int = 0,
        **options: Any,
    ) -> None:
        """Start the engine that `engine_options` of the settings describe."""
        try:
            from tensorrt_llm import LLM
            from tensorrt_llm.llmapi.llm_args import KvCacheConfig, KvCacheConnectorConfig

            cache = {"enable_block_reuse": True, "enable_partial_reuse": False}
            given = dict(kv_cache_config or {})
            if event_buffer_max_size:
                given.setdefault("event_buffer_max_size", event_buffer_max_size)
            self._llm = LLM(
                backend="pytorch",
                kv_cache_config=KvCacheConfig(**{**given, **cache}),
                kv_connector_config=KvCacheConnectorConfig(**asdict(connector)),
                **options,
            )
        except (ImportError, RuntimeError, ValueError) as error:
            raise KVRayError(str(error)) from error
        # Since 1.2; it makes a span `llm_request` if `otlp_traces_endpoint` is among its options.
        self._is_traced = "trace_headers" in signature(self._llm.generate_async).parameters
        self.tokens_per_block = int(given.get("tokens_per_block", _TOKENS_PER_BLOCK))
        self._ids = itertools.count()
        self._results: dict[int, Any] = {}
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="kvray-llm", daemon=True).start()

    def submit(
        self,
        prompt: Prompt,
        *,
        max_tokens: int,
        salt: str | None,
        listener: Listener | None = None,
        trace: str = "",
    ) -> Call:
        """Begin to answer a prompt; the engine's own spans are below `trace`, a traceparent."""
        call = Call(call_id=next(self._ids), listener=listener)
        more: dict[str, Any] = {} if salt is None else {"cache_salt": salt}
        if trace and self._is_traced:
            more["trace_headers"] = {"traceparent": trace}
        asyncio.run_coroutine_threadsafe(self._settle(call, prompt, max_tokens, more), self._loop)
        return call

    def cancel(self, call: Call) -> None:
        """End a call early. The loop comes to it after the call has begun."""
        asyncio.run_coroutine_threadsafe(self._abort(call.call_id), self._loop)

    def get_kv_cache_events(self) -> list[Any]:
        """Return the events of the pool since the last call; it raises before the first request."""
        events: list[Any] = self._llm.get_kv_cache_events(timeout=0)
        return events

    def close(self) -> None:
        """End the engine."""
        self._llm.shutdown()

    async def _settle(
        self, call: Call, prompt: Prompt, max_tokens: int, more: dict[str, Any]
    ) -> None:
        try:
            call.future.set_result(await self._answer(call, prompt, max_tokens, more))
        except ValueError as error:  # what was asked cannot be done
            call.future.set_exception(ConfigError(str(error)))
        except Exception as error:  # noqa: BLE001 - a defect is answered too, or its client waits
            traceback.print_exc()
            call.future.set_exception(KVRayError(repr(error)))
        finally:
            self._results.pop(call.call_id, None)

    async def _answer(
        self, call: Call, prompt: Prompt, max_tokens: int, more: dict[str, Any]
    ) -> Output:
        from tensorrt_llm import SamplingParams

        began, first_at, num_told = time.monotonic(), 0.0, 0
        result = self._results[call.call_id] = self._llm.generate_async(
            prompt,
            SamplingParams(max_tokens=max_tokens, temperature=0.0, top_k=1),
            streaming=True,
            **more,
        )
        async for step in result:
            tokens = step.outputs[0].token_ids
            first_at = first_at or time.monotonic()
            if call.listener is not None and len(tokens) > num_told:
                call.listener(list(tokens[num_told:]))
                num_told = len(tokens)
        answer = result.outputs[0]
        return Output(
            text=answer.text,
            token_ids=tuple(answer.token_ids),
            prompt_tokens=len(result.prompt_token_ids),
            reused_tokens=getattr(result, "cached_tokens", 0) or 0,  # the engine's and kvray's
            hit_tokens=0,
            ttft_s=first_at - began,
            finish_reason=answer.finish_reason or "cancelled",
        )

    async def _abort(self, call_id: int) -> None:
        if call_id in self._results:
            self._results[call_id].abort()


if __name__ == "__main__":
    serve(TrtllmEngine)
