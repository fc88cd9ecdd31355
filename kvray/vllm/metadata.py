"""What vLLM carries between the two halves of the connector, which may be in two processes.

A rank *holds* blocks: it copies them from the arena into memory of its own and checks the copies.
vLLM is promised only what every rank holds, so no load can fail. Source of why that must be so:
`Scheduler._handle_invalid_blocks` of vLLM 0.32.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvray.engine.meta import ConnectorMeta, PageIds, RankLeases
from kvray.engine.registered_pool import PoolFacts


class Hold(NamedTuple):
    """Leased blocks that every rank is to hold, and to answer for."""

    hold_id: int  # never given twice
    leased: RankLeases  # each rank ends its lease when it has copied
    first: int  # the first block to hold, counted from the root of the prefix
    stop: int


class HeldLoad(NamedTuple):
    """Held blocks to be copied into the pool before the pass; the hold is over then."""

    hold_id: int
    skip: int  # leading blocks of the hold that vLLM has itself
    pages: PageIds


@dataclass(slots=True, kw_only=True)
class PassMetadata(KVConnectorMetadata):
    """One pass's holds, loads and saves, for the ranks."""

    meta: ConnectorMeta  # its loads are in `loads`
    holds: tuple[Hold, ...] = ()
    drops: tuple[int, ...] = ()
    """Holds that nobody wants any more."""
    loads: tuple[HeldLoad, ...] = ()
    names: dict[int, str] = field(default_factory=dict)
    """vLLM's names of the requests of which the pass saves blocks, by kvray's numbers."""


@dataclass(slots=True, kw_only=True)
class PoolMetadata(KVConnectorHandshakeMetadata):
    """What a rank has registered, for the scheduler; sent once, when vLLM starts."""

    facts: PoolFacts
    hold_blocks: int
    """How many blocks each rank can hold at a time."""


@dataclass(slots=True)
class HoldAnswers(KVConnectorWorkerMetadata):
    """What ranks hold since their last answers."""

    num_ranks: Counter[int]
    """Hold -> how many of these ranks have answered for it."""
    num_sound: dict[int, int]
    """Hold -> its leading blocks that all of them have, and whose copies have their checksums."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "HoldAnswers":
        """Return the answers of both; vLLM joins those of all ranks so."""
        assert isinstance(other, HoldAnswers), "all ranks run one connector"
        joined = dict(self.num_sound)
        for hold_id, sound in other.num_sound.items():
            joined[hold_id] = min(sound, joined.get(hold_id, sound))
        return HoldAnswers(self.num_ranks + other.num_ranks, joined)
