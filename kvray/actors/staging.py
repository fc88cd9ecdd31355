"""Which blocks to bring here, from which shards, and whether that is worth it; pure."""

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvray.store import Wanted

Mask = npt.NDArray[np.bool_]
Run = tuple[int, Mapping[str, int]]
"""Where blocks with the same holders end, and shard -> mask of the parts that it has of them."""
Reason = Literal["none", "not_stored", "too_slow", "corrupt", "cheaper_to_recompute", "store_down"]
"""Why no more of a prefix is here; `none`: all of it is."""

CHUNK_BLOCKS = 64
"""A run this long comes from one shard; a longer one is dealt out to all that have it."""
_ENDS_MAX = 8
"""Ends of a prefix whose costs are compared."""
_RUNS_MAX = 64
"""Runs of all parts that one plan looks at, so that it takes milliseconds whatever the tier looks
like; the next plan looks at what follows."""
_RUNS_MIN = 4
_SHARDS_MAX = 16
"""Shards among which one plan chooses."""
_CHUNKS_MAX = 32
"""Chunks that a prefix is dealt out in, or the chunks are larger."""
_UNMEASURED_BYTES_PER_S = 10e9
"""More than any node was seen to give: what was not measured is tried."""

_Stops = dict[int, dict[str, npt.NDArray[np.int64]]]
"""Part -> shard -> for each block, where the run of blocks that the shard has ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """What is known of the way to another shard's blocks."""

    latency_s: float = 0.0
    bytes_per_s: float | None = None
    """None: not measured; counts as free when costs are compared."""
    is_doubtful: bool = False
    """It failed last: taken only for what nobody else has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """A prefix that somebody wants here."""

    num_blocks: int
    wanted: tuple[Wanted, ...]
    """What makes a block whole, of all readers together."""
    block_bytes: Mapping[int, int]
    """Part -> bytes of one block of it."""
    seconds_per_block: float = 0.0
    """What computing a block costs whoever asks; 0: unknown, and bringing it is always worth it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Blocks `start` to `stop` of one part, to be brought from one shard."""

    shard: str
    part: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingPlan:
    """What to bring, parents before their children."""

    num_blocks: int
    """Length of the prefix that is here once all pieces are."""
    pieces: tuple[Piece, ...] = field(default=())
    reason: Reason = "none"
    """Why the prefix is not longer."""
    seconds: float = 0.0
    """What bringing it is expected to take."""


def plan_staging(
    wish: Wish, here: Mapping[int, Mask], runs: Sequence[Run], peers: Mapping[str, Peer]
) -> StagingPlan:
    """Return which missing blocks to bring from where.

    The prefix ends before the first block that nobody has, or where going on costs more time than
    it saves. With windows a prefix needs of some parts the last blocks only. Where the holders
    change very often it ends after some runs: once these are here, the next plan has the rest.

    Args:
        wish: the prefix.
        here: part -> which of its blocks are here.
        runs: who has what, from the first block on; what follows the last run nobody has.
        peers: the shards that may be asked, who comes first is preferred to his equals; others in
            `runs` are passed over.
    """
    begin = int(_ends(wish, here)[-1])
    runs_max = max(_RUNS_MIN, _RUNS_MAX // max(1, len(wish.block_bytes)))
    first = bisect.bisect_right(runs, begin, key=lambda run: run[0])
    plan = _plan(wish, begin, here, _slice(runs, first, first + runs_max), peers)
    is_windowed = any(one.window is not None for one in wish.wanted)
    if is_windowed and not plan.pieces and first + runs_max < len(runs):
        # A prefix may be of use at its end only.
        plan = _plan(wish, begin, here, _slice(runs, len(runs) - runs_max, len(runs)), peers)
    return plan


def longest_prefix(wish: Wish, here: Mapping[int, Mask]) -> int:
    """Return how many leading blocks can be used with what is `here` of each part."""
    return int(_ends(wish, here)[-1])


def _slice(runs: Sequence[Run], first: int, last: int) -> Sequence[Run]:
    """Return some of the runs, as if nobody had what comes before and after."""
    before: list[Run] = [(runs[first - 1][0], {})] if first else []
    return [*before, *runs[first:last]]


def _plan(
    wish: Wish, begin: int, here: Mapping[int, Mask], runs: Sequence[Run], peers: Mapping[str, Peer]
) -> StagingPlan:
    """Return the plan for `runs`, all of which are looked at; the first `begin` blocks are here."""
    held = _held(wish, runs, _chosen(wish, runs, peers))
    everywhere = {one.part: here[one.part].copy() for one in wish.wanted}
    for parts in held.values():
        for part, mask in parts.items():
            everywhere[part] |= mask
    ends = _ends(wish, everywhere)
    reach = int(ends[-1])
    stops: _Stops = {}
    for shard, parts in held.items():
        for part, mask in parts.items():
            stops.setdefault(part, {})[shard] = _stops(mask)
    plans = (
        _plan_until(wish, end, here, stops, peers)
        for end in _candidates(ends[ends > begin], runs, wish.seconds_per_block > 0)
    )
    best = max(
        plans,
        key=lambda plan: (_saved(wish, begin, plan), plan.num_blocks),
        default=StagingPlan(num_blocks=begin),
    )
    if _saved(wish, begin, best) < 0:
        best = StagingPlan(num_blocks=begin)
    reason: Reason = "cheaper_to_recompute" if best.num_blocks < reach else "not_stored"
    if best.num_blocks == wish.num_blocks:
        reason = "none"
    return StagingPlan(
        num_blocks=best.num_blocks, pieces=best.pieces, reason=reason, seconds=best.seconds
    )


def _ends(wish: Wish, here: Mapping[int, Mask]) -> npt.NDArray[np.int64]:
    """Return the lengths, ascending from 0, of all prefixes that have what they need."""
    lengths = np.arange(1, wish.num_blocks + 1)
    fits = np.ones(wish.num_blocks, dtype=bool)
    for part, window in wish.wanted:
        # How many blocks in a row are here up to each.
        in_a_row = lengths - np.maximum.accumulate(np.where(here[part], 0, lengths))
        fits &= in_a_row >= (lengths if window is None else np.minimum(lengths, window))
    return np.append(0, lengths[fits])


def _chosen(wish: Wish, runs: Sequence[Run], peers: Mapping[str, Peer]) -> list[str]:
    """Return the shards to choose from: enough for all parts of the first blocks, then others."""
    order = sorted(peers, key=lambda shard: peers[shard].is_doubtful)
    places = {shard: place for place, shard in enumerate(order)}
    shards_max = max(_SHARDS_MAX, len(wish.block_bytes))
    wanted = sum(1 << part for part in wish.block_bytes)
    ranked = [sorted(holders.keys() & places.keys(), key=places.__getitem__) for _, holders in runs]
    chosen: dict[str, None] = {}
    for (_, holders), shards in zip(runs, ranked, strict=True):
        lacking = wanted
        for shard in shards:
            if shard in chosen:
                lacking &= ~holders[shard]
        for shard in shards:
            if lacking & holders[shard] and len(chosen) < shards_max:
                chosen[shard] = None
                lacking &= ~holders[shard]
    for shards in ranked:
        for shard in shards[: max(0, shards_max - len(chosen))]:
            chosen[shard] = None
    return list(chosen)


def _held(wish: Wish, runs: Sequence[Run], shards: Sequence[str]) -> dict[str, dict[int, Mask]]:
    """Return shard -> part -> which blocks it has, of the parts that are wanted."""
    stops = [min(stop, wish.num_blocks) for stop, _ in runs]
    lengths = np.diff([0, *stops])
    held: dict[str, dict[int, Mask]] = {}
    for shard in shards:
        by_run = [holders.get(shard, 0) for _, holders in runs]
        # There are few different masks, however many runs.
        different = sorted(set(by_run))
        numbers = {bits: number for number, bits in enumerate(different)}
        of_block = np.repeat([numbers[bits] for bits in by_run], lengths)
        for part in {one.part for one in wish.wanted}:
            has = np.array([bits >> part & 1 == 1 for bits in different])
            if has.any():
                mask = np.zeros(wish.num_blocks, dtype=bool)
                mask[: len(of_block)] = has[of_block]
                held.setdefault(shard, {})[part] = mask
    return held


def _candidates(ends: Any, runs: Sequence[Run], has_price: bool) -> list[int]:
    """Return the ends to compare: the last and, where costs count, those where holders change."""
    if not len(ends):
        return []
    last = int(ends[-1])
    if not has_price:
        return [last]
    stops = sorted({stop for stop, _ in runs if stop < last}, reverse=True)
    reachable = set(ends.tolist())
    return [last, *(stop for stop in stops if stop in reachable)][:_ENDS_MAX]


def _saved(wish: Wish, begin: int, plan: StagingPlan) -> float:
    """Return how much sooner the prefix is here than computed; nothing is known without a price."""
    if not wish.seconds_per_block:
        return 0.0
    return (plan.num_blocks - begin) * wish.seconds_per_block - plan.seconds


def _plan_until(
    wish: Wish,
    end: int,
    here: Mapping[int, Mask],
    stops: _Stops,
    peers: Mapping[str, Peer],
) -> StagingPlan:
    """Return the plan that makes the first `end` blocks whole; all of them are somewhere."""
    deal = _Deal(wish, stops, peers)
    missing = sorted(
        (start, part, stop)
        for part, first in _first_needed(wish, end).items()
        for start, stop in _gaps(here[part], first, end)
    )
    pieces = [piece for start, part, stop in missing for piece in deal.pieces(part, start, stop)]
    pieces.sort(key=lambda piece: (piece.start, piece.part))
    return StagingPlan(num_blocks=end, pieces=tuple(pieces), seconds=deal.seconds())


def _first_needed(wish: Wish, end: int) -> dict[int, int]:
    """Return for each part the first block that a prefix of `end` blocks needs of it."""
    first: dict[int, int] = {}
    for part, window in wish.wanted:
        start = 0 if window is None else max(0, end - window)
        first[part] = min(start, first.get(part, start))
    return first


def _gaps(here: Mask, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the runs of blocks from `start` to `stop` that are not here."""
    edges = np.flatnonzero(np.diff(np.concatenate(([True], here[start:stop], [True]))))
    for begin, end in edges.reshape(-1, 2).tolist():
        yield start + begin, start + end


class _Deal:
    """Deals blocks out to the shards that have them; what a shard was dealt counts against it."""

    def __init__(self, wish: Wish, stops: _Stops, peers: Mapping[str, Peer]) -> None:
        self._wish = wish
        self._stops = stops
        self._peers = peers
        self._dealt: dict[str, int] = {}
        self._chunk = max(CHUNK_BLOCKS, wish.num_blocks // _CHUNKS_MAX)

    def pieces(self, part: int, start: int, stop: int) -> list[Piece]:
        """Return who gives blocks `start` to `stop` of `part`."""
        dealt: list[Piece] = []
        while start < stop:
            shard, end = self._choose(part, start, stop)
            num_bytes = (end - start) * self._wish.block_bytes[part]
            self._dealt[shard] = self._dealt.get(shard, 0) + num_bytes
            if dealt and dealt[-1].shard == shard:
                start = dealt.pop().start
            dealt.append(Piece(shard=shard, part=part, start=start, stop=end))
            start = end
        return dealt

    def seconds(self) -> float:
        """Return how long it takes if all shards give at once; unmeasured ones take no time."""
        return max(
            (
                self._peers[shard].latency_s + num_bytes / rate
                for shard, num_bytes in self._dealt.items()
                if (rate := self._peers[shard].bytes_per_s)
            ),
            default=0.0,
        )

    def _choose(self, part: int, start: int, stop: int) -> tuple[str, int]:
        """Return who is to give the next blocks, and where they end."""
        ends = {
            shard: min(int(stops[start]), stop)
            for shard, stops in self._stops[part].items()
            if stops[start] > start
        }
        sure = {shard: end for shard, end in ends.items() if not self._peers[shard].is_doubtful}
        ends = sure or ends
        if len(ends) > 1:
            # A run is kept long: who has only the beginning of it is left out.
            longest = min(max(ends.values()), start + self._chunk) - start
            ends = {s: e for s, e in ends.items() if min(e - start, self._chunk) * 2 > longest}
        shard = min(ends, key=lambda one: self._finish(one, part))
        end = ends[shard]
        return shard, end if len(ends) == 1 else min(end, start + self._chunk)

    def _finish(self, shard: str, part: int) -> float:
        """Return when a shard would be done with one more chunk, by what is known of it."""
        peer = self._peers[shard]
        num_bytes = self._dealt.get(shard, 0) + self._chunk * self._wish.block_bytes[part]
        return peer.latency_s + num_bytes / (peer.bytes_per_s or _UNMEASURED_BYTES_PER_S)


def _stops(mask: Mask) -> npt.NDArray[np.int64]:
    """Return for each block where the run that it is part of ends; itself where there is none."""
    places = np.arange(len(mask))
    next_gap = np.minimum.accumulate(np.where(mask, len(mask), places)[::-1])[::-1]
    return np.where(mask, next_gap, places)
