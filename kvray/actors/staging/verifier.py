"""Checks blocks of this node before a leader on another node promises them to its engine.

A leader can check its own node's arena only. A rank elsewhere would find a wrong block too late to
say so. Threads of the loop compute the sums: the arena and a lease cross to them, a number comes
back. Blocks that are not checked in time do not count.
"""

import asyncio
import logging
import time

from kvray.actors.staging.plan import Prefix
from kvray.actors.staging.stager import Handovers, Staged
from kvray.errors import KVRayError
from kvray.store import Arena, Held
from kvray.store.arena import lease

_log = logging.getLogger("kvray.shard")

_CHECKS_MAX = 16  # checks at once, with those that nobody waits for now
_PIECE_BYTES = 4 * 2**20  # how much to sum before the time is checked again
_SUMMING_SHARE = 0.8  # share of the time for sums; the rest is for their answers
_CLOSE_S = 1.0


class Verifier:
    """Checks staged blocks; used by the shard's event loop alone."""

    def __init__(self, arena: Arena, handovers: Handovers, *, handover_s: float) -> None:
        self._arena = arena
        self._handovers = handovers
        self._handover_s = handover_s
        self._checks: set[asyncio.Future[int]] = set()
        self._is_closed = False

    async def sound(self, prefix: Prefix, staged: Staged, first: int, *, until: float) -> Staged:
        """Return the part of `staged` that proves sound in time; a bad block is quarantined.

        No rank will load the `first` blocks.
        """
        if staged.num_blocks <= first:
            return staged
        if self._is_closed or len(self._checks) >= _CHECKS_MAX:
            return Staged(num_blocks=0, reason="too_slow")
        # A lease of its own: blocks must stay while they are summed, however long that takes.
        held = self._arena.lease_for(prefix.keys[: staged.num_blocks], prefix.readers)
        if held is None or held.num_blocks <= first:
            self._keep(held)
            return Staged(num_blocks=0, reason="too_slow")
        now = time.monotonic()
        summed_until = now + (until - now) * _SUMMING_SHARE
        check = asyncio.get_running_loop().run_in_executor(
            None, self._count_sound, prefix, held, first, summed_until
        )
        self._checks.add(check)
        check.add_done_callback(lambda _: self._end(check, held))
        await asyncio.wait({check}, timeout=max(0.0, until - now))
        num_sound = check.result() if check.done() and check.exception() is None else first
        if num_sound == staged.num_blocks:
            return staged
        is_late = not check.done() or time.monotonic() >= summed_until
        return Staged(num_blocks=num_sound, reason="too_slow" if is_late else "corrupt")

    async def close(self) -> None:
        """End the checks. Twice is fine."""
        self._is_closed = True
        if self._checks:
            await asyncio.wait(self._checks, timeout=_CLOSE_S)

    def _count_sound(self, prefix: Prefix, held: Held, first: int, until: float) -> int:
        """Return the end of the blocks that are sound for every reader and were summed in time.

        A shorter prefix lacks its window, so with windows it is all or nothing.
        """
        step = max(1, _PIECE_BYTES // sum(prefix.block_bytes.values()))
        is_windowed = any(one.window is not None for reader in prefix.readers for one in reader)
        for start in range(first, held.num_blocks, step):
            stop = min(start + step, held.num_blocks)
            if self._is_closed or time.monotonic() >= until:
                return 0 if is_windowed else start
            run = self._sound_run(prefix, held, start, stop)
            if run < stop:
                return 0 if is_windowed else run
        return held.num_blocks

    def _sound_run(self, prefix: Prefix, held: Held, start: int, stop: int) -> int:
        """Return the first block from `start` to `stop` that is not sound; `stop` if all are."""
        run = stop
        for one, reader in zip(held.leases, prefix.readers, strict=True):
            for block, places in lease.places(reader, held.num_blocks, first=start, stop=stop):
                sound = self._arena.sound(one, places)
                if not sound.all():
                    run = min(run, block + int(sound.argmin()))
        return run

    def _end(self, check: "asyncio.Future[int]", held: Held) -> None:
        self._checks.discard(check)
        self._keep(held)
        if not check.cancelled():
            error = check.exception()  # a late one has no caller
            if error is not None and not isinstance(error, KVRayError):
                _log.error("a check ended by a defect", exc_info=error)

    def _keep(self, held: Held | None) -> None:
        if held is not None:
            self._handovers.keep(held, until=time.monotonic() + self._handover_s)
