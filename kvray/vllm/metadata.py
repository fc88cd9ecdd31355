"""What vLLM carries between the two halves of the connector, which may be in two processes."""

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvray.engine.engine_identity import EngineIdentity
from kvray.engine.meta import ConnectorMeta
from kvray.vllm.holds import HeldLoad, Hold


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

    identity: EngineIdentity
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
