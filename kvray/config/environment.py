"""What the environment of a process says: the only module that reads it."""

import contextlib
import difflib
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from kvray.config.sections import setting_rows
from kvray.errors import ConfigError

CONFIG_ENV = "KVRAY_CONFIG"
"""Environment variable that names the configuration file."""

_PLAIN = ("CLUSTER_NAME", "CONFIG")
"""What is left of our variables that name no section."""
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


def check_variables(environ: Mapping[str, str]) -> None:
    """Raise ConfigError for a variable that would be ours if it were written as ours are.

    It has one underscore where two part section and key, or is almost the name of the cluster or of
    the file. Others are left alone, see `environment_overrides`.
    """
    for name in sorted(environ):
        rest = name.removeprefix("KVRAY_")
        if rest == name or not environ[name] or "__" in rest or _is_kubernetes(rest):
            continue
        if rest in _PLAIN:
            continue
        near = difflib.get_close_matches(rest, _PLAIN, n=1, cutoff=0.85)
        if meant := _underscored().get(rest, near[0] if near else ""):
            raise ConfigError(
                f"The variable {name} names no setting; write KVRAY_{meant}, or unset it."
            )


def variable_of(dotted: str) -> str:
    """Return the variable that names a setting."""
    return f"KVRAY_{dotted.upper().replace('.', '__')}"


def environ_for(path: Path, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables for a child process that reads `path` and no other setting of ours."""
    return {**dict.fromkeys(_names_of_settings(environ), ""), CONFIG_ENV: str(path.absolute())}


def without_settings(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables for a node all of whose settings come from the tier's configuration."""
    named = _names_of_settings(environ)
    return {name: value for name, value in environ.items() if name not in named}


def ray_memory_threshold(environ: Mapping[str, str] = os.environ) -> float:
    """Return the share of a node's memory above which its Ray kills workers."""
    with contextlib.suppress(ValueError):
        if int(environ.get("RAY_memory_monitor_refresh_ms", "1")) == 0:
            return 1.0
    with contextlib.suppress(ValueError):
        return float(environ.get("RAY_memory_usage_threshold", _RAY_THRESHOLD))
    return _RAY_THRESHOLD


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the directory for downloads and other things that can be made again."""
    try:
        return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvray"
    except RuntimeError:
        raise ConfigError("This user has no home directory; set XDG_CACHE_HOME.") from None


def _names_of_settings(environ: Mapping[str, str]) -> set[str]:
    return {variable_of(dotted) for dotted in environment_overrides(environ)}


def _is_kubernetes(rest: str) -> bool:
    """Whether Kubernetes sets such a variable, for a service named kvray-something."""
    return "_SERVICE_" in rest or "_PORT_" in f"{rest}_"


@cache
def _underscored() -> dict[str, str]:
    """Return the settings' variables with one underscore in place of two -> as they are."""
    names = [row.name.upper() for row in setting_rows() if "." in row.name]
    return {name.replace(".", "_"): name.replace(".", "__") for name in names}
