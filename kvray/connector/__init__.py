"""The KV-cache connector that TensorRT-LLM loads; no process that imports it imports Ray.

TensorRT-LLM takes the classes by name and hands them nothing but its own arguments. A name may
carry the path of a configuration file behind an `@`, which reaches every rank however it was
started: `connector_worker_class: "KvRayWorker@/etc/kvray/replica.yaml"`. The `server_url` of newer
versions goes before it.
"""

from typing import Any

from kvray.errors import needs

with needs("engine"):
    from kvray.connector.scheduler import KvRayScheduler
    from kvray.connector.worker import KvRayWorker

__all__ = ["KvRayScheduler", "KvRayWorker"]


def __getattr__(name: str) -> Any:
    """Return the class before the `@`, bound to the configuration file behind it."""
    class_name, at, config_path = name.partition("@")
    if not at or class_name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return type(class_name, (globals()[class_name],), {"config_path": config_path})
