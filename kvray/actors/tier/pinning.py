"""Pins prompts in a running tier, on all of its nodes."""

import time
from dataclasses import replace
from typing import Any

from kvray.actors.names import LOOKUP_NAME
from kvray.actors.owner.admin import ask_to_be_admitted
from kvray.actors.ray_glue import calls
from kvray.actors.shard.pinning import Pin
from kvray.actors.shard.queries import Prompt
from kvray.config import KVRayConfig
from kvray.errors import ConfigError, KVRayError, ShardUnavailable


def pin(
    tokens: bytes,
    *,
    name: str,
    owner: str,
    seconds: float,
    replica: str | None,
    salt: str | int | None,
    lora: str | None,
    config: KVRayConfig,
    timeout_s: float,
) -> None:
    """Have the blocks of a prompt stay on every node.

    `tokens` are little-endian int32, end to end; `lora` is the adapter's path on the nodes. A
    second pin of a name replaces the first. A node that does not answer hears of it from another.

    Raises:
        ConfigError: a value cannot be used, nobody can tell which replica's prompt it is, or the
            token is missing or wrong.
        CapacityError: no node may keep so much for pins.
        ShardUnavailable: no tier runs there, or no shard answered.
    """
    ask_to_be_admitted(config, timeout_s=timeout_s)
    prompt = _prompt(replica, tokens, salt, lora, timeout_s)
    if not prompt.keys:
        size = prompt.namespace.tokens_per_block
        raise ConfigError(f"A prompt of {len(tokens) // 4} tokens fills no block of {size}.")
    asked = Pin(
        name=name,
        owner=owner,
        made_at=time.time(),
        until=time.time() + seconds,
        num_tokens=len(tokens) // 4,
        block_bytes=prompt.block_bytes,
        num_parts=prompt.namespace.num_parts,
        keys=prompt.keys,
    )
    answers = calls.ask_shards("check_pin", timeout_s, asked)
    for refusal in answers.values():
        if isinstance(refusal, ConfigError):  # while a small node just keeps less
            raise refusal
    asked = replace(asked, made_at=max(_agreed(answers)))
    _agreed(calls.ask_shards("pin", timeout_s, asked))


def unpin(name: str, *, config: KVRayConfig, timeout_s: float) -> None:
    """End a pin on every node; ConfigError: there is none of that name. Otherwise as `pin`."""
    ask_to_be_admitted(config, timeout_s=timeout_s)
    _agreed(calls.ask_shards("unpin", timeout_s, name))


def pins(*, timeout_s: float) -> list[dict[str, Any]]:
    """Return the pins, each with its blocks by shard in `here`; raises as `pin`."""
    answers = calls.ask_shards("status", timeout_s)
    found: dict[str, dict[str, Any]] = {}
    for shard, status in answers.items():
        known = [] if isinstance(status, KVRayError) else status.get("pinned", {}).get("pins", ())
        for one in known:
            about = {key: value for key, value in one.items() if key != "blocks_here"}
            pin = found.setdefault(one["name"], {**about, "here": {}})
            pin["here"][shard] = one["blocks_here"]
    return [found[name] for name in sorted(found)]


def _agreed(answers: dict[str, Any]) -> list[Any]:
    """Return the answers; raise a refusal if all shards that answered refuse."""
    agreed = [one for one in answers.values() if not isinstance(one, KVRayError)]
    if not agreed:
        for one in answers.values():
            if not isinstance(one, ShardUnavailable):
                raise one
        raise ShardUnavailable("No shard answered; see `kvray status`.")
    return agreed


def _prompt(
    replica: str | None, tokens: bytes, salt: str | int | None, lora: str | None, timeout_s: float
) -> Prompt:
    """Return the keys of a prompt as a replica has them; without a name, of the only namespace."""
    if replica is None:
        replica = _only_replica(timeout_s)
    lookup = calls.get_actor(LOOKUP_NAME)
    shards = calls.call(lookup.replica, replica, timeout_s=timeout_s)
    if not shards:
        raise ConfigError(
            f"No replica {replica!r:.80} has registered; `kvray status` shows those that have."
        )
    method = calls.get_actor(shards[min(shards)]).prompt
    prompt: Prompt = calls.call(method, replica, tokens, salt, lora, timeout_s=timeout_s)
    return prompt


def _only_replica(timeout_s: float) -> str:
    replicas: dict[str, str] = {}
    for status in calls.ask_shards("status", timeout_s).values():
        known = () if isinstance(status, KVRayError) else status.get("replicas", ())
        replicas |= {one["namespace"]: one["replica"] for one in known if one["connected"]}
    if len(replicas) == 1:
        return next(iter(replicas.values()))
    raise ConfigError(
        f"Name with --replica whose prompt it is: replicas of {len(replicas)} namespaces are"
        " registered, and each has blocks of its own; `kvray status` shows them."
    )
