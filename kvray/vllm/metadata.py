"""What vLLM carries from the scheduler's half of the connector to the ranks for one pass."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from kvray.engine.meta import ConnectorMeta


@dataclass(slots=True, kw_only=True)
class PassMetadata(KVConnectorMetadata):
    """One pass's loads and saves."""

    meta: ConnectorMeta
    names: dict[int, str] = field(default_factory=dict)
    """vLLM's names of the requests of which the pass saves blocks, by kvray's numbers."""
