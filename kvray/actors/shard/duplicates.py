"""Finds out which blocks another node keeps, so that last copies are evicted last.

Rendezvous hashing decides which of several holders keeps a block: each draws a number from its own
name and the block's, and the highest keeps it. Invariant: of holders that know of each other one
keeps the block, and that one never counts it as a duplicate. So two holders never both evict it
because each saw the other's copy, and they need not talk about it.

The lookup's answer is some seconds old when it is used. The keeper may have evicted the block by
then, and the last copies may go as duplicates: that costs a miss and nothing else.
"""

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvray.actors.names import LOOKUP_NAME
from kvray.actors.ray_glue.arguments import in_pieces
from kvray.actors.staging.ask import Ask
from kvray.errors import KVRayError
from kvray.index import Run
from kvray.store.duplicates import Question
from kvray.store.retention import Retention

Array = npt.NDArray[Any]
T = TypeVar("T")

_EVERY_S = 1.0
_ANSWER_S = 1.0
_ASKED_PER_S = 16
"""Questions a second of all shards together: the shards of a large tier ask less often."""


class Duplicates:
    """One shard's questions to the lookup; its event loop never waits for them."""

    def __init__(
        self,
        retention: Retention,
        *,
        shard: str,
        ask: Ask,
        num_shards: Callable[[], int],
    ) -> None:
        self._retention = retention
        self._shard = shard
        self._ask = ask
        self._num_shards = num_shards
        self._due_at = 0.0
        self._round: asyncio.Task[None] | None = None
        self._work: asyncio.Future[Any] | None = None

    def tick(self, now: float, *, free_share: float) -> None:
        """Ask when it is time; called often. `free_share` is as for `Retention.ask`."""
        num_shards = self._num_shards()
        is_busy = self._round is not None and not self._round.done()
        if num_shards > 1 and now >= self._due_at and not is_busy:
            self._due_at = now + max(_EVERY_S, num_shards / _ASKED_PER_S)
            self._round = asyncio.get_running_loop().create_task(self._find_out(free_share))

    async def close(self) -> None:
        """Ask no more. Twice is fine."""
        if self._round is not None:
            self._round.cancel()
            # A thread may still read the arena, which closes next.
            await asyncio.wait([one for one in (self._round, self._work) if one is not None])

    async def _find_out(self, free_share: float) -> None:
        # Without an answer the policy alone decides.
        with contextlib.suppress(KVRayError):
            question = await self._in_thread(lambda: self._retention.ask(free_share))
            if len(question.slots):
                keys = in_pieces(question.keys.tobytes())
                runs = await self._ask(LOOKUP_NAME, "locate", *keys, timeout_s=_ANSWER_S)
                await self._in_thread(lambda: self._answer(question, runs))

    def _answer(self, question: Question, runs: Sequence[Run]) -> None:
        mask = are_duplicates(question.names, question.parts, runs, self._shard)
        self._retention.answer(question, mask)

    async def _in_thread(self, function: Callable[[], T]) -> T:
        """Run `function`, which may rank all blocks, in a thread."""
        work = asyncio.get_running_loop().run_in_executor(None, function)
        self._work = work
        return await asyncio.shield(work)


def are_duplicates(names: Array, parts: Array, runs: Sequence[Run], shard: str) -> Array:
    """Return a mask of the blocks that another shard keeps, so that `shard` need not.

    `names` are u64 [num_blocks, 4] and uniform: of equal names the same shard keeps all blocks that
    it has. `parts` are i8 [num_blocks]. `runs` has the holders, from `Index.locate`; `shard` holds
    all blocks, whether or not `runs` say so yet.
    """
    kept_elsewhere = np.zeros(len(names), dtype=bool)
    highest = int(parts.max(initial=0))
    for holders, rows in _by_holders(runs):
        drawn = _draw(names[rows], shard)
        for other, mask in holders.items():
            if other != shard:
                has_part = np.array([mask >> part & 1 for part in range(highest + 1)], dtype=bool)
                theirs = _draw(names[rows], other)
                # A holder that any other beats does not keep the block.
                is_beaten = (theirs > drawn) | ((theirs == drawn) & (other > shard))
                kept_elsewhere[rows] |= is_beaten & has_part[parts[rows]]
    return kept_elsewhere


def _by_holders(runs: Sequence[Run]) -> Iterator[tuple[Mapping[str, int], Array]]:
    numbers: dict[frozenset[tuple[str, int]], int] = {}
    which = [numbers.setdefault(frozenset(run.holders.items()), len(numbers)) for run in runs]
    lengths = np.diff([0, *(run.stop for run in runs)])
    number_of = np.repeat(np.array(which, dtype=np.int64), lengths)
    order = np.argsort(number_of, kind="stable")
    ends = np.cumsum(np.bincount(number_of, minlength=len(numbers)))
    # The last split is empty.
    for holders, rows in zip(numbers, np.split(order, ends), strict=False):
        yield dict(holders), rows


def _draw(names: Array, shard: str) -> Array:
    """Return the number of `shard` for each of `names`, u64: the finalizer of splitmix64."""
    own = hashlib.sha256(shard.encode()).digest()[:8]
    drawn = names[:, 0] ^ np.uint64(int.from_bytes(own, "little"))
    drawn = (drawn ^ drawn >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    drawn = (drawn ^ drawn >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    mixed: Array = drawn ^ drawn >> np.uint64(31)
    return mixed
