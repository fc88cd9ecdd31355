"""The configuration: a YAML file with a schema, sizes in binary units, overrides by environment."""

from kvray.config.complaint import values_on_nodes
from kvray.config.environment import (
    CONFIG_ENV,
    cache_dir,
    environ_for,
    ray_memory_threshold,
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
from kvray.config.sources import (
    WELL_KNOWN_PATH,
    Effective,
    Setting,
    config_on_node,
    effective_settings,
    load_config,
    read_effective,
)
from kvray.config.values import exact_size, format_size, parse_size

__all__ = [
    "CONFIG_ENV",
    "TENANT_NAME",
    "WEIGHTS_VERSION_MAX",
    "WELL_KNOWN_PATH",
    "ArenaConfig",
    "CopiesConfig",
    "Effective",
    "KVRayConfig",
    "Setting",
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
