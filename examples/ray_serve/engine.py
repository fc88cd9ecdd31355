"""One engine: a process that knows nothing of Ray, and the Serve replica that drives it.

Token ids go in and come out; text is the ingress's business.
"""

import asyncio
import importlib.util
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from ray import serve

from examples.ray_serve.settings import Settings
from kvray.cli.connector_config import MODULE, SCHEDULER_CLASS, WORKER_CLASS
from kvray.config import CONFIG_ENV
from kvray.errors import ConfigError, KVRayError
from kvray.reference import KvConnectorConfig, Replica
from kvray.reference.calls import Call
from kvray.reference.replica import CHILD_MODULE

ROOT = str(Path(__file__).parents[2])
CONNECTOR = KvConnectorConfig(
    connector_module=MODULE,
    connector_scheduler_class=SCHEDULER_CLASS,
    connector_worker_class=WORKER_CLASS,
)


def spawn(name: str, settings: Settings) -> Replica:
    """Begin to start an engine in a process of its own, which ends with this one.

    A process that has joined Ray ends with Ray's node; an engine must not. So it is a child, and
    it is told by its environment where kvray's tier is and what it is called there.
    """
    env = {"KVRAY_CONNECTOR__REPLICA": name}  # besides what this node's Ray says of its arena
    if settings.kvray_config is not None:
        env[CONFIG_ENV] = str(settings.kvray_config)
    module = CHILD_MODULE
    if uses_tensorrt_llm(settings):
        module = "examples.ray_serve.trtllm_child"
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [ROOT, *sys.path]))
    return Replica.spawn(
        name,
        env=env,
        module=module,
        connector=CONNECTOR,
        model=settings.model,
        **settings.engine_options,
    )


def uses_tensorrt_llm(settings: Settings) -> bool:
    """Whether the engine is TensorRT-LLM."""
    if settings.engine == "auto":
        return importlib.util.find_spec("tensorrt_llm") is not None
    return settings.engine == "tensorrt_llm"


@serve.deployment(health_check_period_s=2, graceful_shutdown_timeout_s=30)
class Engine:
    """A Serve replica with one engine."""

    def __init__(self, name: str, settings: Settings) -> None:
        """Start the engine and return when it is ready to answer.

        Raises:
            KVRayError: it did not start; Serve tries again.
        """
        self._replica = spawn(name, settings)
        try:
            self._replica.wait_ready(settings.start_timeout_s)
        except BaseException:
            self._replica.kill()
            raise

    async def generate(self, tokens: list[int], max_tokens: int) -> AsyncIterator[dict[str, Any]]:
        """Yield `{}` once the engine has it, the answer's tokens as they come, then how it ended.

        That is `{"tokens": [...]}`, and `{"finish_reason", "prompt_tokens", "cached_tokens"}` or
        `{"error", "is_config"}`. A caller that stops listening ends the request in the engine.
        """
        loop = asyncio.get_running_loop()
        heard: asyncio.Queue[list[int] | None] = asyncio.Queue()  # at most max_tokens and one more
        call = await asyncio.to_thread(
            self._replica.submit,
            tokens,
            max_tokens=max_tokens,
            listener=lambda new: loop.call_soon_threadsafe(heard.put_nowait, new),
        )
        call.future.add_done_callback(lambda _: loop.call_soon_threadsafe(heard.put_nowait, None))
        try:
            yield {}
            while (new := await heard.get()) is not None:
                yield {"tokens": new}
            yield _ending(call)
        finally:
            if not call.future.done():
                loop.run_in_executor(None, self._replica.cancel, call)

    def check_health(self) -> None:
        """Have Serve start another replica when the engine's process has died."""
        if not self._replica.is_alive:
            raise KVRayError(f"The engine {self._replica.name} has died.")

    def __del__(self) -> None:
        """End the engine with this replica."""
        if hasattr(self, "_replica"):
            self._replica.close()


def _ending(call: Call) -> dict[str, Any]:
    error = call.future.exception()
    if error is not None:
        return {"error": str(error), "is_config": isinstance(error, ConfigError)}
    output = call.future.result()
    return {
        "finish_reason": output.finish_reason,
        "prompt_tokens": output.prompt_tokens,
        "cached_tokens": output.reused_tokens + output.hit_tokens,
    }
