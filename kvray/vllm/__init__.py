"""The KV connector that vLLM loads; no process that imports it imports Ray.

`--kv-transfer-config '{"kv_connector": "KvRayConnector", "kv_connector_module_path": "kvray.vllm",
"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'`
"""

from kvray.vllm.connector import KvRayConnector

__all__ = ["KvRayConnector"]
