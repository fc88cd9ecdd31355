"""A new engine's node is given what its namespace uses most, before Serve sends it requests."""

import logging
import time
from pathlib import Path

import ray

from kvray import Client
from kvray.config import load_config
from kvray.errors import ConfigError, KVRayError, ShardUnavailable

_log = logging.getLogger("ray.serve")
_REGISTER_S = 5.0
"""How long an engine that is ready may take to register with its node's shard."""
_MARGIN_S = 10.0
"""Beyond `warm_up.deadline_s`: others rank their blocks first."""
_CALL_S, _POLL_S = 5.0, 0.25


def warm_up(replica: str, config_path: Path | None) -> None:
    """Return when the nodes of an engine are warmed up, or when that cannot be or is late.

    An engine that could not be warmed up serves all the same.
    """
    config = load_config(config_path, overrides={"ray.timeout_s": _CALL_S})
    if not config.warm_up.share or not ray.is_initialized():
        return
    began = time.monotonic()
    try:
        client = Client(config)
        shards = _ordered(client, replica, until=began + _REGISTER_S)
        until = time.monotonic() + config.warm_up.deadline_s + _MARGIN_S
        found = client.warming(shards)
        while any(one["state"] == "moving" for one in found.values()):
            if time.monotonic() > until:
                raise ShardUnavailable("It is late, and goes on in the background.")
            time.sleep(_POLL_S)
            found = client.warming(shards)
    except KVRayError as error:
        _log.warning("kvray has not warmed up %s: %s", replica, error)
        return
    num_blocks = sum(one["blocks"] for one in found.values())
    seconds = time.monotonic() - began
    _log.info("kvray has warmed up %s: %d blocks in %.1f s", replica, num_blocks, seconds)


def _ordered(client: Client, replica: str, *, until: float) -> list[str]:
    """Order the warm-up once the engine has registered; return its shards."""
    while True:
        try:
            return client.warm_up(replica=replica, by=f"{replica} starts")
        except ConfigError:
            if time.monotonic() > until:
                raise
        time.sleep(_POLL_S)
