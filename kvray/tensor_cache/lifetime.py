"""The lifetime of a cache: until it is closed, and the last call has ended.

Its counters are those of a connector: tokens stored, found and missed.
"""

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

from kvray.errors import ConfigError
from kvray.tensor_cache.prompt import MaskedPrompt
from kvray.trace.arrival import Arrivals, runs_between


class Lifetime:
    """Counts the calls under way, so that the last one lets go of the arena. Thread-safe.

    A call's blocks stay leased or reserved while it copies, so nobody else may leave the arena
    first.
    """

    def __init__(self, leave: Callable[[], None]) -> None:
        """`leave` is called once, when the cache is closed and no call is under way."""
        self._leave = leave
        self._pid = os.getpid()
        # Guards the fields below; notified when the last user has left.
        self._state = threading.Condition()
        self._closed = False
        self._has_left = False
        self._users = 1  # the cache itself, until it is closed

    @property
    def closed(self) -> bool:
        """Whether no call may begin: closed, or this is a forked child of the cache's process."""
        return self._closed or os.getpid() != self._pid

    @contextlib.contextmanager
    def using(self) -> Iterator[None]:
        """Keep the arena for a call; ConfigError: the cache is closed."""
        with self._state:
            if self.closed:
                raise ConfigError(
                    "This TensorCache is closed (or belongs to the parent of this forked process);"
                    " make a new one."
                )
            self._users += 1
        try:
            yield
        finally:
            self._release()

    def end(self) -> bool:
        """Let no further call begin; False if it was so already. Follow it with `wait`."""
        with self._state:
            if self.closed:
                return False
            self._closed = True
            return True

    def wait(self, deadline: float) -> bool:
        """Release the cache's own use; return whether all calls end by `deadline` (monotonic)."""
        self._release()
        with self._state:
            return self._state.wait_for(lambda: self._has_left, deadline - time.monotonic())

    def _release(self) -> None:
        with self._state:
            self._users -= 1
            if self._users:
                return
        self._leave()
        with self._state:
            self._has_left = True
            self._state.notify_all()


class CacheCounters:
    """Totals of one cache; any thread counts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: Counter[str] = Counter()
        self._began_at = time.monotonic()

    def totals(self) -> dict[str, int]:
        """Return all totals."""
        with self._lock:
            return dict(self._totals)

    def reported(self) -> dict[str, int]:
        """Return them for the shard, with the seconds since they began."""
        return {**self.totals(), "uptime_s": int(time.monotonic() - self._began_at)}

    def add(self, **tokens: int) -> None:
        """Add to the totals of these names."""
        with self._lock:
            self._totals.update(tokens)

    def add_request(
        self, prompt: MaskedPrompt, found: int, arrivals: Arrivals, reason: str, block: int
    ) -> None:
        """Count a `retrieve` of `prompt` as a connector counts a request.

        So many tokens were found, in blocks of `block` tokens that came by `arrivals`; `reason` is
        why not more.
        """
        counts = Counter(
            requests=1,
            prompt_tokens=prompt.num_tokens,
            local_tokens=prompt.num_masked,
            hit_tokens=found,
        )
        end = prompt.first + found // block
        for start, stop, way, _ in runs_between(arrivals, prompt.first, end):
            counts[f"hit_tokens_from_{way}"] += (stop - start) * block
        if missed := prompt.num_blocks * block - found:
            # If all was here, a block was damaged since, or has just been evicted.
            counts[f"miss_tokens_{'not_stored' if reason == 'none' else reason}"] += missed
        self.add(**counts)
