"""One fetch of staged blocks: its steps, its orders, and how the blocks came."""

import asyncio
import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from kvray.actors.mover.orders import FetchReport, Span
from kvray.actors.staging.peers import mover_of
from kvray.actors.staging.plan import FetchStep
from kvray.identity.block import KEY_BYTES, BlockKey
from kvray.trace.arrival import HERE, NVME, Arrivals, arrivals_of

FETCH_BLOCKS_MAX = 4096
"""Blocks of one fetch; more come in several fetches, one after the other."""


class Fetch:
    """One order to the node's mover or disk, which stages may wait for."""

    def __init__(self, keys: Sequence[BlockKey], steps: Sequence[FetchStep]) -> None:
        self.keys = keys
        self.steps = tuple(steps)
        self.blocks = [
            (keys[block], step.part) for step in steps for block in range(step.start, step.stop)
        ]
        self.finished = asyncio.Event()
        self.report: FetchReport | None = None
        """None while it is under way, and if the mover did not answer."""

    @property
    def is_whole(self) -> bool:
        """Whether every block has arrived."""
        return self.report is not None and not self.lacking()

    def lacking(self) -> frozenset[str]:
        """Return the movers that did not give all that was asked of them."""
        assert self.report is not None, "it has finished"
        return frozenset(
            mover_of(step.shard)
            for step, here in zip(self.steps, self.report.here, strict=False)
            if here < step.stop - step.start
        )

    def arrived(
        self, keys: Sequence[BlockKey], transport_of: Callable[[str], str]
    ) -> Iterator[tuple[FetchStep, str]]:
        """Yield the steps that brought blocks of a prefix, all here now, and their transports.

        Without a report every step counts: the blocks may be committed before the mover says so.
        Then `transport_of` gives the transport by which a shard gave blocks last, or an empty text.
        """
        # Keys are chained: two prefixes with one key in common share all before it.
        shared = bisect.bisect_left(
            range(min(len(keys), len(self.keys))),
            True,
            key=lambda block: keys[block] != self.keys[block],
        )
        here = self.report.here if self.report is not None else ()
        for step, num_here in itertools.zip_longest(self.steps, here[: len(self.steps)]):
            is_own = step.shard == NVME
            stop = min(step.stop, shared)
            if self.report is None:
                transport = NVME if is_own else transport_of(step.shard) or HERE
            else:
                stop = min(stop, step.start + (num_here or 0))
                source = self.report.sources.get(NVME if is_own else mover_of(step.shard))
                transport = source.transport if source is not None else ""
            if stop > step.start and transport:
                yield replace(step, stop=stop), transport


def arrivals_by(
    fetches: Sequence[Fetch], keys: Sequence[BlockKey], transport_of: Callable[[str], str]
) -> Arrivals:
    """Return how the blocks of a prefix, all here now, came by the `fetches` of a stage.

    Blocks in no fetch were here before.
    """
    if not fetches:
        return ()
    ways: list[tuple[str, str] | None] = [None] * len(keys)
    for fetch in fetches:
        for step, transport in fetch.arrived(keys, transport_of):
            source = "" if step.shard == NVME else step.shard
            ways[step.start : step.stop] = [(transport, source)] * (step.stop - step.start)
    return arrivals_of(ways)


def first_steps(steps: Sequence[FetchStep]) -> list[FetchStep]:
    """Return the first of `steps`, as many as one fetch takes."""
    taken, room = [], FETCH_BLOCKS_MAX
    for step in steps:
        if room <= 0:
            break
        taken.append(replace(step, stop=min(step.stop, step.start + room)))
        room -= step.stop - step.start
    return taken


def spans_of(
    keys: Sequence[BlockKey], steps: Iterable[FetchStep], windowed: frozenset[int]
) -> Iterator[Span]:
    """Yield the spans of a mover's order to fetch `steps` of a prefix."""
    for step in steps:
        yield Span(
            source=mover_of(step.shard),
            part=step.part,
            keys=b"".join(keys[step.start : step.stop]),
            parent=keys[step.start - 1] if step.start else b"",
            depth=step.start,
            needs_parent=step.start > 0 and step.part not in windowed,
        )


def rest_of(span: Span, num_blocks: int) -> Span:
    """Return a span without its first blocks, for a node that may not have those.

    Its blocks are useful without their parents, which the asking node has.
    """
    at = num_blocks * KEY_BYTES
    return replace(
        span,
        keys=span.keys[at:],
        parent=span.keys[at - KEY_BYTES : at] if num_blocks else span.parent,
        depth=span.depth + num_blocks,
        needs_parent=False,
    )
