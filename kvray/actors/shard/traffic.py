"""What more or less memory would be worth to this node's prompts, worked out a little at a time."""

import time
from collections.abc import Generator
from typing import Any

from kvray.actors.lookup.stored_digests import Origin
from kvray.actors.shard.settings import ShardSettings
from kvray.store.sizing import SIZES, SampledPrompts, TrafficSample, curve

_CPU_SHARE = 0.006
"""Of a core, for the replays of the sample; to take it costs little."""
_BUDGET_MAX_S = 0.005


class Traffic:
    """A sample of a node's prompts, and the curve of it; state of the shard's event loop.

    Curve after curve is worked out from what the sample has then, while there are new prompts.
    """

    def __init__(self, settings: ShardSettings) -> None:
        arena, nvme = settings.arena, settings.nvme
        self._host_bytes = settings.spec.capacity
        self._disk_bytes = 0 if nvme is None else nvme.spec.capacity
        # Eviction keeps this much free.
        self._full = 1 - arena.free_target
        self._rules = {"policy": arena.policy, "admission": settings.admission}
        self._sample = TrafficSample(int(self._host_bytes * self._full))
        self._steps: Generator[None, None, dict[str, dict[str, Any]]] | None = None
        self._seen = 0  # prompts in the sample when the last curve was begun
        self._begun: dict[str, Any] = {}
        self._curve: dict[str, Any] = {"namespaces": {}}
        self._made_at: float | None = None
        self._budget_s = self._stepped_at = 0.0

    def note(self, origin: Origin, block_bytes: int, packed: object) -> int:
        """Take an engine's prompts, if it has `packed` any; return the limit for its next ones.

        `block_bytes` are those of its blocks on this node. ConfigError: they are not valid.
        """
        sizes = {
            "block_bytes": block_bytes,
            "tokens_per_block": origin.namespace.tokens_per_block,
        }
        name = origin.namespace.digest().hex()[:8]
        if packed:
            prompts = SampledPrompts.unpack(packed)
            self._sample.add(name, prompts, **sizes, now=time.monotonic())
        return self._sample.limit(name, **sizes)

    def step(self, now: float) -> None:
        """Go on with the present curve for as long as the share of a core allows since the last."""
        self._budget_s += _CPU_SHARE * (now - self._stepped_at)
        until_s = time.thread_time() + min(self._budget_s, _BUDGET_MAX_S)
        self._stepped_at = now
        if self._steps is None and self._sample.num_seen > self._seen and self._budget_s > 0:
            self._begin()
        while self._steps is not None and time.thread_time() < until_s:
            try:
                next(self._steps)
            except StopIteration as end:
                self._curve = {**self._begun, "namespaces": end.value}
                self._steps, self._made_at = None, time.monotonic()
        self._budget_s = until_s - time.thread_time()

    def status(self) -> dict[str, Any]:
        """Return the last curve as plain data, see docs/sizing.md; from any thread."""
        made_at = self._made_at
        return {
            "host_bytes": self._host_bytes,
            "disk_bytes": self._disk_bytes,
            "policy": self._rules["policy"],
            "lost_prompts": self._sample.num_lost,
            "age_s": None if made_at is None else round(time.monotonic() - made_at, 1),
            **self._curve,
        }

    def _begin(self) -> None:
        self._seen = self._sample.num_seen
        window = self._sample.window()
        sizes = [int(self._host_bytes * part) for part in SIZES]
        self._begun = {
            "sizes": sizes,
            "seconds": round(window.seconds, 1),
            "sampled_prompts": window.trace.num_requests,
            "distinct_bytes": window.trace.num_unique * window.quantum,
        }
        full = [int(size * self._full) for size in sizes]
        self._steps = curve(window, full, disk_bytes=self._disk_bytes, **self._rules)
