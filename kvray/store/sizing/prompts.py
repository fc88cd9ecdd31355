"""Prompts as an engine reports them to its shard: of their keys a sample, of the rest sums; pure.

A key is sampled if its number, the first eight bytes, is at most a limit. So all prompts of a
namespace have the same blocks in the sample, which is a small copy of the traffic.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgpack
import numpy as np

from kvray.errors import ConfigError
from kvray.store.arena.tables import Array

LIMIT_MAX = 2**64 - 1
"""With this limit every key is in the sample."""
BLOCKS_MAX = 16_384
"""Leading blocks of a prompt that are looked at; what follows them counts as never found."""
PROMPTS_MAX = 4096
KEYS_MAX = 2 * BLOCKS_MAX  # of one report
_AGE_MAX_S = 1e6
_NUMBER_MAX = 2**48
_SUMS = "num_lost", "num_blocks", "num_own", "num_hit", "num_disk", "num_remote", "num_tokens"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampledPrompts:
    """The prompts since the last report; those without a sampled key are in the sums only."""

    limit: int
    num_lost: int
    """Prompts that nobody looked at, as there were too many."""
    num_blocks: int
    """Blocks that could have been promised, of all prompts that were looked at."""
    num_own: int
    """Those of them that the engine had itself."""
    num_hit: int
    """Those that the tier promised it."""
    num_disk: int
    """Of these, what came from the node's disk."""
    num_remote: int
    """And what other nodes sent."""
    num_tokens: int
    ages: Array
    """Seconds since each prompt, f4 [num_prompts]."""
    lengths: Array
    """Sampled keys of each prompt, with its answer; those that could have been promised; those
    that the engine had itself; u4 [num_prompts, 3]."""
    keys: Array
    """Numbers of the sampled keys, prompt after prompt, u8."""

    def pack(self) -> bytes:
        """Return it as bytes."""
        sums = (getattr(self, name) for name in ("limit", *_SUMS))
        arrays = self.ages.astype("<f4"), self.lengths.astype("<u4"), self.keys.astype("<u8")
        packed: bytes = msgpack.packb((*sums, *(one.tobytes() for one in arrays)))
        return packed

    @classmethod
    def unpack(cls, packed: object) -> SampledPrompts:
        """Return what `pack` has packed; ConfigError if these bytes are none."""
        try:
            limit, *sums, ages, lengths, keys = msgpack.unpackb(packed, use_list=False)
            found = cls(
                limit=limit,
                **dict(zip(_SUMS, sums, strict=True)),
                ages=np.frombuffer(ages, "<f4"),
                lengths=np.frombuffer(lengths, "<u4").reshape(-1, 3).astype(np.int64),
                keys=np.frombuffer(keys, "<u8"),
            )
            if found._is_valid():
                return found
        except (TypeError, ValueError, OverflowError, msgpack.UnpackException):
            pass
        raise ConfigError("These bytes are no sample of prompts.")

    def _is_valid(self) -> bool:
        sums = [getattr(self, name) for name in _SUMS]
        num_keys, num_asked, num_own = self.lengths.T
        return bool(
            type(self.limit) is int
            and 0 <= self.limit <= LIMIT_MAX
            and all(type(one) is int and 0 <= one < _NUMBER_MAX for one in sums)
            and len(self.ages) == len(self.lengths) <= PROMPTS_MAX
            and ((self.ages >= 0) & (self.ages < _AGE_MAX_S)).all()
            and ((num_own <= num_asked) & (num_asked <= num_keys) & (num_keys > 0)).all()
            and num_keys.sum() == len(self.keys) <= KEYS_MAX
            and (self.keys <= self.limit).all()
        )


def sampled_lengths(lengths: Array, mask: Array) -> Array:
    """Return the `lengths` of prompts of whose keys, end to end, only those in `mask` stay."""
    before = np.concatenate(([0], np.cumsum(mask)))
    starts = np.cumsum(lengths[:, 0]) - lengths[:, 0]
    stays: Array = before[starts[:, None] + lengths] - before[starts][:, None]
    return stays
