"""Tells running engines which weights they have."""

from kvray.actors.names import LOOKUP_NAME
from kvray.actors.owner.admin import ask_to_be_admitted
from kvray.actors.ray_glue.calls import ask_all, call, get_actor
from kvray.config import WEIGHTS_VERSION_MAX, KVRayConfig
from kvray.errors import ConfigError, KVRayError, ShardUnavailable

_ENGINE_S = 5.0
"""How long engines may take to hear of it; they ask their shards every second."""


def set_version(
    replica: str, version: str | int | None, *, config: KVRayConfig, timeout_s: float
) -> list[int]:
    """Have all ranks of a replica go by a version of weights; see `Client.set_weights_version`."""
    text = version if version is None else _checked(version)
    ask_to_be_admitted(config, timeout_s=timeout_s)
    ranks = call(get_actor(LOOKUP_NAME).replica, replica, timeout_s=timeout_s)
    methods = {shard: get_actor(shard).set_weights_version for shard in set(ranks.values())}
    answers = ask_all(methods, timeout_s, replica, text, min(_ENGINE_S, timeout_s / 2))
    for answer in answers.values():
        if isinstance(answer, KVRayError):
            raise answer
    found = {rank: ranks for answer in answers.values() for rank, ranks in answer.items()}
    if not found:
        raise ConfigError(
            f"No engine of a replica {replica!r:.80} is connected; `kvray status` shows those that"
            " are."
        )
    num_ranks = max(found.values())
    if num_ranks > 1 and (missing := set(range(num_ranks)) - set(found)):
        raise ShardUnavailable(
            f"Ranks {sorted(missing)} of replica {replica!r:.80} are not connected now; call again"
            " when `kvray status` shows them."
        )
    return sorted(found)


def _checked(version: object) -> str:
    text = str(version)
    is_one = isinstance(version, str | int) and not isinstance(version, bool)
    if not is_one or not 0 < len(text) <= WEIGHTS_VERSION_MAX:
        raise ConfigError(
            f"A version of weights is a number, or a text of 1 to {WEIGHTS_VERSION_MAX} characters,"
            f" not {version!r:.40}."
        )
    return text
