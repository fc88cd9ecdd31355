"""What vLLM carries between the two halves of the connector, which may be in two processes."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)

from kvray.engine.meta import ConnectorMeta
from kvray.engine.registered_pool import PoolFacts


@dataclass(slots=True, kw_only=True)
class PassMetadata(KVConnectorMetadata):
    """One pass's loads and saves, for the ranks."""

    meta: ConnectorMeta
    names: dict[int, str] = field(default_factory=dict)
    """vLLM's names of the requests of which the pass saves blocks, by kvray's numbers."""


@dataclass(slots=True, kw_only=True)
class PoolMetadata(KVConnectorHandshakeMetadata):
    """What a rank has registered, for the scheduler; sent once, when vLLM starts."""

    facts: PoolFacts
