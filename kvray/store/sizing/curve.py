"""Hit rates by size of the memory, of the policy that runs: replays of a sample in small caches.

A cache with room for one sampled key for each quantum of the memory finds of the sample what the
memory finds of the traffic. Misses are estimated, over the true number of blocks: a block that
many prompts share is in the sample or not, which would change a share of hits much, and misses
hardly.

Sources: Waldspurger et al., "Cache modeling and optimization using miniature simulations", USENIX
ATC 2017; SHARDS-adj of the paper in `sample` for the denominator.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvray.store.arena.tables import Array
from kvray.store.replay import RANKED_MIN, Replay
from kvray.store.sizing.sample import Space, Window

SIZES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1, 3 / 2, 2, 4)
"""The sizes of a curve, in parts of the memory that there is."""
CPU_SHARE = 0.004
"""Of a core, for a node's replays; to take the sample costs a fraction of that."""
_RANKED_FEWEST = 8
_GROUPS = 16
"""Independent parts of a sample, whose spread gives the error."""
_BLOCKS_MIN = 200
"""Sampled blocks below which nothing is said of a namespace."""
_SURE_SHARE = 0.03
"""How far what is predicted for today's memory may be from what was counted."""


Steps = Generator[None, None, dict[str, dict[str, Any]]]
"""They end with the result of `curve`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All that a node's curve is drawn from."""

    window: Window
    host_bytes: int
    """Memory that the node has now."""
    full: float
    """The share of it that eviction lets blocks take."""
    disk_bytes: int
    policy: str
    admission: str

    @property
    def sizes(self) -> list[int]:
        """Bytes of memory at each point."""
        return [int(self.host_bytes * part) for part in SIZES]

    def steps(self) -> Steps:
        """Return the steps of `curve` for it."""
        rules = {"policy": self.policy, "admission": self.admission}
        sizes = [int(size * self.full) for size in self.sizes]
        return curve(self.window, sizes, disk_bytes=self.disk_bytes, **rules)

    def drawn(self, namespaces: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """Return the result of the steps, with what it was drawn from, as plain data."""
        trace = self.window.trace
        return {
            "host_bytes": self.host_bytes,
            "disk_bytes": self.disk_bytes,
            "policy": self.policy,
            "sizes": self.sizes,
            "seconds": round(self.window.seconds, 1),
            "sampled_prompts": trace.num_requests,
            "distinct_bytes": trace.num_unique * self.window.quantum,
            "lost_prompts": self.window.num_lost,
            "namespaces": {
                name: one | judged(one, SIZES.index(1)) for name, one in namespaces.items()
            },
        }


def judged(curve: Mapping[str, Any], now: int) -> dict[str, Any]:
    """Return what a curve says beside what was counted at its point `now`, the memory of today.

    Disk and other nodes are as counted: a disk is slow, and other nodes are not replayed. At other
    sizes the disk gives as much more or less as in the replay. Of what is missed here, other nodes
    have a part that is larger or smaller as what is found in memory is. `error` is at least what
    the prediction is off by today, and what these two differ from today's by.
    """
    own, host = curve["own"], np.array(curve["host"])
    missed = np.maximum(0.0, curve["could"] - own - host)
    disk = np.array(curve["disk"])
    disk = np.clip(disk - disk[now] + curve["from_disk"], 0.0, missed)
    missed -= disk
    part = curve["from_others"] / max(missed[now], 1e-9)
    remote = missed * np.minimum(1.0, part * (host / host[now] if host[now] > 0 else 1.0))
    predicted = own + float(host[now] + disk[now] + remote[now])
    off = abs(predicted - curve["measured"])
    unlike = abs(disk - disk[now]) + abs(remote - remote[now])
    return {
        "disk": disk.round(5).tolist(),
        "remote": remote.round(5).tolist(),
        "predicted": round(predicted, 5),
        "error": np.maximum(curve["error"], (off + unlike) / 2).round(5).tolist(),
        "is_sure": is_sure(predicted, curve["measured"]),
    }


def is_sure(predicted: float, measured: float) -> bool:
    """Return whether a curve is worth showing: it says of today's memory what was counted."""
    return round(abs(predicted - measured), 4) <= _SURE_SHARE


def curve(
    window: Window, host_bytes: Sequence[int], *, disk_bytes: int = 0, policy: str, admission: str
) -> Steps:
    """Return each namespace's hit rates with memory of each size, and a disk below all of them.

    It yields between two steps of less than a millisecond, mostly. By name of the namespace:
    num_tokens of its counted prompts, sampled_blocks, rate, and shares of the prompts' tokens.
    `could` is what could be found, `own` what the engines had themselves, `measured` what hit in
    fact, and `from_disk` and `from_others` what disk and other nodes gave of this. With one number
    for each size, `host` and `disk` were found there and not before, and `error` is the standard
    error of the sample. A namespace with too few blocks in the sample is not there.
    """
    tally = _Tally(window)
    # A small cache ranks as many blocks at a time as stand for those that a full one does.
    rate = max((space.rate for space in window.spaces), default=1.0)
    ranked_min = max(_RANKED_FEWEST, round(RANKED_MIN * rate))
    columns: list[Array] = []
    for size in host_bytes:
        replay = Replay(
            window.trace,
            policy,
            _slots(window, size),
            _slots(window, disk_bytes) if disk_bytes else 0,
            admission=admission,
            ranked_min=ranked_min,
        )
        for _ in replay.run():
            yield
        columns.append(tally.shares(replay.host_hits, replay.disk_hits))
    return tally.named(columns)


def result_of(steps: Steps) -> dict[str, dict[str, Any]]:
    """Return the result of `curve`, without a pause."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: dict[str, dict[str, Any]] = end.value
            return found


class _Tally:
    """Counts what of a window's blocks was missed, by namespace."""

    def __init__(self, window: Window) -> None:
        trace, lengths = window.trace, window.lengths
        num_keys = lengths[:, 0]
        self._request = np.repeat(np.arange(trace.num_requests), num_keys)
        self._place = np.arange(trace.num_refs) - np.repeat(trace.starts[:-1], num_keys)
        is_asked = self._place < lengths[self._request, 1]
        is_asked &= self._request >= window.counted_from
        self._is_open = is_asked & (self._place >= lengths[self._request, 2])
        group = (window.names[trace.ids] % _GROUPS).astype(np.int64)
        self._cell = window.space_of[self._request].astype(np.int64) * _GROUPS + group
        self._spaces = window.spaces
        self._num_asked = self._count(is_asked).sum(axis=1)

    def shares(self, host_hits: Array, disk_hits: Array) -> Array:
        """Return the shares host, disk and error of each namespace, f8 [num_spaces, 3]."""
        found = host_hits[self._request]
        no_host = self._count(self._is_open & (self._place >= found))
        found = found + disk_hits[self._request]
        missed = self._count(self._is_open & (self._place >= found))
        rows = zip(self._spaces, no_host, missed, strict=True)
        return np.array([_shares(space, *counts) for space, *counts in rows])

    def named(self, columns: Sequence[Array]) -> dict[str, dict[str, Any]]:
        """Return the result of `curve`, from the shares at each size."""
        table = np.stack(columns).round(5)
        return {
            space.name: {
                "num_tokens": int(space.num_tokens),
                "sampled_blocks": int(self._num_asked[at]),
                "rate": space.rate,
                **{
                    name: round(count * _block_share(space), 5)
                    for name, count in (
                        ("could", space.num_blocks),
                        ("own", space.num_own),
                        ("measured", space.num_own + space.num_hit),
                        ("from_disk", space.num_disk),
                        ("from_others", space.num_remote),
                    )
                },
                "host": table[:, at, 0].tolist(),
                "disk": table[:, at, 1].tolist(),
                "error": table[:, at, 2].tolist(),
            }
            for at, space in enumerate(self._spaces)
            if self._num_asked[at] >= _BLOCKS_MIN
        }

    def _count(self, mask: Array) -> Array:
        counts = np.bincount(self._cell[mask], minlength=len(self._spaces) * _GROUPS)
        return counts.reshape(len(self._spaces), _GROUPS)


def _shares(space: Space, no_host: Array, missed: Array) -> tuple[float, float, float]:
    """Return the shares host, disk and error, from the blocks that were not found, by group."""
    share = _block_share(space)
    could = (space.num_blocks - space.num_own) * share  # of all tokens, the engines have not
    scale = share / space.rate
    host = max(0.0, could - float(no_host.sum()) * scale)
    both = max(host, could - float(missed.sum()) * scale)
    spread = float(missed.std(ddof=1)) * np.sqrt(_GROUPS) * scale
    return host, both - host, spread * np.sqrt(1 - space.rate)


def _block_share(space: Space) -> float:
    """Return the share of a namespace's tokens that one of its blocks has."""
    return space.tokens_per_block / max(1.0, space.num_tokens)


def _slots(window: Window, size: int) -> int:
    # Half empty, a tier neither evicts nor demotes: a larger one would find the same.
    return min(max(1, round(size / window.quantum)), 2 * max(1, window.trace.num_unique))
