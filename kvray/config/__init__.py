"""The configuration: a YAML file with a schema, sizes in binary units, overrides by environment."""

from kvray.config.complaint import values_on_nodes
from kvray.config.reading import (
    CONFIG_ENV,
    WELL_KNOWN_PATH,
    cache_dir,
    config_on_node,
    effective_settings,
    environ_for,
    load_config,
    ray_memory_threshold,
    read_effective,
    without_settings,
)
from kvray.config.sections import (
    TENANT_NAME,
    WEIGHTS_VERSION_MAX,
    ArenaConfig,
    CopiesConfig,
    KVRayConfig,
    SettingRow,
    ShardConfig,
    StagingConfig,
    json_schema,
    setting_rows,
)
from kvray.config.values import exact_size, format_size, parse_size

__all__ = [
    "CONFIG_ENV",
    "TENANT_NAME",
    "WEIGHTS_VERSION_MAX",
    "WELL_KNOWN_PATH",
    "ArenaConfig",
    "CopiesConfig",
    "KVRayConfig",
    "SettingRow",
    "ShardConfig",
    "StagingConfig",
    "cache_dir",
    "config_on_node",
    "effective_settings",
    "environ_for",
    "exact_size",
    "format_size",
    "json_schema",
    "load_config",
    "parse_size",
    "ray_memory_threshold",
    "read_effective",
    "setting_rows",
    "values_on_nodes",
    "without_settings",
]
