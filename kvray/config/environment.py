"""What the environment of a process says: the only module that reads it."""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from kvray.errors import ConfigError

CONFIG_ENV = "KVRAY_CONFIG"
"""Environment variable that names the configuration file."""

_RAY_THRESHOLD = 0.95
"""Ray's own default."""


def environment_overrides(environ: Mapping[str, str]) -> dict[str, str]:
    """Return dotted key -> value of the variables that name a setting."""
    given = {
        name.removeprefix("KVRAY_"): value
        for name, value in environ.items()
        if name.startswith("KVRAY_") and value
    }
    # Others are left alone: Kubernetes sets KVRAY_PORT and the like for a service named kvray.
    known = {name for name in given if "__" in name or name == "CLUSTER_NAME"}
    return {name.lower().replace("__", "."): given[name] for name in sorted(known)}


def environ_for(path: Path, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables for a child process that reads `path` and no other setting of ours."""
    return {**dict.fromkeys(_names_of_settings(environ), ""), CONFIG_ENV: str(path.absolute())}


def without_settings(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables for a node all of whose settings come from the tier's configuration."""
    named = _names_of_settings(environ)
    return {name: value for name, value in environ.items() if name not in named}


def ray_memory_threshold(environ: Mapping[str, str] = os.environ) -> float:
    """Return the share of a node's memory above which the Ray there kills workers.

    Args:
        environ: variables of a process that this Ray started: it has the same.
    """
    with contextlib.suppress(ValueError):
        if int(environ.get("RAY_memory_monitor_refresh_ms", "1")) == 0:
            return 1.0
    with contextlib.suppress(ValueError):
        return float(environ.get("RAY_memory_usage_threshold", _RAY_THRESHOLD))
    return _RAY_THRESHOLD


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the directory for downloads and other things that can be made again.

    Raises:
        ConfigError: neither XDG_CACHE_HOME nor a home directory is known.
    """
    try:
        return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvray"
    except RuntimeError:
        raise ConfigError("This user has no home directory; set XDG_CACHE_HOME.") from None


def _names_of_settings(environ: Mapping[str, str]) -> set[str]:
    return {f"KVRAY_{key.upper().replace('.', '__')}" for key in environment_overrides(environ)}
