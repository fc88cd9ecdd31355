"""The configuration: one YAML file with a schema, sizes in binary units, overrides by environment.

This is the only module that reads the environment. Everything below the edge takes plain values.
"""

import contextlib
import difflib
import os
import re
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from kvray.errors import ConfigError

CONFIG_ENV = "KVRAY_CONFIG"
"""Environment variable that names the configuration file."""

WELL_KNOWN_PATH = Path("/etc/kvray/kvray.yaml")
"""Read when nothing names a file: ranks started by a launcher get no environment of ours."""

_RAY_THRESHOLD = 0.95
"""Ray's own default."""

_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def parse_size(value: object) -> int:
    """Return `value` in bytes: a whole number, or text such as `64GiB`.

    Raises:
        ValueError: no such unit, or the size is not positive.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    else:
        found = re.fullmatch(r"\s*(-?\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(value))
        if not found or found[2] not in _UNITS:
            raise ValueError(f"{value!r} is no size; write a number with a unit such as 64GiB")
        size = int(Decimal(found[1]) * _UNITS[found[2]])
    if size <= 0:
        raise ValueError(f"{value!r} is not a positive size; write for example 64GiB")
    return size


def format_size(size: float) -> str:
    """Return `size` bytes in the largest binary unit that keeps it above one."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size >= _UNITS[unit]:
            return f"{size / _UNITS[unit]:.4g}{unit}"
    return f"{size:.0f}B"


Size = Annotated[int, BeforeValidator(parse_size)]


def parse_namespace(value: object) -> str:
    """Return what names a namespace: the hex digits that its digest begins with.

    Raises:
        ValueError: it is something else, as a name of digits only is that YAML takes for a number.
    """
    if isinstance(value, str) and re.fullmatch(r"[0-9A-Fa-f]{1,64}", value):
        return value.lower()
    raise ValueError(
        f"{value!r} names no namespace; write the hex digits that `kvray status` shows, in quotes"
    )


NamespaceName = Annotated[str, BeforeValidator(parse_namespace)]


class _Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _take_empty_for_defaults(cls, values: object) -> object:
        """Read a section whose keys are all commented out, which YAML gives as null."""
        return {} if values is None else values


class ArenaConfig(_Section):
    """The shared memory of one node."""

    dir: Path = Field(
        default=Path("/dev/shm"), description="tmpfs or hugetlbfs mount that holds the arena"
    )
    capacity: Size = Field(default=4 * 2**30, description="bytes of blocks per node")
    slab: Size = Field(default=64 * 2**20, description="unit in which block sizes share it")
    slot_min: Size = Field(default=64 * 2**10, description="smallest slot; bounds the tables")
    numa: Literal["interleave", "local"] = Field(
        default="interleave", description="over the NUMA nodes, or on the one that makes it"
    )
    free_target: float = Field(
        default=0.05, ge=0, le=0.9, description="share of the slots kept free by evicting ahead"
    )
    policy: Literal["gittins", "s3fifo", "lru"] = Field(
        default="gittins", description="what decides which blocks go first; see kvray replay"
    )
    holders_max: int = Field(default=256, ge=4, le=4096, description="processes attached at once")
    lock_wait_s: float = Field(
        default=0.002, gt=0, le=1, description="longest try for the arena's lock; then a miss"
    )
    limbo_s: float = Field(
        default=30.0, ge=0, description="how long a dead writer's slots wait before reuse"
    )
    lease_warn_s: float = Field(default=60.0, gt=0, description="leases older than this are named")
    namespace_quota: Size | None = Field(
        default=None, description="bytes that the blocks of one namespace may take; none: no bound"
    )
    quotas: dict[NamespaceName, Size] = Field(
        default_factory=dict,
        max_length=63,
        description="the same for namespaces named by the start of their digest, in quotes",
    )


class NvmeConfig(_Section):
    """The blocks that a node keeps on a local disk; they outlive every process."""

    dir: Path | None = Field(
        default=None, description="directory on a local disk for the blocks; none: no NVMe tier"
    )
    capacity: Size = Field(default=64 * 2**30, description="bytes of files per node, at most")
    segment: Size = Field(default=2**30, description="bytes of blocks in one file")
    free_reserve: Size = Field(
        default=8 * 2**30, description="bytes of the file system that are left to others"
    )
    high_watermark: float = Field(
        default=0.8,
        gt=0,
        le=1,
        description="share of the arena in use above which what goes next is written to disk",
    )
    admission: Literal["likely", "twice", "all"] = Field(
        default="likely", description="which of the blocks that leave the arena are written"
    )
    write_gib_per_day: float | None = Field(
        default=None, gt=0, description="most that is written in any 24 hours; none: any number"
    )
    flush_s: float = Field(
        default=60.0, ge=0, description="longest time that the end of a tier writes to disk"
    )
    io_threads: int = Field(default=4, ge=1, le=64, description="transfers that one call has")


class ShardConfig(_Section):
    """The actor that owns a node's arena."""

    announce_s: float = Field(default=0.05, gt=0, le=5, description="lag of announcements")
    heartbeat_s: float = Field(default=0.5, gt=0, le=30, description="heartbeat to the lookup")
    silent_s: float = Field(
        default=1.5, gt=0, description="a shard unheard of for longer is not asked for blocks"
    )
    resource: str | None = Field(
        default=None, description="Ray resource a node must have to get a shard; none: every node"
    )
    label: str | None = Field(
        default=None,
        pattern=r"^[^=\s]+=[^=\s]+$",
        description="Ray label key=value a node must have to get a shard; none: every node",
    )


class StagingConfig(_Section):
    """How blocks of other nodes come here."""

    transports: tuple[Literal["nixl", "object_ref"], ...] = Field(
        default=("nixl", "object_ref"),
        min_length=1,
        description="ways between nodes, the best first; the first that both ends have is taken",
    )
    deadline_s: float = Field(default=10.0, gt=0, description="longest time a fetch may take")
    call_timeout_s: float = Field(
        default=1.0, gt=0, description="deadline of a call to another node that moves no blocks"
    )
    handover_s: float = Field(
        default=2.0, gt=0, description="how long staged blocks are kept for whoever asked"
    )
    lease_s: float = Field(
        default=5.0, gt=0, description="lease at the holder; renewed while blocks are on their way"
    )
    fetches_max: int = Field(default=4, ge=1, description="fetches of a node at once")
    bytes_in_flight: Size = Field(
        default=256 * 2**20, description="bytes on their way to a node at once"
    )


class ConnectorConfig(_Section):
    """One replica's connector inside TensorRT-LLM."""

    replica: str | None = Field(default=None, description="name of the replica; else host-pid")
    model_key: str | None = Field(
        default=None, description="names model and revision when no checkpoint can be read"
    )
    verify_on_load: Literal["auto", "always", "never"] = Field(
        default="auto", description="check checksums of loaded blocks; auto: when loading to CPU"
    )
    load: Literal["sync", "async"] = Field(
        default="sync",
        description="async: requests wait while their blocks are made ready, others go on",
    )
    park_lease_s: float = Field(
        default=30.0,
        gt=0,
        description="how long a request that may go on keeps its blocks; later it stops the engine",
    )
    attach_retry_s: float = Field(
        default=1.0, gt=0, le=60, description="how often an engine without an arena looks again"
    )
    stage_wait_s: float = Field(
        default=0.05,
        ge=0,
        le=5,
        description="longest wait of the engine's scheduler for blocks of other nodes; 0: never",
    )
    saves_max: int = Field(
        default=256, ge=1, description="passes whose saves may wait; more are dropped"
    )


class RayConfig(_Section):
    """How the Ray cluster is reached or started."""

    address: str | None = Field(default=None, description="GCS address; none: a local cluster")
    timeout_s: float = Field(default=30.0, gt=0, description="deadline of each Ray call")


class KVRayConfig(_Section):
    """Everything that can be set, with its default."""

    cluster_name: str = Field(
        default="kvray", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,31}$", description="names the tier"
    )
    arena: ArenaConfig = ArenaConfig()
    nvme: NvmeConfig = NvmeConfig()
    shard: ShardConfig = ShardConfig()
    staging: StagingConfig = StagingConfig()
    connector: ConnectorConfig = ConnectorConfig()
    ray: RayConfig = RayConfig()

    @property
    def node_dir(self) -> Path:
        """Directory of this node's arena, lock and socket files."""
        return self.arena.dir / f"kvray-{self.cluster_name}"

    @property
    def nvme_dir(self) -> Path | None:
        """Directory of this node's blocks on disk, if it is to have any there."""
        return None if self.nvme.dir is None else self.nvme.dir / f"kvray-{self.cluster_name}"


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
    for dotted, value in _environment_overrides(environ).items():
        _set_dotted(values, dotted, value)
    for dotted, value in (overrides or {}).items():
        if value is not None:
            _set_dotted(values, dotted, value)
    where = f"{source}: " if source else ""
    try:
        return KVRayConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(where + _explain(error)) from None


def config_on_node(config: KVRayConfig, environ: Mapping[str, str] = os.environ) -> KVRayConfig:
    """Return the tier's configuration with what a node's own environment says of arena and NVMe.

    Nodes differ in memory, disks and mounts. The variables are those of the node's Ray, which the
    actors that it starts inherit; engines there need the same ones.

    Raises:
        ConfigError: a variable cannot be used.
    """
    values = config.model_dump()
    for dotted, value in _environment_overrides(environ).items():
        if dotted.startswith(("arena.", "nvme.")):
            _set_dotted(values, dotted, value)
    try:
        return KVRayConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"The environment of this node: {_explain(error)}") from None


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


def _environment_overrides(environ: Mapping[str, str]) -> dict[str, str]:
    """Return dotted key -> value of the variables that name a setting."""
    given = {
        name.removeprefix("KVRAY_"): value
        for name, value in environ.items()
        if name.startswith("KVRAY_") and value
    }
    # Others are left alone: Kubernetes sets KVRAY_PORT and the like for a service named kvray.
    known = {name for name in given if "__" in name or name == "CLUSTER_NAME"}
    return {name.lower().replace("__", "."): given[name] for name in sorted(known)}


def _names_of_settings(environ: Mapping[str, str]) -> set[str]:
    return {f"KVRAY_{key.upper().replace('.', '__')}" for key in _environment_overrides(environ)}


def _set_dotted(values: dict[str, Any], dotted: str, value: Any) -> None:
    *sections, key = dotted.split(".")
    for section in sections:
        if values.get(section) is None:
            values[section] = {}
        if not isinstance(values[section], dict):
            raise ConfigError(f"{section} must be a section with keys, not {values[section]!r}.")
        values = values[section]
    values[key] = value


def _explain(error: ValidationError) -> str:
    """Return the first problem of `error` as one sentence with the fix."""
    problem = error.errors()[0]
    *sections, key = (str(part) for part in problem["loc"])
    dotted = ".".join([*sections, key])
    if problem["type"] == "extra_forbidden":
        known = _keys_of(sections)
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
        hint = f"did you mean {'.'.join([*sections, near[0]])}?" if near else "remove it."
        return f"Unknown setting {dotted}; {hint} {_listed(known)}"
    if problem["type"] == "model_type":
        known = _keys_of([*sections, key])
        return f"{dotted} must be a section with keys, not {problem['input']!r}. {_listed(known)}"
    message = problem["msg"].removeprefix("Value error, ")
    return f"Setting {dotted} = {problem['input']!r} cannot be used: {message}."


def _keys_of(sections: list[str]) -> list[str]:
    model: Any = KVRayConfig
    for section in sections:
        model = model.model_fields[section].annotation
    return list(model.model_fields)


def _listed(known: list[str]) -> str:
    return f"Known here: {', '.join(sorted(known))}."
