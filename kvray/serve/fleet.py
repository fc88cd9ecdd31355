"""Which engine answers a request, and its answer as it comes."""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle

from kvray.serve.prefetch import Prefetcher
from kvray.serve.protocol import RequestError

_log = logging.getLogger("ray.serve")
_TAKE_TIMEOUT_S = 5.0
"""An engine that does not take a request for so long is passed over if there is another."""

_HEARD_S = 5.0
"""An engine that was heard so lately can answer; else one is asked."""
_HEALTH_TIMEOUT_S = 2.0

Event = dict[str, Any]


class Fleet:
    """The engines by their names, taken in turns."""

    def __init__(
        self,
        engines: Mapping[str, DeploymentHandle[Any]],
        prefetcher: Prefetcher,
        *,
        request_timeout_s: float,
    ) -> None:
        self._engines = {name: handle.options(stream=True) for name, handle in engines.items()}
        self._prefetcher = prefetcher
        self._timeout_s = request_timeout_s
        self._turns = itertools.count()
        self._heard_at = -_HEARD_S  # of any engine

    def choose(self, wanted: str | None) -> list[str]:
        """Return the engines to try, in order: the one that is wanted, or all from the next one on.

        Raises:
            RequestError: there is no such engine.
        """
        names = list(self._engines)
        if wanted is not None:
            if wanted not in names:
                raise RequestError(
                    f"There is no replica {wanted!r:.80}; there are {', '.join(names)}.",
                    status=404,
                    code="replica_not_found",
                )
            return [wanted]
        first = next(self._turns) % len(names)
        return names[first:] + names[:first]

    async def answer(
        self, names: Sequence[str], tokens: list[int], max_tokens: int
    ) -> AsyncGenerator[Event, None]:
        """Yield `{"engine": name}`, then what that engine's `generate` yields.

        An engine that is gone, full or silent before it has taken the request is passed over.

        Raises:
            RequestError: no engine takes it, one refused it or broke off, or time is up.
        """
        deadline = time.monotonic() + self._timeout_s
        for name in names:
            is_last = name == names[-1]
            await self._prefetcher.bring(tokens, name)
            events: Any = self._engines[name].generate.remote(tokens, max_tokens)
            patience_s = deadline - time.monotonic()
            if not is_last:
                patience_s = min(patience_s, _TAKE_TIMEOUT_S)
            try:
                await asyncio.wait_for(anext(events), patience_s)
            except asyncio.CancelledError:  # the client has gone
                events.cancel()
                raise
            except (RayError, RayServeException, asyncio.TimeoutError) as error:
                if isinstance(error, asyncio.TimeoutError):
                    events.cancel()  # of what has failed it would raise the failure again
                if is_last:
                    raise _failure(error, name) from error
                _log.warning("%s did not take a request (%r); the next one gets it", name, error)
                continue
            is_over = False
            try:
                yield {"engine": name}
                while not is_over:
                    event = await _next(events, name, deadline)
                    self._heard_at = time.monotonic()
                    is_over = "finish_reason" in event
                    yield event
            finally:
                if not is_over:  # nobody listens any more
                    events.cancel()
            return

    async def can_answer(self) -> bool:
        """Whether an engine has said something just now, or says that it is well."""
        if time.monotonic() - self._heard_at < _HEARD_S:
            return True  # all of them may be full, and those that are full are not asked
        for engine in self._engines.values():
            asked: Any = engine.options(stream=False).check_health.remote()
            try:
                await asyncio.wait_for(asked, _HEALTH_TIMEOUT_S)
                return True
            except asyncio.TimeoutError:
                asked.cancel()
            except (RayError, RayServeException) as error:
                _log.warning("an engine is not well: %r", error)
        return False


async def _next(events: Any, name: str, deadline: float) -> Event:
    """Return what an engine that has taken a request says next.

    Raises:
        RequestError: the engine refused it, broke off, or time is up.
    """
    try:
        event: Event = await asyncio.wait_for(anext(events), deadline - time.monotonic())
    except (RayError, RayServeException, asyncio.TimeoutError) as error:
        raise _failure(error, name) from error
    if "error" in event:
        raise RequestError(event["error"], status=400 if event["is_config"] else 500)
    return event


def _failure(error: Exception, name: str) -> RequestError:
    if isinstance(error, BackPressureError):
        return RequestError(f"{name} is full; try again later.", status=429, code="overloaded")
    if isinstance(error, asyncio.TimeoutError):
        return RequestError(f"{name} did not answer in time.", status=504, code="timeout")
    return RequestError(f"{name} is gone; try again.", status=503, code="replica_gone")
