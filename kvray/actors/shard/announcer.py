"""Turns changes of a node's tiers into announcements, a stream of them for each partition.

For the lookup, a node either has a block, in memory or on disk, or it does not. A block that leaves
one tier is announced as gone only if the other tier lacks it. A block found in one tier is
announced even if the other has it too. So if two changes cross, the later look corrects them.
"""

import time
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from random import Random
from typing import Any

import numpy as np

from kvray.actors.lookup.partitions import shares
from kvray.actors.shard.lookup_stream import Announce, LookupStream
from kvray.actors.shard.tier_delta import Entries, TierDelta
from kvray.store import ArenaOwner
from kvray.store.block_history import CORRUPT, DISK_ROOM, HOST, NVME, WRITER
from kvray.store.nvme import NvmeStore


class Announcer:
    """One shard's announcements; `collect` and `send` are called one after the other.

    Each partition is told by a stream of its own. So one that is slow or starts over keeps nothing
    from the others. What the shard knows of its blocks is there once, for all streams.
    """

    def __init__(self, shard: str, *lookups: Announce) -> None:
        """`lookups` bring announcements to the partitions, in their order."""
        self.namespaces: frozenset[int] = frozenset()
        """Those of all shards, as arenas number them; none, if the lookup has just started."""
        self._arena_id = ""
        self._store: NvmeStore | None = None
        # The arena's, and the disk's if there is one.
        self._deltas: list[TierDelta] = []
        # Its own numbers: shards that start together must not send together.
        random = Random(shard)
        self._streams = [
            LookupStream(
                shard,
                announce,
                partial(self._held, partition),
                what=f"partition {partition} of the lookup" if partition else "the lookup",
                names_ranks=not partition,
                random=random,
            )
            for partition, announce in enumerate(lookups)
        ]

    @property
    def num_shards(self) -> int:
        """Live shards of the tier, as a partition said last; 0 while none answers."""
        return max(stream.num_shards for stream in self._streams)

    @property
    def is_telling(self) -> bool:
        """Whether the answer of a partition is soon to come."""
        return any(stream.is_telling for stream in self._streams)

    def status(self) -> dict[str, Any]:
        """Return how far the lookup is behind; from any thread.

        `lag_s` is the age of the oldest change that it was not told of, `seconds` the sum of what
        those that it was told of had at that time, one for each of the `announcements` with any.
        """
        now = time.monotonic()
        return {
            "lag_s": max(stream.lag_s(now) for stream in self._streams),
            "announcements": sum(stream.num_told for stream in self._streams),
            "seconds": sum(stream.telling_s for stream in self._streams),
        }

    def name_ranks(self, ranks: Iterable[tuple[str, int]], namespaces: Iterable[int]) -> None:
        """Announce that these (replica, rank), and no others, are registered here.

        `namespaces` are those of blocks and engines here, as arenas number them.
        """
        self._streams[0].name_ranks(sorted(ranks), tuple(sorted(namespaces)))

    @property
    def is_leaving(self) -> bool:
        """Whether the node is to go."""
        return any(stream.is_leaving for stream in self._streams)

    def name_leaving(self, is_leaving: bool) -> None:
        """Have it said, with the next heartbeat, whether the node is to go."""
        for stream in self._streams:
            stream.is_leaving = is_leaving

    def collect(self, owner: ArenaOwner, store: NvmeStore | None = None) -> bool:
        """Take answers and note changes in both tiers; return whether to announce any at once."""
        self._follow(owner, store)
        for stream in self._streams:
            stream.hear()
            self._read(stream, owner)
        for delta in self._deltas:
            changed = delta.collect()
            if changed is not None:
                gone, come = changed
                self._note_gone(owner, gone, is_disk=delta is not self._deltas[0])
                for other in self._deltas:
                    if other is not delta and len(gone):
                        gone = gone.chosen(~other.stands_in(gone))
                self._note(gone, False)
                self._note(come, True)
        return any(stream.is_eager for stream in self._streams)

    def send(self, shard_epoch: int, *, is_due: bool = True) -> None:
        """Announce to each partition what was noted for it, or a heartbeat if one `is_due`."""
        for stream in self._streams:
            if is_due or stream.is_eager:
                stream.send(shard_epoch)

    def _follow(self, owner: ArenaOwner, store: NvmeStore | None) -> None:
        """Look at this arena and this store from now on, should they be others than before."""
        if owner.arena.arena_id != self._arena_id:
            self._arena_id, self._store = owner.arena.arena_id, None
            self._start_over()
            self._deltas = [TierDelta(lambda: owner.arena.tables, owner.section)]
        if store is self._store:
            return
        if self._store is not None:
            # Blocks on a failed disk cannot be read: announce everything again, without them.
            self._start_over()
        del self._deltas[1:]
        if store is not None:
            self._deltas.append(TierDelta(lambda: store.tables, store.section))
        self._store = store

    def _start_over(self) -> None:
        for stream in self._streams:
            stream.start_over(self._arena_id)

    def _read(self, stream: LookupStream, owner: ArenaOwner) -> None:
        answers, stream.answers = stream.answers, []
        for answer in answers:
            if stream is self._streams[0]:
                self.namespaces = frozenset(answer.namespaces)
            parts = np.flatnonzero(self._deltas[0].num_held).tolist()
            owner.give_up(answer.partial_keys, parts)

    def _note_gone(self, owner: ArenaOwner, gone: Entries, *, is_disk: bool) -> None:
        """Have it remembered what has left a tier without the owner's doing."""
        tier, cause = (NVME, DISK_ROOM) if is_disk else (HOST, WRITER)
        causes = np.full(len(gone), cause)
        if gone.is_corrupt is not None:
            causes[gone.is_corrupt] = CORRUPT
        owner.history.note_rest(gone.keys[:, 0], tier, causes, now=time.time())

    def _note(self, entries: Entries, added: bool) -> None:
        masks = shares(entries.heads, len(self._streams))
        for stream, mask in zip(self._streams, masks, strict=True):
            stream.note(entries if mask is None else entries.chosen(mask), added)

    def _held(self, partition: int) -> Iterator[Entries]:
        """Yield the blocks that a partition is told of."""
        for delta in self._deltas:
            held = delta.held()
            mask = next(islice(shares(held.heads, len(self._streams)), partition, None))
            yield held if mask is None else held.chosen(mask)
