"""The configuration as it holds: a YAML file, then the environment, then what a caller says."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from kvray.config.complaint import explain
from kvray.config.environment import CONFIG_ENV, environment_overrides
from kvray.config.sections import KVRayConfig
from kvray.errors import ConfigError

WELL_KNOWN_PATH = Path("/etc/kvray/kvray.yaml")
"""Read when nothing names a file: ranks started by a launcher get no environment of ours."""


def load_config(
    path: str | os.PathLike[str] | None = None,
    *,
    overrides: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> KVRayConfig:
    """Read the configuration; later sources win: file, environment, `overrides`.

    Args:
        path: a YAML file; None: the file that `KVRAY_CONFIG` names, else the well-known path,
            else the defaults.
        overrides: dotted key -> value, for example {"arena.capacity": "2GiB"}; None is no value.
        environ: variables `KVRAY_SECTION__KEY`, for example KVRAY_ARENA__CAPACITY=2GiB; an empty
            one counts as not set.

    Raises:
        ConfigError: the file cannot be read, a key is unknown, or a value is out of range.
    """
    source = (
        path or environ.get(CONFIG_ENV) or (WELL_KNOWN_PATH if WELL_KNOWN_PATH.is_file() else None)
    )
    values = _read_yaml(Path(source)) if source else {}
    for dotted, value in environment_overrides(environ).items():
        _set_dotted(values, dotted, value)
    for dotted, value in (overrides or {}).items():
        if value is not None:
            _set_dotted(values, dotted, value)
    where = f"{source}: " if source else ""
    try:
        return KVRayConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(where + explain(error)) from None


def config_on_node(config: KVRayConfig, environ: Mapping[str, str] = os.environ) -> KVRayConfig:
    """Return the tier's configuration with what a node's own environment says of arena and NVMe.

    Nodes differ in memory, disks and mounts. The variables are those of the node's Ray, which the
    actors that it starts inherit; engines there need the same ones.

    Raises:
        ConfigError: a variable cannot be used.
    """
    values = config.model_dump()
    for dotted, value in environment_overrides(environ).items():
        if dotted.startswith(("arena.", "nvme.")):
            _set_dotted(values, dotted, value)
    try:
        return KVRayConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"The environment of this node: {explain(error)}") from None


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"The configuration file {path} cannot be read ({error.strerror});"
            " name an existing file."
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}.") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a mapping of settings, not a {type(values).__name__}.")
    return values


def _set_dotted(values: dict[str, Any], dotted: str, value: Any) -> None:
    *sections, key = dotted.split(".")
    for section in sections:
        if values.get(section) is None:
            values[section] = {}
        if not isinstance(values[section], dict):
            raise ConfigError(f"{section} must be a section with keys, not {values[section]!r}.")
        values = values[section]
    values[key] = value
