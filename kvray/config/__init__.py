"""The configuration: a YAML file with a schema, sizes in binary units, overrides by environment."""

from kvray.config.environment import (
    CONFIG_ENV,
    cache_dir,
    environ_for,
    ray_memory_threshold,
    without_settings,
)
from kvray.config.sections import TENANT_NAME, KVRayConfig, ShardConfig
from kvray.config.sizes import format_size, parse_size
from kvray.config.sources import WELL_KNOWN_PATH, config_on_node, load_config

__all__ = [
    "CONFIG_ENV",
    "TENANT_NAME",
    "WELL_KNOWN_PATH",
    "KVRayConfig",
    "ShardConfig",
    "cache_dir",
    "config_on_node",
    "environ_for",
    "format_size",
    "load_config",
    "parse_size",
    "ray_memory_threshold",
    "without_settings",
]
