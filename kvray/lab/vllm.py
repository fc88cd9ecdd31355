"""vLLM in a process of its own, as a witness on an engine not our own; its calls are a `Replica`'s.

Started by `Replica(module=MODULE)`. It never imports ray, and ends when its parent does.
"""

import asyncio
import itertools
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from kvray.errors import ConfigError, KVRayError
from kvray.reference.checkpoint import SMOLLM2, find_smollm2
from kvray.reference.output import Call, Output, Prompt
from kvray.reference.replica_child import serve
from kvray.vllm import CONNECTOR

MODULE = "kvray.lab.vllm"
"""What a `Replica` runs that is vLLM."""
_CLOSE_S = 20.0


def environ(num_threads: int) -> dict[str, str]:
    """Return the variables of such a replica; equal answers need equal numbers of threads."""
    return {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(num_threads),
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; a pool with its own number of blocks has those
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    }


class VllmEngine:
    """`AsyncLLM` as an engine that a child serves; calls cross to an event loop on its thread."""

    def __init__(self, *, model: str = SMOLLM2, with_kvray: bool = True, **options: Any) -> None:
        """Start vLLM with `options` of `AsyncEngineArgs`, or `num_blocks`; KVRayError: none."""
        self._ids = itertools.count()
        self._loop = asyncio.new_event_loop()
        run = self._loop.run_forever
        self._thread = threading.Thread(target=run, name="kvray-llm", daemon=True)
        self._thread.start()
        try:
            start = _start(model, with_kvray=with_kvray, options=options)
            self._llm = asyncio.run_coroutine_threadsafe(start, self._loop).result()
        except (ImportError, RuntimeError, ValueError) as error:
            traceback.print_exc()
            raise KVRayError(str(error)) from error

    def submit(self, prompt: Prompt, *, max_tokens: int, salt: str | None = None) -> Call:
        """Begin to answer a prompt."""
        call = Call(call_id=next(self._ids))
        asyncio.run_coroutine_threadsafe(self._settle(call, prompt, max_tokens, salt), self._loop)
        return call

    def cancel(self, call: Call) -> None:
        """End a call early."""
        asyncio.run_coroutine_threadsafe(self._llm.abort(str(call.call_id)), self._loop)

    def close(self) -> None:
        """End the engine."""
        self._llm.shutdown()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)

    async def _settle(self, call: Call, prompt: Prompt, max_tokens: int, salt: str | None) -> None:
        try:
            call.future.set_result(await self._answer(call, prompt, max_tokens, salt))
        except ValueError as error:  # what was asked cannot be done
            call.future.set_exception(ConfigError(str(error)))
        except Exception as error:  # noqa: BLE001 - a defect is answered too, or its client waits
            traceback.print_exc()
            call.future.set_exception(KVRayError(repr(error)))

    async def _answer(
        self, call: Call, prompt: Prompt, max_tokens: int, salt: str | None
    ) -> Output:
        from vllm import SamplingParams

        began, first_at = time.monotonic(), 0.0
        is_text = isinstance(prompt, str)
        asked: dict[str, Any] = {"prompt": prompt} if is_text else {"prompt_token_ids": [*prompt]}
        if salt is not None:
            asked["cache_salt"] = salt
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        last: Any = None
        async for step in self._llm.generate(asked, sampling, str(call.call_id)):
            first_at = first_at or time.monotonic()
            last = step
        if last is None:
            raise KVRayError("vLLM ended a request without an answer.")
        answer = last.outputs[0]
        hit_tokens = int((last.kv_transfer_params or {}).get("kvray_hit_tokens", 0))
        return Output(
            text=answer.text,
            token_ids=tuple(answer.token_ids),
            prompt_tokens=len(last.prompt_token_ids),
            reused_tokens=max(0, (last.num_cached_tokens or 0) - hit_tokens),
            hit_tokens=hit_tokens,
            ttft_s=first_at - began,
            finish_reason=answer.finish_reason or "cancelled",
        )


async def _start(model: str, *, with_kvray: bool, options: dict[str, Any]) -> Any:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    num_blocks = options.pop("num_blocks", None)
    if num_blocks is not None:
        options["num_gpu_blocks_override"] = num_blocks
    if with_kvray:
        options["kv_transfer_config"] = CONNECTOR
    path = find_smollm2() if model == SMOLLM2 else Path(model)
    arguments = AsyncEngineArgs(model=str(path), enforce_eager=True, **options)
    return AsyncLLM.from_engine_args(arguments)


if __name__ == "__main__":
    serve(VllmEngine)
