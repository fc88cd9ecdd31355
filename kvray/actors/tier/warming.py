"""Warms nodes of a running tier up: what others use most comes to them."""

from collections.abc import Sequence
from typing import Any

from kvray.actors.names import LOOKUP_NAME
from kvray.actors.ray_glue import calls
from kvray.actors.tier.draining import shard_named
from kvray.errors import ConfigError, KVRayError


def warm_up(
    node: str | None,
    replica: str | None,
    seconds: float | None,
    *,
    by: str,
    timeout_s: float,
) -> list[str]:
    """Have a node, or the nodes of a replica, warmed up; return the names of their shards.

    Raises:
        ConfigError: not one of the two is given, or nothing is named so.
        ShardUnavailable: no tier runs there, a shard did not answer, or a node takes none.
    """
    if (node is None) == (replica is None):
        raise ConfigError("Give a node, or a replica with --replica.")
    if node is not None:
        shards = [shard_named(node, timeout_s=timeout_s)]
    else:
        lookup = calls.get_actor(LOOKUP_NAME)
        shards = sorted(set(calls.call(lookup.replica, replica, timeout_s=timeout_s).values()))
        if not shards:
            raise ConfigError(
                f"No replica {replica!r:.80} has registered; `kvray status` shows those that have."
            )
    _ask_all(shards, "warm_up", by, replica, seconds, timeout_s=timeout_s)
    return shards


def warming(shards: Sequence[str], *, timeout_s: float) -> dict[str, dict[str, Any]]:
    """Return how far the warm-ups of shards are, as `status` has it; ShardUnavailable as above."""
    return _ask_all(shards, "warming", timeout_s=timeout_s)


def _ask_all(shards: Sequence[str], method: str, *args: Any, timeout_s: float) -> dict[str, Any]:
    methods = {shard: getattr(calls.get_actor(shard), method) for shard in shards}
    answers = calls.ask_all(methods, timeout_s, *args)
    for answer in answers.values():
        if isinstance(answer, KVRayError):
            raise answer
    return answers
