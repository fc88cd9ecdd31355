"""Lets a node know which of its blocks another node keeps, so that last copies go last.

Who keeps a block that several hold is decided by rendezvous hashing: each holder draws a number
from its own name and that of the block, and the highest keeps it. Invariant: of holders that know
of each other exactly one finds that it keeps the block, and it never counts it as spare. So two of
them never both let go of it because each saw the other's, and nobody has to talk about it.

What the lookup says is some seconds old when it is used. Its keeper may have let go of a block
meanwhile, by its own policy or by its end: then the last copies may go as if they were not, which
costs a miss. No block is ever served for another one by that.
"""

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvray.actors.arguments import in_pieces
from kvray.actors.async_calls import Ask
from kvray.actors.ray_calls import LOOKUP_NAME
from kvray.errors import KVRayError
from kvray.index import Run
from kvray.store.retention import Retention
from kvray.store.spare_blocks import Question

Array = npt.NDArray[Any]
T = TypeVar("T")

_EVERY_S = 1.0
_ANSWER_S = 1.0
_ASKED_PER_S = 16
"""Questions that all shards together put to the lookup: large tiers ask less often."""


class Spares:
    """One shard's questions to the lookup; called by its event loop, which never waits for them."""

    def __init__(
        self,
        retention: Retention,
        *,
        shard: str,
        ask: Ask,
        num_shards: Callable[[], int],
    ) -> None:
        """Tell `retention` what is spare.

        Args:
            retention: of the shard's arena.
            shard: its name.
            ask: calls the lookup.
            num_shards: live shards of the tier, as far as is known; nobody is asked for one.
        """
        self._retention = retention
        self._shard = shard
        self._ask = ask
        self._num_shards = num_shards
        self._due_at = 0.0
        self._round: asyncio.Task[None] | None = None
        self._work: asyncio.Future[Any] | None = None

    def tick(self, now: float, *, free_share: float) -> None:
        """Ask if it is time to; called often.

        Args:
            now: monotonic seconds.
            free_share: see `Retention.ask`.
        """
        num_shards = self._num_shards()
        is_busy = self._round is not None and not self._round.done()
        if num_shards > 1 and now >= self._due_at and not is_busy:
            self._due_at = now + max(_EVERY_S, num_shards / _ASKED_PER_S)
            self._round = asyncio.get_running_loop().create_task(self._find_out(free_share))

    async def close(self) -> None:
        """Ask no more. Twice is fine."""
        if self._round is not None:
            self._round.cancel()
            # A thread may be looking at the arena, which is to be closed.
            await asyncio.wait([one for one in (self._round, self._work) if one is not None])

    async def _find_out(self, free_share: float) -> None:
        # Without an answer nothing more is known to be spare, and the order is what it would be.
        with contextlib.suppress(KVRayError):
            question = await self._in_thread(lambda: self._retention.ask(free_share))
            if len(question.slots):
                keys = in_pieces(question.keys.tobytes())
                runs = await self._ask(LOOKUP_NAME, "locate", *keys, timeout_s=_ANSWER_S)
                await self._in_thread(lambda: self._answer(question, runs))

    def _answer(self, question: Question, runs: Sequence[Run]) -> None:
        spare = are_spare(question.names, question.parts, runs, self._shard)
        self._retention.answer(question, spare)

    async def _in_thread(self, function: Callable[[], T]) -> T:
        """Return what `function` returns; all blocks may be ranked for it."""
        work = asyncio.get_running_loop().run_in_executor(None, function)
        self._work = work
        return await asyncio.shield(work)


def are_spare(names: Array, parts: Array, runs: Sequence[Run], shard: str) -> Array:
    """Return a mask of the blocks that another shard keeps: they need not stay at `shard`.

    Args:
        names: u64 [num_blocks, 4], uniform; by them it is decided who keeps a block. Equal ones
            are kept by the same shard, if it has them.
        parts: i8 [num_blocks], which part of each block is meant.
        runs: who has which parts of the blocks, as `Index.locate` says.
        shard: one that has all of them, whether or not `runs` say so yet.
    """
    spare = np.zeros(len(names), dtype=bool)
    highest = int(parts.max(initial=0))
    for holders, rows in _by_holders(runs):
        drawn = _draw(names[rows], shard)
        for other, mask in holders.items():
            if other != shard:
                has_part = np.array([mask >> part & 1 for part in range(highest + 1)], dtype=bool)
                theirs = _draw(names[rows], other)
                # Whoever is beaten by any other holder is not the one that keeps it.
                is_beaten = (theirs > drawn) | ((theirs == drawn) & (other > shard))
                spare[rows] |= is_beaten & has_part[parts[rows]]
    return spare


def _by_holders(runs: Sequence[Run]) -> Iterator[tuple[Mapping[str, int], Array]]:
    """Yield the different holders, and the rows of all blocks that are held so."""
    numbers: dict[frozenset[tuple[str, int]], int] = {}
    which = [numbers.setdefault(frozenset(run.holders.items()), len(numbers)) for run in runs]
    lengths = np.diff([0, *(run.stop for run in runs)])
    number_of = np.repeat(np.array(which, dtype=np.int64), lengths)
    order = np.argsort(number_of, kind="stable")
    ends = np.cumsum(np.bincount(number_of, minlength=len(numbers)))
    # After the last of them there is nothing left.
    for holders, rows in zip(numbers, np.split(order, ends), strict=False):
        yield dict(holders), rows


def _draw(names: Array, shard: str) -> Array:
    """Return what `shard` draws for each of `names`, u8: the finalizer of splitmix64."""
    own = hashlib.sha256(shard.encode()).digest()[:8]
    drawn = names[:, 0] ^ np.uint64(int.from_bytes(own, "little"))
    drawn = (drawn ^ drawn >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    drawn = (drawn ^ drawn >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    mixed: Array = drawn ^ drawn >> np.uint64(31)
    return mixed
