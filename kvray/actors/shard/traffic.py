"""What a shard keeps of its engines' requests: notes for people, and a sample of prompts.

The sample tells what more or less memory would be worth, worked out a little at a time.
"""

import contextlib
import time
from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice
from typing import Any

from kvray.actors.shard.settings import ShardSettings
from kvray.actors.staging.replicas import Origin
from kvray.errors import ConfigError
from kvray.store.sizing import CPU_SHARE, PROMPTS_MAX, Plan, SampledPrompts, Steps, TrafficSample
from kvray.trace.request_note import NOTES_MAX, unpack

_BUDGET_MAX_S = 0.005
_FIRST_SHARE = 0.02
"""Of a core, for the first curve."""
_PROMPTS_FIRST = 512
"""Prompts of the first curve, which is to be there soon; every later one has twice as many."""
_CURVE_S = 30.0
"""A curve begins so long after the last one began, or the shard, at least."""


class Traffic:
    """A sample of a node's prompts, and the curve of it; state of the shard's event loop.

    Curve after curve is worked out from what the sample has then, while there are new prompts.
    """

    def __init__(self, settings: ShardSettings) -> None:
        self._settings = settings
        self._geometry = settings.spec.geometry()
        usable = settings.spec.capacity * (1 - settings.arena.free_target)
        self._sample = TrafficSample(int(usable))
        self._prompts_max = _PROMPTS_FIRST
        self._seen = 0  # prompts in the sample when the last curve was begun
        self._drawing: tuple[Plan, Steps] | None = None  # the present curve, and what is left of it
        self._curve: tuple[float, dict[str, Any]] | None = None
        """When the last curve was done, and the curve."""
        self._budget_s = 0.0
        self._stepped_at = time.monotonic()
        self._begun_at = self._stepped_at

    def note(self, origin: Origin, block_bytes: int, packed: object) -> int:
        """Take an engine's prompts, if it has `packed` any; return the limit for its next ones.

        `block_bytes` are those of its blocks in this node's memory, see `slot_bytes`.
        ConfigError: they are not valid.
        """
        name = origin.namespace.digest().hex()[:8]
        if packed:
            self._sample.add(
                name,
                SampledPrompts.unpack(packed),
                block_bytes=block_bytes,
                tokens_per_block=origin.namespace.tokens_per_block,
                now=time.monotonic(),
            )
        return self._sample.limit(name, block_bytes=block_bytes)

    def slot_bytes(self, part_bytes: int) -> int:
        """Return what a part of a block takes of the memory, with its share of a slab's rest."""
        geometry = self._geometry
        return geometry.slab_bytes // max(1, geometry.slab_bytes // geometry.stride(part_bytes))

    def step(self, now: float) -> None:
        """Go on with the present curve for as long as the share of a core allows since the last."""
        share = _FIRST_SHARE if self._curve is None else CPU_SHARE
        earned_s = self._budget_s + share * (now - self._stepped_at)
        until_s = time.thread_time() + min(earned_s, _BUDGET_MAX_S)
        self._stepped_at = now
        while time.thread_time() < until_s and self._go_on(now):
            pass
        self._budget_s = until_s - time.thread_time()

    def status(self) -> dict[str, Any]:
        """Return the last curve as plain data, see docs/sizing.md; from any thread."""
        made_at, curve = self._curve or (None, {"namespaces": {}})
        age_s = None if made_at is None else round(time.monotonic() - made_at, 1)
        lost = self._sample.num_lost
        return {**curve, "age_s": age_s, "lost_prompts": lost}

    def plan(self, prompts_max: int = PROMPTS_MAX) -> Plan:
        """Return what a curve of this moment is drawn from."""
        settings = self._settings
        return Plan(
            window=self._sample.window(prompts_max),
            host_bytes=settings.spec.capacity,
            full=1 - settings.arena.free_target,
            disk_bytes=0 if settings.nvme is None else settings.nvme.spec.capacity,
            policy=settings.arena.policy,
            admission=settings.admission,
        )

    def _go_on(self, now: float) -> bool:
        """Do a step; return whether there is another."""
        if self._drawing is None:
            if self._sample.num_seen == self._seen or now < self._begun_at + _CURVE_S:
                return False
            self._seen, self._begun_at = self._sample.num_seen, now
            plan = self.plan(self._prompts_max)
            self._drawing = plan, plan.steps()
            self._prompts_max = min(2 * self._prompts_max, PROMPTS_MAX)
        plan, steps = self._drawing
        try:
            next(steps)
        except StopIteration as end:
            self._curve, self._drawing = (time.monotonic(), plan.drawn(end.value)), None
        return True


_BYTES_MAX = 16 * 2**20
"""Of all notes; one has some hundred bytes, and up to 2.5 KiB if it is a miss."""
_OVERHEAD = 300  # bytes that keeping one takes beside its own
FOUND_MAX = 1000


class RequestLog:
    """The latest requests of a node's replicas; state of the shard's event loop.

    They stay when their engine is gone. The oldest note is dropped first, so the log covers the
    same period for every replica.
    """

    def __init__(self, bytes_max: int = _BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._num_bytes = 0
        self._packed: OrderedDict[tuple[str, int, int], bytes] = OrderedDict()

    def note(self, origin: Origin, notes: Sequence[Any]) -> int:
        """Take notes of one rank; a later one of the same request takes the place of the first.

        Returns how many are not valid, and were not taken. ConfigError: they are no notes at all.
        """
        if not isinstance(notes, list | tuple) or len(notes) > NOTES_MAX:
            raise ConfigError(f"Notes on requests are a list of at most {NOTES_MAX}.")
        found = []
        for packed in notes:
            with contextlib.suppress(ConfigError):
                found.append((unpack(packed).request_id, packed))
        for request_id, packed in found:
            key = origin.replica, origin.rank, request_id
            before = self._packed.pop(key, None)
            if before is not None:
                self._num_bytes -= _OVERHEAD + len(before)
            self._packed[key] = packed
            self._num_bytes += _OVERHEAD + len(packed)
        while self._num_bytes > self._bytes_max:
            _, gone = self._packed.popitem(last=False)
            self._num_bytes -= _OVERHEAD + len(gone)
        return len(notes) - len(found)

    def find(
        self, replica: str | None, request: int | str | None, last: int
    ) -> list[tuple[str, int, bytes]]:
        """Return (replica, rank, packed note) of up to `last` requests, the latest first.

        Without `replica` or `request` all count; a text is part of what a server calls it.
        """
        part = request.encode(errors="replace") if isinstance(request, str) else b""
        found = (
            (name, rank, self._packed[name, rank, number])
            for name, rank, number in reversed(self._packed)
            if replica in (None, name)
            and (part in self._packed[name, rank, number] if part else request in (None, number))
        )
        return list(islice(found, max(0, min(last, FOUND_MAX))))
