"""The configuration as it holds: from a file, labels, and the environment, read here alone."""

import contextlib
import difflib
import os
import re
from collections.abc import Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import ValidationError
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from kvray.config.complaint import (
    Origin,
    Origins,
    SettingPath,
    contradictions,
    explain,
    node_contradictions,
    quota_contradictions,
    refuse_first,
)
from kvray.config.sections import SECTIONS, KVRayConfig, NodeConfig, setting_rows, variable_of
from kvray.errors import ConfigError

CONFIG_ENV = "KVRAY_CONFIG"
"""Environment variable that names the configuration file."""
WELL_KNOWN_PATH = Path("/etc/kvray/kvray.yaml")
"""Read when nothing names a file: ranks started by a launcher get no environment of ours."""

_PLAIN = ("CLUSTER_NAME", "CONFIG")
"""What is left of our variables that name no section."""
_RAY_THRESHOLD = 0.95  # Ray's own default
_OF_KUBERNETES = re.compile(r".+_SERVICE_(HOST|PORT(_.+)?)|.+_PORT_\d+_[A-Z]+(_PROTO|_PORT|_ADDR)?")
"""Variables of a service, beside NAME_PORT, whose value is a URL."""


class Effective(NamedTuple):
    """What holds, and where each value comes from."""

    config: KVRayConfig
    origins: Origins
    path: Path | None = None


class Setting(NamedTuple):
    """One value that holds."""

    name: str
    """Dotted; entries of a list by their number."""
    value: Any  # as JSON: sizes with their unit
    origin: Origin


def load_config(
    path: str | os.PathLike[str] | None = None,
    *,
    overrides: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> KVRayConfig:
    """Read the configuration of the tier; later sources win: file, environment, `overrides`.

    RAY_ADDRESS counts where nothing else says ray.address.

    Args:
        path: a YAML file; None: what `KVRAY_CONFIG` names, else the well-known path, else none.
        overrides: dotted key -> value, for example {"arena.capacity": "2GiB"}; None is no value.
        environ: variables `KVRAY_SECTION__KEY`, for example KVRAY_ARENA__CAPACITY=2GiB; an empty
            one counts as not set. None: those of this process.

    ConfigError: the file cannot be read, a key is unknown, a value is out of range, or two values
    contradict each other.
    """
    return read_effective(path, overrides=overrides, environ=environ).config


def read_effective(
    path: str | os.PathLike[str] | None = None,
    *,
    overrides: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
) -> Effective:
    """Read the configuration as `load_config`, with the source of every value.

    `labels` are those of the Ray node whose values are asked for; the environment wins over what
    `nodes` says of it. None: the tier's values.
    """
    environ = os.environ if environ is None else environ
    _check_variables(environ)
    named = path or environ.get(CONFIG_ENV)
    source = Path(named) if named else (WELL_KNOWN_PATH if WELL_KNOWN_PATH.is_file() else None)
    values, origins = ({}, Origins()) if source is None else _read_document(source)
    ray = values.get("ray") or {}
    if (address := environ.get("RAY_ADDRESS")) not in (None, "", "local") and isinstance(ray, dict):
        values = {**values, "ray": {"address": address, **ray}}
        origins.setdefault(("ray", "address"), Origin("environment", "RAY_ADDRESS"))
    variables = _variables(environ)
    given = {dotted: value for dotted, value in (overrides or {}).items() if value is not None}

    found = _laid(values, origins, variables, given)
    _check_nodes(found)
    # A variable may be that of one small node: quotas are meant for the tier.
    if found.origins.of(("arena", "capacity"), at_least=2).kind != "environment":
        refuse_first(quota_contradictions(found.config), found.origins)
    if labels:
        values, origins = _labelled(values, origins, found.config.nodes, labels)
        found = _laid(values, origins, variables, given)
    return found._replace(path=source)


def config_on_node(
    config: KVRayConfig,
    environ: Mapping[str, str] | None = None,
    *,
    labels: Mapping[str, str] | None = None,
) -> KVRayConfig:
    """Return the tier's configuration as it holds on one node, for its arena and its disk.

    Nodes differ in memory, disks and mounts. First come the entries of `nodes` for its labels,
    then its own environment: the variables of the node's Ray, which the actors that it starts
    inherit; engines there need the same ones.
    """
    values = config.model_dump(exclude_unset=True)
    values, origins = _labelled(values, Origins(), config.nodes, labels or {})
    given = _variables(os.environ if environ is None else environ)
    variables = {one: text for one, text in given.items() if _path_of(one)[0] in ("arena", "nvme")}
    try:
        return _laid(values, origins, variables).config
    except ConfigError as error:
        raise ConfigError(f"On this node: {error}") from None


def effective_settings(effective: Effective) -> list[Setting]:
    """Return every setting, in the order of the schema; entries of mappings and nodes apart."""
    settings = []
    for path, value in _leaves(effective.config.model_dump(mode="json")):
        # A leaf may have been given with the whole of its setting, but never with the section.
        written = tuple(part.lower() for part in path)
        origin = effective.origins.of(written, at_least=2 if path[0] in SECTIONS else 1)
        settings.append(Setting(".".join(path), value, origin))
    return settings


def environ_for(path: Path) -> dict[str, str]:
    """Return the variables for a child process that reads `path` and no other setting of ours."""
    return {**dict.fromkeys(_variables(os.environ), ""), CONFIG_ENV: str(path.absolute())}


def without_settings() -> dict[str, str]:
    """Return the variables for a node all of whose settings come from the tier's configuration."""
    named = _variables(os.environ)
    return {name: value for name, value in os.environ.items() if name not in named}


def ray_memory_threshold(environ: Mapping[str, str] | None = None) -> float:
    """Return the share of a node's memory above which its Ray kills workers."""
    environ = os.environ if environ is None else environ
    with contextlib.suppress(ValueError):
        if int(environ.get("RAY_memory_monitor_refresh_ms", "1")) == 0:
            return 1.0
    with contextlib.suppress(ValueError):
        return float(environ.get("RAY_memory_usage_threshold", _RAY_THRESHOLD))
    return _RAY_THRESHOLD


def cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Return the directory for downloads and other things that can be made again."""
    given = (os.environ if environ is None else environ).get("XDG_CACHE_HOME")
    try:
        return Path(given or Path.home() / ".cache") / "kvray"
    except RuntimeError:
        raise ConfigError("This user has no home directory; set XDG_CACHE_HOME.") from None


_BYTES_MAX = 2**20
_DEPTH_MAX = 6
"""Deeper than any setting lies; what is below belongs to the value above."""

_REMEDIES = {
    "'\\t'": "indent with spaces, not with tabs",
    "tag": "write the plain value, without a tag",
    "mapping values are not allowed": "put each key on a line of its own, and a text with a colon"
    " in quotes",
    "": "check indentation, brackets and quotes there",
}
"""What to do, by a part of what the parser says."""


def _read_document(path: Path) -> tuple[dict[str, Any], Origins]:
    """Return what a file of YAML says, and in which line, from 1; ConfigError: it is none."""
    text = _read_text(path)
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        values = None if root is None else loader.construct_document(root)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        said = getattr(error, "problem", None) or " ".join(str(error).split())
        remedy = next(remedy for part, remedy in _REMEDIES.items() if part in said)
        raise ConfigError(f"{where}: this is not valid YAML: {said}; {remedy}.") from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply; check its brackets.") from None
    except ValueError as error:  # of a date or a number that YAML knows by its form only
        raise ConfigError(f"{path} is not valid YAML: {error}; put the value in quotes.") from None
    if root is None or values is None:
        return {}, Origins()
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path} must hold a mapping of settings, not a {type(values).__name__}; begin with"
            " lines such as `arena:` and, below and indented, `capacity: 64GiB`."
        )
    origins = Origins(_lines(root, (), path, set()))
    return {str(name): value for name, value in values.items()}, origins


def _read_text(path: Path) -> str:
    try:
        if path.is_fifo():  # opening it would wait for a writer, for ever
            says = f"{path} is a pipe, but every part of the tier reads the configuration"
            raise ConfigError(f"{says}; name a file.")
        with path.open("rb") as file:
            raw = file.read(_BYTES_MAX + 1)
    except IsADirectoryError:
        raise ConfigError(
            f"{path} is a directory and cannot be read; name the file in it, such as"
            f" {path / 'kvray.yaml'}."
        ) from None
    except OSError as error:
        raise ConfigError(
            f"The configuration file {path} cannot be read ({error.strerror}); name an existing"
            " file that this user may read."
        ) from None
    if len(raw) > _BYTES_MAX:
        raise ConfigError(f"{path} has more than {_BYTES_MAX} bytes; name a file of settings.")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is no UTF-8 text (byte {error.start} is {error.object[error.start]:#04x});"
            " save it as UTF-8."
        ) from None


def _lines(
    node: yaml.Node, at: SettingPath, path: Path, visited: set[int]
) -> Iterator[tuple[SettingPath, Origin]]:
    """Yield the line of everything, of an alias that of the first; no key may stand twice."""
    if len(at) > _DEPTH_MAX or id(node) in visited:
        return
    visited.add(id(node))
    entries: list[tuple[str, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.SequenceNode):
        entries = [(str(index), item, item) for index, item in enumerate(node.value)]
    elif isinstance(node, yaml.MappingNode):
        entries = [(str(key.value), key, value) for key, value in node.value]
    seen: dict[str, int] = {}
    for name, begin, value in entries:
        line, below = begin.start_mark.line + 1, (*at, name.lower())
        if name in seen:
            raise ConfigError(
                f"{path}:{line}: {'.'.join((*at, name))} stands in line {seen[name]} already; keep"
                " one of the two."
            )
        seen[name] = line
        yield below, Origin("file", f"{path}:{line}")
        yield from _lines(value, below, path, visited)


class _Sourced(BaseSettings, KVRayConfig):
    """The settings as pydantic-settings reads them; a `KVRayConfig` of its own reads no source."""

    model_config = SettingsConfigDict(
        env_prefix="kvray_",
        env_nested_delimiter="__",
        case_sensitive=True,  # in files; variables come in lower case
        enable_decoding=False,
    )


def _laid(
    values: dict[str, Any],
    origins: Origins,
    variables: Mapping[str, str],
    overrides: Mapping[str, Any] | None = None,
) -> Effective:
    """Lay the environment and what a caller says over `values`, and check what holds."""
    origins, overrides = Origins(origins), overrides or {}
    for name in variables:
        origins.put(_path_of(name), Origin("environment", name))
    for dotted in overrides:
        origins.put(tuple(dotted.split(".")), Origin("command line"))
    sources = tuple(_sources(values, variables, overrides))
    try:
        read = _Sourced(_build_sources=(sources, {}))  # type: ignore[call-arg]
    except ValidationError as error:
        raise ConfigError(explain(error, origins)) from None
    config = KVRayConfig.model_construct(read.model_fields_set, **dict(read))
    refuse_first(contradictions(config), origins)
    return Effective(config, origins)


def _sources(
    values: dict[str, Any], variables: Mapping[str, str], overrides: Mapping[str, Any]
) -> Iterator[PydanticBaseSettingsSource]:
    """Yield the sources; an earlier one wins."""
    # What stands in the place of a section is refused, whatever keys are set over it.
    found = [(name, values[name]) for name in SECTIONS & values.keys()]
    no_sections = [{name: one} for name, one in found if not isinstance(one, dict | None)]
    # So is a variable that names no section: pydantic-settings would skip it.
    paths = [_path_of(name) for name in variables]
    names = {path[0] for path in paths if len(path) > 1} - SECTIONS
    unknown: list[dict[str, Any]] = [{name: {}} for name in sorted(names)]
    said = [
        reduce(lambda below, key: {key: below}, reversed(dotted.split(".")), value)
        for dotted, value in overrides.items()
    ]
    for given in (*no_sections, *unknown, *reversed(said)):
        yield InitSettingsSource(_Sourced, given)
    environment = EnvSettingsSource(_Sourced)
    environment.env_vars = {
        f"kvray_{'__'.join(path)}": text
        for path, text in zip(paths, variables.values(), strict=True)
    }
    yield environment
    yield InitSettingsSource(_Sourced, values)


def _labelled(
    values: dict[str, Any],
    origins: Origins,
    nodes: tuple[NodeConfig, ...],
    labels: Mapping[str, str],
) -> tuple[dict[str, Any], Origins]:
    """Lay what `nodes` says of a node with these labels over `values`, setting by setting."""
    values, origins = dict(values), Origins(origins)
    for index, entry in enumerate(nodes):
        key, _, value = entry.label.partition("=")
        if labels.get(key) != value:
            continue
        for section in ("arena", "nvme"):
            given = getattr(entry, section)
            values[section] = {**(values.get(section) or {}), **given}
            for name in given:
                at = origins.of(("nodes", str(index), section, name))
                where = f"nodes: {entry.label}" + (f" ({at.where})" if at.where else "")
                origins.put((section, name), Origin("node", where))
    return values, origins


def _check_nodes(found: Effective) -> None:
    """Refuse entries of `nodes` that cannot hold, each label alone: nobody knows which meet."""
    config, origins = found.config, found.origins
    for index, entry in enumerate(config.nodes):
        refuse_first(node_contradictions(entry, index), origins)
        key, _, value = entry.label.partition("=")
        given = config.model_dump(exclude_unset=True)
        values, there = _labelled(given, origins, config.nodes, {key: value})
        try:
            _laid(values, there, {})
        except ConfigError as error:
            raise ConfigError(f"On nodes with {entry.label}: {error}") from None


def _leaves(value: Any, at: SettingPath = ()) -> Iterator[tuple[SettingPath, Any]]:
    """Yield what a mapping, or a list of mappings, holds; anything else is one value."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        value = {str(index): one for index, one in enumerate(value)}
    if isinstance(value, dict) and value:
        for name, below in value.items():
            yield from _leaves(below, (*at, name))
    elif value != {} or at[0] != "nodes":  # an entry may leave a section as it is
        yield at, value


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that name a setting, with their values."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if re.match("KVRAY_(.+__|__|(CLUSTER_NAME|NODES)$)", name) and _is_of_people(name, value)
    }


def _is_of_people(name: str, value: str) -> bool:
    """Return whether a person wrote a variable, not Kubernetes for a service kvray-something."""
    is_url = name.endswith("_PORT") and re.match(r"[a-z]+://", value)
    return bool(value) and not _OF_KUBERNETES.fullmatch(name) and not is_url


def _path_of(name: str) -> SettingPath:
    *section, key = name.removeprefix("KVRAY_").split("__")
    section = [one.lower() for one in section]
    is_name = section == ["security", "tenant_quotas"]  # which large letters are part of
    return (*section, key if is_name else key.lower())


def _check_variables(environ: Mapping[str, str]) -> None:
    """Raise ConfigError for a variable that would be ours if it were written as ours are.

    It has one underscore where two part section and key, or is almost the name of the cluster or of
    the file.
    """
    ours = (variable_of(row.name) for row in setting_rows() if "." in row.name)
    meant_by = {one.replace("__", "_"): one for one in ours}
    for name in sorted(environ):
        rest = name.removeprefix("KVRAY_")
        if rest in (name, *_PLAIN) or "__" in rest or not _is_of_people(name, environ[name]):
            continue
        if rest.lower() in SECTIONS:
            raise ConfigError(f"The variable {name} names a whole section; write {name}__SETTING.")
        near = [f"KVRAY_{one}" for one in difflib.get_close_matches(rest, _PLAIN, 1, cutoff=0.85)]
        if meant := meant_by.get(name) or next(iter(near), None):
            raise ConfigError(f"The variable {name} names no setting; write {meant}, or unset it.")
