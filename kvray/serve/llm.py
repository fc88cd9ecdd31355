"""kvray's connector for `ray.serve.llm`: whoever imports this has registered it.

An `LLMConfig` then needs `"kv_transfer_config": {"kv_connector": "KvRayConnector"}` alone. Each
replica goes in kvray by its Serve replica id.
"""

from ray import serve
from ray.llm._internal.serve.engines.vllm.kv_transfer.base import DefaultConnectorBackend
from ray.llm._internal.serve.engines.vllm.kv_transfer.factory import KVConnectorBackendFactory

from kvray.vllm import CONNECTOR, REPLICA_SETTING

_NAME = CONNECTOR["kv_connector"]


class KvRayBackend(DefaultConnectorBackend):
    """What is done in a replica's process before its vLLM starts."""

    def setup(self) -> None:
        """Complete the connector's configuration, with the replica's name for all ranks."""
        for name, value in CONNECTOR.items():
            self.kv_transfer_config.setdefault(name, value)
        extra = self.kv_transfer_config.setdefault("kv_connector_extra_config", {})
        extra.setdefault(REPLICA_SETTING, serve.get_replica_context().replica_id.unique_id)


if not KVConnectorBackendFactory.is_registered(_NAME):
    KVConnectorBackendFactory.register_backend(_NAME, f"{__name__}:{KvRayBackend.__name__}")
