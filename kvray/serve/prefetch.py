"""What the ingress asks of kvray before an engine sees a request; never worse than not asking."""

import asyncio
import logging
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import lru_cache, partial

from kvray import Client
from kvray.breaker import Breaker
from kvray.client import Prefetched
from kvray.config import load_config
from kvray.errors import ConfigError, KVRayError
from kvray.identity.keys import pack_tokens
from kvray.serve.settings import Settings

_log = logging.getLogger("ray.serve")
_THREADS = 8
_BREAKERS_MAX = 1024


class Prefetcher:
    """Has prompts brought to the node of a replica, within `prefetch_timeout_s`.

    A replica whose tier is late or gone is left alone for a while that doubles, up to seconds;
    meanwhile its requests do not wait. Each has a breaker of its own: one frozen node costs the
    others nothing.
    """

    def __init__(self, settings: Settings) -> None:
        """Use the Ray connection of this process."""
        self._timeout_s = settings.prefetch_timeout_s
        if self._timeout_s == 0:
            return
        # A call that nobody waits for any more is over soon after.
        timeout = {"ray.timeout_s": self._timeout_s}
        self._client = Client(load_config(settings.kvray_config, overrides=timeout))
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvray-prefetch")
        self._breaker_of = lru_cache(_BREAKERS_MAX)(lambda replica: Breaker(random.Random()))
        self._warn_once = lru_cache(_BREAKERS_MAX)(
            partial(_log.warning, "kvray does not prefetch a prompt: %s")
        )

    async def bring(
        self, tokens: Sequence[int], replica: str, salt: str | None
    ) -> Prefetched | None:
        """Return once the prompt's blocks are where the replica is; None: not waited for."""
        if self._timeout_s == 0:
            return None
        breaker = self._breaker_of(replica)
        if breaker.state(time.monotonic()) == "open":
            return None
        try:
            packed = pack_tokens(tokens)
        except ConfigError:  # nobody is asked, and the engine refuses it with a sentence
            return None
        breaker.begin(time.monotonic())
        # In its thread it belongs to the request's trace, too.
        run, prefetch = copy_context().run, self._client.prefetch
        asked = asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: run(prefetch, packed, replica=replica, salt=salt)
        )
        had_failed = breaker.error
        try:
            brought = await asyncio.wait_for(asked, self._timeout_s)
        except ConfigError as error:  # the tier says it of this request, and is well
            breaker.succeed()
            self._warn_once(str(error))
            return None
        except (KVRayError, asyncio.TimeoutError) as error:
            reason = str(error) or f"no answer within {self._timeout_s} s"
            breaker.fail(time.monotonic(), reason)
            if not had_failed:  # once, however long it lasts
                _log.warning("kvray cannot prefetch for %s: %s", replica, reason)
            return None
        breaker.succeed()
        if had_failed:
            _log.info("kvray prefetches for %s again", replica)
        return brought
