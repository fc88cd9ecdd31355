"""The tier as a whole on a Ray cluster that this process is connected to: up, status, down.

And what people ask of a part of it: to drain a node, to have a replica go by other weights.
"""

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from kvray import wire
from kvray.actors.hosts import labels, node_meant
from kvray.actors.lookup.actor import create_lookup
from kvray.actors.names import (
    LOOKUP_NAME,
    MOVER_PREFIX,
    SHARD_PREFIX,
    SUPERVISOR_NAME,
    lookup_names,
    mover_name,
    namespace_of,
    node_of,
    routes_namespace,
    shard_name,
)
from kvray.actors.owner.admin import ask_to_be_admitted, proof_of
from kvray.actors.owner.ownership import sweep
from kvray.actors.ray_glue import calls
from kvray.actors.supervisor.supervisor import START_S, chosen_nodes, create_supervisor, going
from kvray.actors.tier.changes import check_costs
from kvray.actors.tier.rollout import (
    SILENT,
    Observer,
    Patience,
    Rollout,
    carry_out,
    faults,
    look,
)
from kvray.actors.tier.sizing import combined
from kvray.config import WEIGHTS_VERSION_MAX, KVRayConfig, config_on_node, values_on_nodes
from kvray.errors import ConfigError, KVRayError, ShardUnavailable
from kvray.store.arena.file import ARENA_FILE
from kvray.store.sizing import Plan, result_of

_SUMMED = "keys", "entries", "bytes", "queries", "queried_blocks", "resyncs"
_OF_ALL = "shards", "lookup"
"""Of the status of a partition, what is not its own."""
_BY_HAND = "kvray drain"
_POLL_S = 0.1
_SUPERVISOR_TIMEOUT_S = 6.0
_REPORT_TIMEOUT_S = 1.0
"""How long to wait for the statuses of shards that start or end, before the next look."""
_ENGINE_S = 5.0
"""How long engines may take to hear of other weights; they ask their shards every second."""
SWEEP_WAIT_S = 10.0
"""How long a killed shard's process may take to be gone: it gives its memory back before its lock,
half a second a GiB."""


def up(
    config: KVRayConfig,
    *,
    timeout_s: float,
    observer: Observer = SILENT,
    wait: bool = True,
    rollout: Rollout | None = None,
) -> list[dict[str, Any]]:
    """Start the missing parts of the tier, bring the rest to `config`, and wait until all serve.

    A second call changes nothing. The wait goes on while parts make progress; `timeout_s` is how
    long the cluster may have no node for a shard, and how long a part may take to answer. Without
    `wait`, chosen nodes may join later. Returns the shards' statuses.

    Raises:
        ConfigError: no node is chosen, the change costs blocks that `rollout` keeps, or the token
            is missing or wrong.
        CapacityError: a shard could not get its memory.
        ShardUnavailable: the shards were not ready, and made no progress for long.
    """
    proof_of(config)  # raises: nobody could end a tier whose token nobody can read
    rollout = rollout or Rollout()
    if (joined := calls.current_namespace()) != namespace_of(config.cluster_name):
        raise ConfigError(  # the actors would inherit it
            f"This process joined Ray in the namespace {joined!r}; have `connect_configured` join"
            f" it for the tier {config.cluster_name!r}."
        )
    is_running = bool(calls.list_actors())
    create_lookup(config.cluster_name, config.shard.silent_s)
    if is_running:
        planned = look(config, rollout, timeout_s=timeout_s, observer=observer)
        check_costs(planned, recreate=rollout.recreate)
        nodes = ray.nodes() if planned.ends else []  # type: ignore[no-untyped-call]
        if wait and planned.ends and not chosen_nodes(nodes, config.shard):
            raise _not_ready(config, [], None)  # before it ends all shards
        if planned.steps or planned.ends:
            ask_to_be_admitted(config, timeout_s=timeout_s)
        supervisor = carry_out(planned, config, timeout_s=timeout_s, observer=observer)
    else:
        supervisor = create_supervisor(config)
    patience = Patience(timeout_s + START_S)
    while True:
        found, is_there = None, True
        try:
            found = _shard_statuses(_REPORT_TIMEOUT_S)
        except ShardUnavailable:  # the supervisor does not answer, as when it starts
            with suppress(ShardUnavailable):
                is_there = SUPERVISOR_NAME in calls.list_actors(SUPERVISOR_NAME)
        shards = found or []
        observer.report(shards)
        for shard in shards:
            if shard["state"] == "failed":
                wire.raise_for({"ok": False, **shard})
        is_ready = shards and all(
            one["state"] == "serving" or node_of(one["shard"]) in going() for one in shards
        )
        if found is not None and (is_ready or not wait):
            return shards
        seen = [(one["shard"], one["state"], one.get("done")) for one in shards]
        still_s = timeout_s if found == [] else None
        if not is_there or patience.is_over((found is None, seen), still_s=still_s):
            raise _not_ready(config, found, supervisor)
        time.sleep(_POLL_S)


def status(*, timeout_s: float) -> dict[str, Any]:
    """Return the statuses of all parts; one that did not answer has a status that says so.

    `hosts` are those of the nodes with shards and of the `lost` ones: seconds since Ray lost a node
    that it did not want to drain, and that is not back. `first_tokens_s` has the number of first
    tokens that routers saw in the last 10 minutes, and the p50 and p90 of their times, if any.

    Raises:
        ShardUnavailable: no tier runs in this Ray cluster, or its supervisor did not answer.
    """
    supervisor = calls.get_actor(SUPERVISOR_NAME)
    config: KVRayConfig = calls.call(supervisor.config, timeout_s=timeout_s)
    movers = map(mover_name, calls.call(supervisor.movers, timeout_s=timeout_s))
    shards = _shard_statuses(timeout_s)
    lost = calls.call(supervisor.lost, timeout_s=timeout_s)
    return {
        "cluster_name": config.cluster_name,
        "version": calls.call(supervisor.build_info, timeout_s=timeout_s)["version"],
        "address": ray.get_runtime_context().gcs_address,
        "lookup": _lookup_status(config.lookup.partitions, timeout_s),
        "shards": shards,
        "movers": _statuses("mover", calls.ask(movers, "status", timeout_s)),
        "hosts": calls.hosts_of(node_of(shard["shard"]) for shard in shards)
        | {node: one["host"] for node, one in lost.items()},
        "lost": {node: round(one["s_ago"], 1) for node, one in lost.items()},
        "first_tokens_s": _first_tokens(config.cluster_name, timeout_s),
    }


def _shard_statuses(timeout_s: float) -> list[dict[str, Any]]:
    """Return the statuses of all shards; one that cannot be started has failed."""
    found = _statuses("shard", calls.ask_shards("status", timeout_s))
    if any(one["state"] == "unreachable" for one in found):
        known = faults(timeout_s)
        for one in found:
            if one["state"] == "unreachable" and one["shard"] in known:
                one["state"], one["error"] = "failed", ShardUnavailable.__name__
                one["message"] = known[one["shard"]]
    return found


def _first_tokens(cluster_name: str, timeout_s: float) -> dict[str, float]:
    """Return what the routers of all deployments know; nothing of those that do not answer."""
    asked: dict[str, Any] = {}
    namespace = routes_namespace(cluster_name)
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] == namespace:
            with suppress(RayError, ValueError):  # it has ended since
                asked[actor["name"]] = ray.get_actor(actor["name"], namespace).first_tokens
    answers = calls.ask_all(asked, timeout_s).values()
    found = [one for told in answers if not isinstance(told, KVRayError) for one in told]
    if not found:
        return {}
    found.sort()
    return {"num": len(found)} | {f"p{p}": found[len(found) * p // 100] for p in (50, 90)}


def hosts(*, timeout_s: float) -> dict[str, dict[str, str]]:
    """Return node -> name and ip of its host, of the nodes with shards, as far as Ray says."""
    return calls.hosts_of(calls.call(calls.get_actor(SUPERVISOR_NAME).shards, timeout_s=timeout_s))


def _lookup_status(num_partitions: int, timeout_s: float) -> dict[str, Any]:
    """Return the status of the lookup; of several partitions the first one's, with sums over all.

    A partition that did not answer has a status that says so.
    """
    names = lookup_names(num_partitions)
    answers = calls.ask(names, "status", timeout_s)
    partitions = _statuses("lookup", {name: answers[name] for name in names})
    return partitions[0] if num_partitions == 1 else summed(partitions[0], partitions)


def summed(first: dict[str, Any], partitions: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the status of the lookup from those of its partitions, which are kept beside it."""
    sums = {name: sum(one.get(name, 0) for one in partitions) for name in _SUMMED}
    apart = [
        {"lookup": name} | {key: value for key, value in one.items() if key not in _OF_ALL}
        for name, one in zip(lookup_names(len(partitions)), partitions, strict=True)
    ]
    per_key = round(sums["bytes"] / max(1, sums["keys"]), 1)
    return {**first, **sums, "bytes_per_key": per_key, "partitions": apart}


def contents(namespace: str | None, hottest: int, *, timeout_s: float) -> dict[str, Any]:
    """Return shard -> its answer to `ActorRequests.contents`, without silent shards.

    ConfigError: `namespace` names none.
    """
    answers = calls.ask_shards("contents", timeout_s, namespace, hottest)
    for answer in answers.values():
        if isinstance(answer, ConfigError):
            raise answer
    return {name: one for name, one in answers.items() if not isinstance(one, KVRayError)}


def sizing(*, timeout_s: float, now: bool) -> dict[str, Any]:
    """Return the curves of all nodes as one; `now`: replay their samples here, for seconds each."""
    shards = status(timeout_s=timeout_s)["shards"]
    plans = calls.ask_shards("sizing_plan", timeout_s) if now else {}
    for shard in shards:
        plan = plans.get(shard["shard"])
        if isinstance(plan, Plan):
            drawn = plan.drawn(result_of(plan.steps()))
            shard["traffic"] = {**drawn, "age_s": 0.0}
    return combined(shards)


def clear(*, timeout_s: float, config: KVRayConfig | None = None) -> int:
    """Evict every block that nobody leases, on every node; return how many.

    ShardUnavailable: a shard did not answer; the others have cleared.
    """
    return sum(calls.all_of(calls.ask_shards("clear", timeout_s, proof_of(config))))


def set_weights_version(
    replica: str, version: object, *, config: KVRayConfig, timeout_s: float
) -> list[int]:
    """Have all ranks of a replica go by a version of weights; see `Client.set_weights_version`."""
    text = None if version is None else str(version)
    is_one = isinstance(version, str | int | None) and not isinstance(version, bool)
    if not is_one or (text is not None and not 0 < len(text) <= WEIGHTS_VERSION_MAX):
        raise ConfigError(
            f"A version of weights is a number, or a text of 1 to {WEIGHTS_VERSION_MAX} characters,"
            f" not {version!r:.40}."
        )
    ask_to_be_admitted(config, timeout_s=timeout_s)
    ranks = calls.call(calls.get_actor(LOOKUP_NAME).replica, replica, timeout_s=timeout_s)
    methods = {shard: calls.get_actor(shard).set_weights_version for shard in set(ranks.values())}
    answers = calls.ask_all(methods, timeout_s, replica, text, min(_ENGINE_S, timeout_s / 2))
    found = {rank: ranks for answer in calls.all_of(answers) for rank, ranks in answer.items()}
    if not found:
        raise ConfigError(
            f"No engine of a replica {replica!r:.80} is connected; `kvray ls` shows those that are."
        )
    num_ranks = max(found.values())
    if num_ranks > 1 and (missing := set(range(num_ranks)) - set(found)):
        raise ShardUnavailable(
            f"Ranks {sorted(missing)} of replica {replica!r:.80} are not connected now; call again"
            " when `kvray status` shows them."
        )
    return sorted(found)


def order_drain(node: str, order: str, *args: Any, config: KVRayConfig, timeout_s: float) -> str:
    """Order or call off the drain of one node, by a method of its shard; return the shard's name.

    `node` is a host name, an IP, the beginning of an id, or the name of its shard.

    Raises:
        ConfigError: no node, or several, are named so; or the token is missing or wrong.
        ShardUnavailable: no tier runs there, or the shard did not answer.
    """
    ask_to_be_admitted(config, timeout_s=timeout_s)
    ids = calls.call(calls.get_actor(SUPERVISOR_NAME).shards, timeout_s=timeout_s)
    unknown = {one[:12]: {"name": "unknown host", "ip": ""} for one in ids}
    name = shard_name(node_meant(node, unknown | calls.hosts_of(ids)))
    calls.call(getattr(calls.get_actor(name), order), _BY_HAND, *args, timeout_s=timeout_s)
    return name


def down(
    *,
    timeout_s: float,
    config: KVRayConfig | None = None,
    flush: bool = False,
    only_new: bool = False,
    observer: Observer = SILENT,
) -> bool:
    """End the tier and remove its arenas; False if there was none. Again is fine.

    `only_new`: arenas that were there before the tier's shards stay, with their blocks.

    It kills parts that hang, and removes the files of dead shards on every node that Ray reaches.
    Files on disk stay. `config` names the shards' directory if no supervisor does, and the token;
    ConfigError: the tier asks for another one. `flush`: shards write blocks that are only in memory
    to an NVMe tier, within `nvme.flush_s`. Each step may take `timeout_s`.
    """
    found = bool(calls.list_actors())
    if found:
        ask_to_be_admitted(config, timeout_s=timeout_s)
    configs = [] if config is None else [config]
    ask_s = min(timeout_s, _SUPERVISOR_TIMEOUT_S)
    running = calls.ask([SUPERVISOR_NAME], "config", ask_s)[SUPERVISOR_NAME]
    if not isinstance(running, KVRayError):
        configs.append(running)
    calls.ask([SUPERVISOR_NAME], "stop", ask_s)
    calls.kill_actor(SUPERVISOR_NAME)
    # Named by Ray, not by the supervisor, which may be gone or just restarted.
    for name in calls.list_actors(MOVER_PREFIX):
        calls.kill_actor(name)  # before the shards: it would look for their arenas again
    names = calls.list_actors(SHARD_PREFIX)
    longest = [s for one in configs if flush for s in values_on_nodes(one, "nvme", "flush_s")]

    def tell() -> None:
        observer.report(_statuses("shard", calls.ask(names, "status", _REPORT_TIMEOUT_S)))

    meanwhile = tell if flush else None
    stop_s = timeout_s + max(longest, default=0.0)
    how = (True, flush, True) if only_new else (True, flush)
    answers = calls.ask(names, "stop", stop_s, *how, meanwhile=meanwhile)
    stopped = {name for name in names if not isinstance(answers[name], KVRayError)}
    for name in (*names, LOOKUP_NAME, *calls.list_actors(f"{LOOKUP_NAME}-")):
        calls.kill_actor(name)
    for one in {one.node_dir: one for one in configs}.values():
        if left := _sweep_nodes(one, stopped, timeout_s, only_new=only_new):
            hosts = labels(calls.hosts_of(left))
            where = ", ".join(hosts.get(one[:12], one[:12]) for one in left)
            observer.told(
                f"{one.node_dir} may still be on {where}: a shard there takes long to"
                " end, or Ray did not get through; run `kvray down` again."
            )
    # So that `up` gets new ones and not dying ones.
    ended, until = set(calls.list_actors()), time.monotonic() + timeout_s
    with suppress(KVRayError):  # all has ended; Ray may be about to end, too
        while ended & set(calls.list_actors()) and time.monotonic() < until:
            time.sleep(_POLL_S)
    return found


def _not_ready(
    config: KVRayConfig, shards: list[dict[str, Any]] | None, supervisor: Any
) -> ConfigError | ShardUnavailable:
    named = {"resource": config.shard.resource, "label": config.shard.label}
    given = " and ".join(f"{what} {name!r}" for what, name in named.items() if name is not None)
    if shards == [] and given:
        return ConfigError(
            f"No node of the Ray cluster has the {given}; start nodes with it, unset shard.resource"
            " and shard.label, or, if kvray left those that nobody uses, add --no-wait."
        )
    if shards is None:
        why = calls.ask_all({"": supervisor.ping}, _REPORT_TIMEOUT_S)[""] or ""
        return ShardUnavailable(
            f"The supervisor does not answer. {why} If nobody ran `kvray down` meanwhile, see its"
            " log, and whether Ray's head has this kvray installed; or run this again."
        )
    states = ", ".join(f"{shard['shard']} {shard['state']}" for shard in shards) or "none started"
    return ShardUnavailable(
        f"The shards are not ready and make no progress ({states}); see `kvray status`."
    )


def _statuses(kind: str, answers: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the statuses among `answers`; a part that did not answer has one that says so."""
    return [
        {kind: name, "state": "unreachable", "message": str(answer)}
        if isinstance(answer, KVRayError)
        else answer
        for name, answer in answers.items()
    ]


def _sweep_nodes(
    config: KVRayConfig, stopped: set[str], timeout_s: float, *, only_new: bool = False
) -> list[str]:
    """Remove the files of shards that did not say that they had; `only_new`: but for arenas.

    Returns the ids of the nodes that may still have some.
    """
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    chosen = chosen_nodes(nodes, config.shard)
    sweeps = {
        one: calls.on_node(one, _sweep_node) for one in chosen if shard_name(one) not in stopped
    }
    answers = calls.ask_all(sweeps, timeout_s, config, only_new)
    _sweep(config.node_dir, only_new)  # of a node that Ray has lost, if this is it
    return sorted(one for one, is_done in answers.items() if is_done is not True)


def _sweep_node(config: KVRayConfig, only_new: bool) -> bool:
    return _sweep(config_on_node(config, labels=calls.node_labels()).node_dir, only_new)


def _sweep(directory: Path, only_new: bool) -> bool:
    is_kept = only_new and os.path.exists(directory / ARENA_FILE)
    return is_kept or sweep(directory, SWEEP_WAIT_S)
