"""The configuration as it holds: a file, labels of nodes, the environment, what a caller says."""

import copy
import os
from collections.abc import Iterator, Mapping
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from kvray.config.complaint import (
    Contradiction,
    explain,
    first_contradiction,
    located,
    node_contradiction,
    quota_contradiction,
)
from kvray.config.document import DEFAULT, Layers, Origin, SettingPath, read_document
from kvray.config.environment import CONFIG_ENV, check_variables, environment_overrides
from kvray.config.sections import KVRayConfig, NodeConfig, setting_rows
from kvray.errors import ConfigError

WELL_KNOWN_PATH = Path("/etc/kvray/kvray.yaml")
"""Read when nothing names a file: ranks started by a launcher get no environment of ours."""
_OF_A_NODE = ("arena.", "nvme.")
"""What may differ from node to node."""


class Effective(NamedTuple):
    """What holds, and where each value comes from."""

    config: KVRayConfig
    layers: Layers
    path: Path | None
    """The file that was read."""


class Setting(NamedTuple):
    """One value that holds."""

    name: str
    """Dotted; entries of a list by their number."""
    value: Any
    """As JSON: sizes with their unit."""
    origin: Origin

    @property
    def is_default(self) -> bool:
        """Whether nobody has set it."""
        return self.origin is DEFAULT


def load_config(
    path: str | os.PathLike[str] | None = None,
    *,
    overrides: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> KVRayConfig:
    """Read the configuration of the tier; later sources win: file, environment, `overrides`.

    Args:
        path: a YAML file; None: the file that `KVRAY_CONFIG` names, else the well-known path,
            else the defaults.
        overrides: dotted key -> value, for example {"arena.capacity": "2GiB"}; None is no value.
        environ: variables `KVRAY_SECTION__KEY`, for example KVRAY_ARENA__CAPACITY=2GiB; an empty
            one counts as not set.

    Raises:
        ConfigError: the file cannot be read, a key is unknown, a value is out of range, or two
            values contradict each other.
    """
    return read_effective(path, overrides=overrides, environ=environ).config


def read_effective(
    path: str | os.PathLike[str] | None = None,
    *,
    overrides: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] = os.environ,
    labels: Mapping[str, str] | None = None,
) -> Effective:
    """Read the configuration as `load_config`, with the source of every value.

    `labels` are those of the Ray node whose values are asked for; the environment wins over what
    `nodes` says of it. None: the tier's values.
    """
    check_variables(environ)
    named = path or environ.get(CONFIG_ENV)
    source = Path(named) if named else (WELL_KNOWN_PATH if WELL_KNOWN_PATH.is_file() else None)
    values, lines = ({}, {}) if source is None else read_document(source)
    origins = {at: Origin("file", f"{source}:{line}") for at, line in lines.items()}

    def layers_with(nodes: tuple[NodeConfig, ...]) -> Layers:
        layers = Layers(copy.deepcopy(values), dict(origins))
        _put_labelled(layers, nodes, labels or {})
        layers.put_environment(environment_overrides(environ))
        for dotted, value in (overrides or {}).items():
            if value is not None:
                layers.put(dotted, value, Origin("command line"))
        return layers

    layers = layers_with(())
    config = _validated(layers)
    _check_nodes(config, layers)
    # A variable may be that of one small node: quotas are meant for the tier.
    if layers.origin_of(("arena", "capacity"), at_least=2).kind != "environment":
        _refuse(quota_contradiction(config), layers)
    if labels:
        layers = layers_with(config.nodes)
        config = _validated(layers)
    return Effective(config=config, layers=layers, path=source)


def config_on_node(
    config: KVRayConfig,
    environ: Mapping[str, str] = os.environ,
    *,
    labels: Mapping[str, str] | None = None,
) -> KVRayConfig:
    """Return the tier's configuration as it holds on one node, for its arena and its disk.

    Nodes differ in memory, disks and mounts. First come the entries of `nodes` for its labels,
    then its own environment: the variables of the node's Ray, which the actors that it starts
    inherit; engines there need the same ones.
    """
    layers = Layers(config.model_dump(exclude_unset=True))
    _put_labelled(layers, config.nodes, labels or {})
    given = environment_overrides(environ)
    layers.put_environment({k: v for k, v in given.items() if k.startswith(_OF_A_NODE)})
    try:
        return _validated(layers)
    except ConfigError as error:
        raise ConfigError(f"On this node: {error}") from None


def effective_settings(effective: Effective) -> list[Setting]:
    """Return every setting, in the order of the schema; entries of mappings and nodes apart."""
    values, settings = effective.config.model_dump(mode="json"), []
    for row in setting_rows():
        path = tuple(row.name.split("."))
        for rest, value in _leaves(reduce(getitem, path, values)):
            # A leaf may have been given with the whole of its setting, but never with the section.
            written = tuple(part.lower() for part in (*path, *rest))
            origin = effective.layers.origin_of(written, at_least=len(path))
            settings.append(Setting(".".join((*path, *rest)), value, origin))
    return settings


def _put_labelled(layers: Layers, nodes: tuple[NodeConfig, ...], labels: Mapping[str, str]) -> None:
    """Lay what `nodes` says of a node with these labels over what is there."""
    for index, entry in enumerate(nodes):
        key, _, value = entry.label.partition("=")
        if labels.get(key) != value:
            continue
        for section in ("arena", "nvme"):
            for name, given in getattr(entry, section).items():
                at = layers.origin_of(("nodes", str(index), section, name))
                where = f"nodes: {entry.label}" + (f" ({at.where})" if at.where else "")
                layers.put(f"{section}.{name}", copy.deepcopy(given), Origin("node", where))


def _check_nodes(config: KVRayConfig, layers: Layers) -> None:
    """Refuse entries of `nodes` that cannot hold, each label alone: nobody knows which meet."""
    for index, entry in enumerate(config.nodes):
        _refuse(node_contradiction(entry, index), layers)
        key, _, value = entry.label.partition("=")
        there = Layers(config.model_dump(exclude_unset=True), dict(layers.origins))
        _put_labelled(there, config.nodes, {key: value})
        try:
            _validated(there)
        except ConfigError as error:
            raise ConfigError(f"On nodes with {entry.label}: {error}") from None


def _validated(layers: Layers) -> KVRayConfig:
    try:
        config = KVRayConfig.model_validate(layers.values)
    except ValidationError as error:
        raise ConfigError(explain(error, layers)) from None
    _refuse(first_contradiction(config), layers)
    return config


def _refuse(found: Contradiction | None, layers: Layers) -> None:
    if found is not None:
        path, sentence = found
        raise ConfigError(located(layers.origin_of(path), sentence))


def _leaves(value: Any) -> Iterator[tuple[SettingPath, Any]]:
    """Yield what a mapping, or a list of mappings, holds; anything else is one value."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        value = {str(index): one for index, one in enumerate(value)}
    if not isinstance(value, dict) or not value:
        yield (), value
        return
    for name, below in value.items():
        if below == {}:
            continue  # an entry of `nodes` that leaves a section as it is
        for rest, one in _leaves(below):
            yield (name, *rest), one
