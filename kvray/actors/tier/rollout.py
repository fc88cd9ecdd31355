"""Brings a running tier to new settings and new code, one part after the other.

Each part is asked for its build info, and restarts if that is out of date. So the next run finishes
an interrupted one, and a second run does nothing. Between the end of the old supervisor and the
start of the new one no part is started. A run that is killed there leaves parts that still serve,
and the next `kvray up` starts the supervisor first.
"""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kvray import wire
from kvray.actors.build_info import BuildInfo, settings_of
from kvray.actors.lookup.actor import create_lookup
from kvray.actors.names import LOOKUP_NAME, MOVER_PREFIX, SUPERVISOR_NAME, mover_name, shard_name
from kvray.actors.ray_glue.calls import (
    ask_all,
    await_forgotten,
    call,
    get_actor,
    kill_actor,
    list_actors,
    mapped_errors,
)
from kvray.actors.supervisor.supervisor import START_S, create_supervisor, plan_nodes
from kvray.actors.tier.changes import Plan, Step, plan
from kvray.config import KVRayConfig, values_on_nodes
from kvray.errors import KVRayError, ShardUnavailable

_POLL_S = 0.1
_FORGET_S = 10.0
"""How long Ray may take to forget an actor that was killed."""
_STOP_S = 25.0
"""How long a part may take to end in order; killing it then costs no block either."""
_ASK_S = 2.0
_INTERPRETER_S = 60.0
"""How long a node may take to report its installed code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """What may be done to a running tier."""

    upgrade: bool = False
    """Restart parts that run other code than is installed on their node."""
    restart: bool = False
    """Restart all parts."""
    recreate: bool = False
    """Even if that drops blocks in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observer:
    """Hears how a rollout goes; each call may raise to end it there."""

    report: Callable[[list[dict[str, Any]]], None] = lambda shards: None
    """Called often during a wait, with the status of the shards that it waits for."""
    told: Callable[[str], None] = lambda sentence: None
    """Called with a sentence for each part that is done."""


def look(config: KVRayConfig, rollout: Rollout, *, timeout_s: float, observer: Observer) -> Plan:
    """Ask every part of the tier for its build info; return what is to be done.

    Raises:
        ShardUnavailable: a part does not answer in time.
    """
    names = list_actors()
    methods = {name: get_actor(name).build_info for name in names}
    running = _answers(methods, timeout_s, observer)
    installed = None
    if rollout.upgrade:
        homes = {build["node_id"] for build in running.values()}
        installed = _installed(homes, timeout_s + _INTERPRETER_S, observer)
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    planned = plan(
        running,
        settings_of(config),
        labels={node["NodeID"]: node.get("Labels", {}) for node in nodes},
        installed=installed,
        restart=rollout.restart,
    )
    meant, _ = plan_nodes(nodes, set(), config.shard)
    alive = {node["NodeID"] for node in nodes if node["Alive"]}
    return dataclasses.replace(
        planned,
        starts=tuple(sorted(node for node in meant if shard_name(node) not in names)),
        ends=tuple(sorted(node for node in alive - meant if shard_name(node) in names)),
    )


def carry_out(planned: Plan, config: KVRayConfig, *, timeout_s: float, observer: Observer) -> None:
    """Do what was planned, and wait for each part before the next.

    Args:
        planned: by `look`; the user has agreed if it costs blocks.
        config: the new one.
        timeout_s: how long one part may take to serve again, beside the start of its process.
        observer: see there.

    Raises:
        KVRayError: a part failed or did not serve in time. The parts before it have restarted,
            those after it go on as they were.
    """
    if planned.supervisor is not None:
        with contextlib.suppress(KVRayError):
            call(get_actor(SUPERVISOR_NAME).stop, timeout_s=_STOP_S)
        _end(SUPERVISOR_NAME)
    with mapped_errors():
        create_supervisor(config)  # also if a run before this one was killed before it did
    if planned.supervisor is not None:
        observer.told(_done("The supervisor", planned.supervisor))
    if planned.lookup is not None:
        _end(LOOKUP_NAME)
        with mapped_errors():
            create_lookup(config.cluster_name, config.shard.silent_s)
        observer.told(_done("The lookup", planned.lookup))
    for node_id in planned.ends:
        _end_shard(node_id, config, observer)
    skipped = {name for node in planned.ends for name in (shard_name(node), mover_name(node))}
    left = [node for node in planned.nodes if node[0].name not in skipped]
    for number, node in enumerate(left, 1):
        for step in node:
            name = f"{step.name} ({number} of {len(left)})" if len(left) > 1 else step.name
            kept = _restart(step, config, timeout_s, observer)
            observer.told(f"{_done(name, step)}{kept}")


def _restart(step: Step, config: KVRayConfig, timeout_s: float, observer: Observer) -> str:
    """Restart a shard or mover and wait for it; return what else to tell the user."""
    timeout_s += START_S
    if step.name.startswith(MOVER_PREFIX):
        with contextlib.suppress(KVRayError):
            call(get_actor(step.name).stop, timeout_s=_STOP_S)
        _end(step.name)
        supervisor = get_actor(SUPERVISOR_NAME)
        if len(call(supervisor.shards, timeout_s=timeout_s)) > 1:  # a single node has no mover
            _await(step.name, "mover", timeout_s, observer)
        return ""
    _stop_shard(step.name, config, observer, retire=step.retire, flush=bool(step.costs))
    shard = _await(step.name, "shard", timeout_s, observer)
    return f" {shard['arena']['blocks']} blocks in memory{'' if step.costs else ' as before'}."


def _end_shard(node_id: str, config: KVRayConfig, observer: Observer) -> None:
    """End the shard of a node that is no longer chosen, with its arena and its mover."""
    name = shard_name(node_id)
    _end(mover_name(node_id))
    _stop_shard(name, config, observer, retire=True, flush=True)
    observer.told(f"{name} has ended: its node is no longer one of the nodes that get a shard.")


def _stop_shard(
    name: str, config: KVRayConfig, observer: Observer, *, retire: bool, flush: bool
) -> None:
    """End a shard, in order if it can."""
    longest = max(values_on_nodes(config, "nvme", "flush_s"))
    timeout_s = _STOP_S + (longest if flush else 0.0)
    with contextlib.suppress(ShardUnavailable):
        shard = get_actor(name)
        ask_all({name: shard.stop}, timeout_s, retire, flush, meanwhile=lambda: observer.report([]))
    _end(name)


def _end(name: str) -> None:
    kill_actor(name)
    if not await_forgotten([name], _FORGET_S):
        raise ShardUnavailable(
            f"Ray still knows {name}, which was ended {_FORGET_S:.0f} s ago; run this again."
        )


def _await(name: str, kind: str, timeout_s: float, observer: Observer) -> dict[str, Any]:
    """Wait until the supervisor has restarted a part and it serves; return its status."""
    deadline = time.monotonic() + timeout_s
    status: dict[str, Any] = {kind: name, "state": "starting"}
    while True:
        observer.report([status] if kind == "shard" else [])
        with contextlib.suppress(ShardUnavailable):
            status = call(get_actor(name).status, timeout_s=_ASK_S)
        if status["state"] == "serving":
            return status
        if status["state"] == "failed":
            wire.raise_for({"ok": False, **status})
        if time.monotonic() > deadline:
            raise ShardUnavailable(
                f"{name} was restarted and is still {status['state']}; the parts after it go on"
                " as they were. See `kvray status`, and run this again."
            )
        time.sleep(_POLL_S)


def _answers(
    methods: Mapping[str, Any], timeout_s: float, observer: Observer
) -> dict[str, BuildInfo]:
    answers = ask_all(methods, timeout_s, meanwhile=lambda: observer.report([]))
    for name, answer in answers.items():
        if isinstance(answer, KVRayError):
            raise ShardUnavailable(f"{name} does not report its build info: {answer}")
    return answers


def _installed(homes: set[str], timeout_s: float, observer: Observer) -> dict[str, BuildInfo]:
    """Return the build info of the code installed on each node."""
    asked = {
        node_id: ray.remote(_read_installed).options(
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        for node_id in homes
    }
    return _answers(asked, timeout_s, observer)


def _read_installed() -> dict[str, Any]:
    """Ask a new interpreter: Ray may run this in a process that has loaded older code."""
    done = subprocess.run(
        [sys.executable, "-m", "kvray.actors.build_info"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=_INTERPRETER_S,
    )
    if done.returncode:
        raise ShardUnavailable(
            f"The kvray that is installed there does not load: {done.stderr.strip()[-200:]}"
        )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _done(what: str, step: Step) -> str:
    return f"{what} was restarted: {'; '.join(step.reasons)}."
