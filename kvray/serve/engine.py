"""One engine: a process that knows nothing of Ray, and the Serve replica that drives it.

Token ids go in and come out; text is the ingress's business.
"""

import asyncio
import contextlib
import importlib.util
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

from ray import serve
from ray.util import get_node_ip_address

from kvray.actors.routers.pools import EVENTS_STAT
from kvray.config import CONFIG_ENV, load_config
from kvray.errors import ConfigError, KVRayError
from kvray.reference import Call, KvConnectorConfig, Replica
from kvray.reference.replica import CHILD_MODULE
from kvray.routing import PREFILL_STAT, SLOWDOWN_STAT, PrefillSpeed
from kvray.serve.settings import Settings

_log = logging.getLogger("ray.serve")

TRTLLM_MODULE = "kvray.serve.trtllm_child"
CONNECTOR = KvConnectorConfig()

_EVENTS_MAX = 100_000
"""KV events of an engine's pool that wait to be published; they are taken 20 times a second."""


def spawn(name: str, settings: Settings) -> Replica:
    """Begin to start an engine in a process of its own, which ends with this one.

    A process that has joined Ray ends with Ray's node; an engine must not. So it is a child, and
    it is told by its environment where kvray's tier is and what it is called there.
    """
    env = {"KVRAY_CONNECTOR__REPLICA": name}  # besides what this node's Ray says of its arena
    if settings.kvray_config is not None:
        env[CONFIG_ENV] = str(settings.kvray_config)
    if settings.is_tiny and load_config(settings.kvray_config).connector.model_key is None:
        env["KVRAY_CONNECTOR__MODEL_KEY"] = settings.model  # it has no files to tell it by
    events: dict[str, Any] = {}
    if settings.pool_events:
        events = {
            "event_host": str(get_node_ip_address()),  # type: ignore[no-untyped-call]
            "event_buffer_max_size": _EVENTS_MAX,
        }
    return Replica(
        name,
        env=env,
        log_path=log_path(name),
        module=TRTLLM_MODULE if uses_tensorrt_llm(settings) else CHILD_MODULE,
        connector=CONNECTOR,
        model=settings.model,
        **{**events, **settings.engine_options},
    )


def log_path(name: str) -> Path | None:
    """Return where the engine writes its log: beside this process's own, where Ray's dashboard is.

    None, a file that has no name, where this process does not write to a file.
    """
    own = Path(os.readlink("/proc/self/fd/2"))
    return own.with_name(f"{name}.log") if own.is_file() else None


def uses_tensorrt_llm(settings: Settings) -> bool:
    """Whether the engine is TensorRT-LLM."""
    if settings.engine == "auto":
        return importlib.util.find_spec("tensorrt_llm") is not None
    return settings.engine == "tensorrt_llm"


REPLICA_PREFIX = "engine-"
_LEAVE_S = 5.0
"""How long this process may take to end after its engine."""


def replica_name(serve_replica_id: str) -> str:
    """Return what kvray calls the engine of a Serve replica, whose id is unique and never again."""
    return REPLICA_PREFIX + serve_replica_id


class Engine:
    """A Serve replica with one engine; it ends with its engine.

    Serve's routers notice an ended process at once, and health checks only after three. Meanwhile
    it would have the shortest queue of all, get everything, and refuse it.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        name: str | None = None,
        leave: Callable[[], None] = lambda: os._exit(1),
    ) -> None:
        """Start the engine and return when it is ready to answer.

        Args:
            settings: what it loads, and how.
            name: of the replica in kvray; None: by the id that Serve gave this replica.
            leave: ends this process; called on a thread of its own.

        Raises:
            KVRayError: it did not start; Serve tries again.
        """
        self._is_closing = False
        self._stall_timeout_s = settings.stall_timeout_s
        self._has_sources = not uses_tensorrt_llm(settings)  # whose one figure has all of them
        self._calls: set[Call] = set()  # under way; the loop's
        self._waiting: set[Call] = set()  # those without a first token
        self._heard_at = 0.0  # of any of them, or when the first of them began
        self._first_token_at = 0.0  # the latest
        self._speed = PrefillSpeed()
        if name is None:
            name = replica_name(serve.get_replica_context().replica_id.unique_id)
        self._replica = spawn(name, settings)
        try:
            self._replica.wait_ready(settings.start_timeout_s)
        except BaseException:
            self._replica.kill()
            raise
        # The thread reads what does not change, and whether this object closes.
        threading.Thread(target=self._watch, args=(leave,), name="kvray-watch", daemon=True).start()

    async def generate(
        self, tokens: list[int], max_tokens: int, salt: str | None = None, trace: str = ""
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield `{"engine": name}` once the engine has it, the tokens as they come, then its end.

        Those are `{"tokens": [...]}`. The end is `{"finish_reason", "prompt_tokens",
        "cached_tokens"}`, with "cached_tokens_by_source" if the engine tells, or `{"error",
        "is_config"}`. A caller that stops listening ends the request in the engine. `trace` is the
        request's traceparent, for an engine that makes spans.
        """
        heard: asyncio.Queue[list[int] | None] = asyncio.Queue()  # at most max_tokens and one more
        tell = _onto_loop(heard.put_nowait)
        submit = partial(
            self._replica.submit, tokens, max_tokens=max_tokens, salt=salt, listener=tell
        )
        if trace and not self._has_sources:  # the reference engine makes none
            submit = partial(submit, trace=trace)
        call = await self._submit(submit)
        call.future.add_done_callback(lambda _: tell(None))
        came_at, prefill_s, num_answering = time.monotonic(), 0.0, 0
        self._begin(call)
        try:
            yield {"engine": self._replica.name}
            while (new := await heard.get()) is not None:
                self._heard_at = time.monotonic()
                if call in self._waiting:
                    num_answering = len(self._calls) - len(self._waiting)
                    self._waiting.remove(call)
                    prefill_s = self._heard_at - max(came_at, self._first_token_at)
                    self._first_token_at = self._heard_at
                yield {"tokens": new}
            if call.future.exception() is None:
                output = call.future.result()
                cached = output.reused_tokens + output.hit_tokens
                self._speed.note(output.prompt_tokens - cached, prefill_s, num_answering)
            yield _ending(call, has_sources=self._has_sources)
        finally:
            self._calls.discard(call)
            self._waiting.discard(call)
            self._leave(call)

    def record_routing_stats(self) -> dict[str, Any]:
        """Tell the router how fast this engine computes prompts, and where its events are heard.

        Serve asks now and then.
        """
        speed, events = self._speed, self._replica.event_metadata
        stats = {PREFILL_STAT: speed.tokens_per_s, SLOWDOWN_STAT: speed.decode_slowdown}
        return stats if events is None else {**stats, EVENTS_STAT: events}

    def check_health(self) -> None:
        """Have Serve start another replica when the engine hangs.

        Raises:
            KVRayError: it does.
        """
        silent_s = time.monotonic() - self._heard_at
        if self._calls and silent_s > self._stall_timeout_s:
            raise KVRayError(
                f"The engine {self._replica.name} has said nothing for {silent_s:.0f} s, with"
                f" {len(self._calls)} requests under way; it is replaced."
            )

    async def _submit(self, submit: Callable[[], Call]) -> Call:
        """Hand a request over, which may take a moment."""
        sending = asyncio.ensure_future(asyncio.to_thread(submit))
        try:
            return await asyncio.shield(sending)
        except asyncio.CancelledError:  # the engine gets it all the same, and ends it
            sending.add_done_callback(self._leave_when_sent)
            raise
        except KVRayError:
            if not self._replica.is_alive:
                await asyncio.sleep(_LEAVE_S)  # this process ends first, and another one gets it
            raise

    def _leave_when_sent(self, sending: "asyncio.Future[Call]") -> None:
        if sending.exception() is None:
            self._leave(sending.result())

    def _begin(self, call: Call) -> None:
        if not self._calls:
            self._heard_at = time.monotonic()
        self._calls.add(call)
        self._waiting.add(call)

    def _leave(self, call: Call) -> None:
        """Have the engine end a request that nobody listens to, if it has not ended."""
        if not call.future.done():
            asyncio.get_running_loop().run_in_executor(None, self._replica.cancel, call)

    def _watch(self, leave: Callable[[], None]) -> None:
        """End this process when its engine has ended by itself."""
        self._replica.wait_end()
        if not self._is_closing:
            _log.error("The engine %s has died; its replica ends.", self._replica.name)
            leave()

    def __del__(self) -> None:
        """End the engine with this replica."""
        self._is_closing = True
        if hasattr(self, "_replica"):
            self._replica.close()


def _onto_loop(
    put: Callable[[list[int] | None], None],
) -> Callable[[list[int] | None], None]:
    """Return what a thread may call in place of `put`, also after this loop's end."""
    loop = asyncio.get_running_loop()

    def tell(new: list[int] | None) -> None:
        with contextlib.suppress(RuntimeError):  # it has ended; nobody listens
            loop.call_soon_threadsafe(put, new)

    return tell


def _ending(call: Call, *, has_sources: bool) -> dict[str, Any]:
    error = call.future.exception()
    if error is not None:
        return {"error": str(error), "is_config": isinstance(error, ConfigError)}
    output = call.future.result()
    ending = {
        "finish_reason": output.finish_reason,
        "prompt_tokens": output.prompt_tokens,
        "cached_tokens": output.reused_tokens + output.hit_tokens,
    }
    if has_sources:
        by_source = {"pool": output.reused_tokens, "tier": output.hit_tokens}
        ending["cached_tokens_by_source"] = by_source
    return ending
