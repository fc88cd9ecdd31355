"""Brings a running tier to new settings and new code, one part after the other.

A part restarts if its build info is out of date. So the next run finishes an interrupted one, and
a second run does nothing. If it is killed between the old supervisor and the new one, the parts
serve, and the next `kvray up` starts the supervisor first.

A wait goes on while something moves, since a busy machine is slow and not stuck.
"""

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray

from kvray import wire
from kvray.actors.build_info import BuildInfo, settings_of
from kvray.actors.lookup.actor import create_lookup
from kvray.actors.names import (
    LOOKUP_NAME,
    SHARD_PREFIX,
    SUPERVISOR_NAME,
    is_lookup,
    lookup_names,
    mover_name,
    node_of,
    shard_name,
)
from kvray.actors.ray_glue import calls
from kvray.actors.supervisor.supervisor import START_S, chosen_nodes, create_supervisor, going
from kvray.actors.tier.changes import Plan, Step, plan
from kvray.config import KVRayConfig, values_on_nodes
from kvray.errors import KVRayError, ShardUnavailable

_MOST_S = 900.0


class Patience:
    """Ends a wait in which nothing has moved for `still_s`, or that takes `most_s` in all."""

    def __init__(self, still_s: float, *, most_s: float = _MOST_S) -> None:
        """Begin to wait now."""
        self._still_s = still_s
        self._seen: object = None
        self._moved_at = time.monotonic()
        self._until = self._moved_at + most_s

    def is_over(self, seen: object, *, still_s: float | None = None) -> bool:
        """Return whether to give up; `seen` differs from the last call's if something has moved.

        `still_s` replaces the wait's own for this look.
        """
        now = time.monotonic()
        if seen != self._seen:
            self._seen, self._moved_at = seen, now
        return now > min(self._moved_at + (still_s or self._still_s), self._until)


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
    """The changes that a running tier may undergo."""

    restart: bool = False
    """Restart all parts."""
    recreate: bool = False
    """Drop blocks in memory if a change needs that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observer:
    """Hears how a start or a change goes; each call may raise to end it there."""

    waiting: Callable[[float], None] = lambda elapsed_s: None
    """Called while Ray starts, with the seconds it has taken."""
    report: Callable[[list[dict[str, Any]]], None] = lambda shards: None
    """Called often during a wait, with the statuses of the shards that it waits for."""
    told: Callable[[str], None] = lambda sentence: None
    """Called with a sentence about each part that has restarted, or about what an end has left."""


SILENT = Observer()


def look(config: KVRayConfig, rollout: Rollout, *, timeout_s: float, observer: Observer) -> Plan:
    """Ask every part for its build info, and plan; ShardUnavailable: a part did not answer."""
    gone = going()
    names = [name for name in calls.list_actors() if node_of(name) not in gone]
    hearing = partial(observer.report, [])
    running = _checked(calls.ask(names, "build_info", timeout_s, meanwhile=hearing))
    homes = {build["node_id"] for build in running.values()}
    asked = {node_id: calls.on_node(node_id, _read_installed) for node_id in homes}
    installed = _checked(calls.ask_all(asked, timeout_s + _INTERPRETER_S, meanwhile=hearing))
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    planned = plan(
        running,
        settings_of(config),
        labels={node["NodeID"]: node.get("Labels", {}) for node in nodes},
        installed=installed,
        restart=rollout.restart,
    )
    meant = {node for node in chosen_nodes(nodes, config.shard) if node[:12] not in gone}
    alive = {node["NodeID"] for node in nodes if node["Alive"]}
    return dataclasses.replace(
        planned,
        starts=tuple(sorted(node for node in meant if shard_name(node) not in names)),
        ends=tuple(sorted(node for node in alive - meant if shard_name(node) in names)),
    )


def carry_out(planned: Plan, config: KVRayConfig, *, timeout_s: float, observer: Observer) -> Any:
    """Carry out a plan of `look`, and wait for each part before the next; return the supervisor.

    One part may make no progress for `timeout_s`, beside the start of its process. If one fails or
    does not serve then, those after it go on as they were.
    """
    restarts = {step.name: step for step in planned.steps}
    step = restarts.pop(SUPERVISOR_NAME, None)
    lookups = {name: restarts.pop(name) for name in list(restarts) if is_lookup(name)}
    if step is not None:
        _end(SUPERVISOR_NAME, observer)
    supervisor = create_supervisor(config)  # also if a run before was killed before it did
    if planned.steps or planned.ends:  # without one nobody would start a shard again
        alive = {SUPERVISOR_NAME: supervisor.ping}
        hearing = partial(observer.report, [])
        calls.all_of(calls.ask_all(alive, timeout_s + START_S, meanwhile=hearing))
    if step is not None:
        observer.told(_done("The supervisor", step))
    for name, step in lookups.items():
        _end(name, observer)
        if name in (meant := lookup_names(config.lookup.partitions)):
            create_lookup(config.cluster_name, config.shard.silent_s, meant.index(name))
        observer.told(_done("The lookup" if name == LOOKUP_NAME else name, step))
    flush_s = _STOP_S + max(values_on_nodes(config, "nvme", "flush_s"))
    for node_id in planned.ends:
        shard, mover = shard_name(node_id), mover_name(node_id)
        _end(mover, observer)
        _end(shard, observer, True, True, timeout_s=flush_s)
        observer.told(f"{shard} has ended: its node is no longer among those that get a shard.")
        restarts.pop(shard, None)
        restarts.pop(mover, None)
    homes = list(dict.fromkeys(node_of(name) for name in restarts))
    for name, step in restarts.items():
        if node_of(name) in going():
            observer.told(f"{name} stays as it is: its node goes.")
            continue
        kept = ""
        if name.startswith(SHARD_PREFIX):
            flush = bool(step.costs)
            _end(name, observer, step.retire, flush, timeout_s=flush_s if flush else _STOP_S)
            blocks = _await(name, timeout_s + START_S, observer)["arena"]["blocks"]
            kept = f" {blocks} blocks in memory{'' if flush else ' as before'}."
        else:
            _end(name, observer)
            shards = calls.call(calls.get_actor(SUPERVISOR_NAME).shards, timeout_s=timeout_s)
            if len(shards) > 1:  # a single node has no mover
                _await(name, timeout_s + START_S, observer)
        count = f" ({homes.index(node_of(name)) + 1} of {len(homes)})" if len(homes) > 1 else ""
        observer.told(f"{_done(name + count, step)}{kept}")
    return supervisor


def _end(name: str, observer: Observer, *stop: bool, timeout_s: float = _STOP_S) -> None:
    """End a part for good; in order, if it can."""
    # The lookup has no such method: it owns nothing that it would have to bring in order.
    calls.ask([name], "stop", timeout_s, *stop, meanwhile=partial(observer.report, []))
    if not calls.await_end(name, calls.kill_actor(name), _FORGET_S):
        raise ShardUnavailable(
            f"Ray still lists {name} {_FORGET_S:.0f} s after its end; run the command again."
        )


def _await(name: str, still_s: float, observer: Observer) -> dict[str, Any]:
    """Wait until the supervisor has restarted a part and it serves; return its status."""
    patience = Patience(still_s)
    status: dict[str, Any] = {"shard": name, "state": "starting"}
    while status["state"] != "serving":
        observer.report([status] if name.startswith(SHARD_PREFIX) else [])
        try:
            status = calls.call(calls.get_actor(name).status, timeout_s=_ASK_S)
        except ShardUnavailable:
            if not calls.list_actors(SUPERVISOR_NAME) or node_of(name) in going():
                raise  # the tier was ended meanwhile, or the node goes: nobody restarts the part
            if (why := faults(_ASK_S).get(name)) is not None:
                raise ShardUnavailable(why) from None
        if status["state"] == "failed":
            wire.raise_for({"ok": False, **status})
        if patience.is_over((status["state"], status.get("done"))):
            raise ShardUnavailable(
                f"{name} was restarted and is still {status['state']}; see `kvray status`, and"
                " run this again. The parts after it go on as they were."
            )
        time.sleep(_POLL_S)
    return status


def faults(timeout_s: float) -> dict[str, str]:
    """Return the parts that the supervisor cannot start, and why; none while it does not answer."""
    answer = calls.ask([SUPERVISOR_NAME], "faults", timeout_s).get(SUPERVISOR_NAME)
    return answer if isinstance(answer, dict) else {}


def _checked(answers: dict[str, Any]) -> dict[str, BuildInfo]:
    for name, answer in answers.items():
        if isinstance(answer, KVRayError):
            raise ShardUnavailable(f"{name} does not report its build info: {answer}")
    return answers


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
            f"The kvray installed there does not load: {done.stderr.strip()[-200:]}"
        )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _done(what: str, step: Step) -> str:
    return f"{what} was restarted: {'; '.join(step.reasons)}."
