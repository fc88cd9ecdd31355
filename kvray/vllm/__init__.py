"""The KV connector that vLLM loads; no process that imports it imports Ray.

`--kv-transfer-config '{"kv_connector": "KvRayConnector", "kv_connector_module_path": "kvray.vllm",
"kv_role": "kv_both"}'`. vLLM is imported with the class.
"""

from typing import Any

__all__ = ["CONNECTOR", "REPLICA_SETTING", "KvRayConnector"]

CONNECTOR = {
    "kv_connector": "KvRayConnector",
    "kv_connector_module_path": "kvray.vllm",
    "kv_role": "kv_both",
}
"""vLLM's `KVTransferConfig` for it."""
REPLICA_SETTING = "kvray_replica"
"""In its `kv_connector_extra_config`: the replica's name in kvray."""


def __getattr__(name: str) -> Any:
    """Return the class at its first use."""
    if name != "KvRayConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvray.vllm.connector import KvRayConnector

    return KvRayConnector
