"""kvray among TensorRT-LLM's presets: what `connectors/registry.py` needs, see docs/preset.md."""

ENTRY = {
    "kvray": {
        "connector_module": "kvray.connector",
        "connector_scheduler_class": "KvRayScheduler",
        "connector_worker_class": "KvRayWorker",
    },
}
