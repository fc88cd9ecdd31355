"""Takes nodes out of a running tier: what only they have goes to others first."""

from typing import Any

from kvray.actors.names import SHARD_PREFIX, SUPERVISOR_NAME, shard_name
from kvray.actors.owner.admin import ask_to_be_admitted
from kvray.actors.ray_glue import calls
from kvray.config import KVRayConfig
from kvray.errors import ConfigError

BY_HAND = "kvray drain"


def drain(node: str, seconds: float | None, *, config: KVRayConfig, timeout_s: float) -> str:
    """Have a node drained; return the name of its shard.

    `node` is the beginning of its id, or the name of its shard.

    Raises:
        ConfigError: no node, or several, are named so; or the token is missing or wrong.
        ShardUnavailable: no tier runs there, or the shard did not answer.
    """
    return _told(node, "drain", BY_HAND, seconds, config=config, timeout_s=timeout_s)


def call_off(node: str, *, config: KVRayConfig, timeout_s: float) -> str:
    """Have a node stay that `drain` was to take; otherwise as `drain`."""
    return _told(node, "call_off_drain", BY_HAND, config=config, timeout_s=timeout_s)


def _told(node: str, method: str, *args: Any, config: KVRayConfig, timeout_s: float) -> str:
    ask_to_be_admitted(config, timeout_s=timeout_s)
    name = _shard_named(node, timeout_s=timeout_s)
    calls.call(getattr(calls.get_actor(name), method), *args, timeout_s=timeout_s)
    return name


def _shard_named(node: str, *, timeout_s: float) -> str:
    """Return the name of a node's shard; arguments and errors as `drain`."""
    nodes = calls.call(calls.get_actor(SUPERVISOR_NAME).shards, timeout_s=timeout_s)
    meant = node.removeprefix(SHARD_PREFIX)
    found = [one for one in sorted(nodes) if meant and one.startswith(meant)]
    if len(found) != 1:
        known = ", ".join(one[:12] for one in (found or sorted(nodes))) or "none"
        fault = "several nodes are" if found else "no node is"
        raise ConfigError(f"{node!r:.40}: {fault} named so; the nodes with shards are {known}.")
    return shard_name(found[0])
