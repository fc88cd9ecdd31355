"""Counts the tokens that a cache stores, finds and misses, as a connector counts them."""

import threading
import time
from collections import Counter

from kvray.tensor_cache.prompt import MaskedPrompt
from kvray.trace.arrival import Arrivals, runs_between


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
