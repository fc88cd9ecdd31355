"""The supervisor: keeps a shard that answers on every chosen node."""

import contextlib
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Set
from typing import Any

import ray

from kvray.actors.build_info import BuildInfo, build_info_of, settings_of
from kvray.actors.hosts import labels
from kvray.actors.lookup.actor import create_lookup
from kvray.actors.mover.actor import create_mover
from kvray.actors.names import (
    LOOKUP_NAME,
    SUPERVISOR_NAME,
    is_lookup,
    lookup_names,
    mover_name,
    shard_name,
)
from kvray.actors.owner.admin import check_proof
from kvray.actors.ray_glue import calls
from kvray.actors.ray_glue.private import draining_nodes, unused_nodes
from kvray.actors.shard.actor import create_shard
from kvray.actors.supervisor.watch import IdleNodes, Pings, Share, Silences, reachable
from kvray.actors.telemetry.figures import PartCounts
from kvray.actors.telemetry.metrics_export import MetricsExport
from kvray.config import KVRayConfig, ShardConfig
from kvray.errors import KVRayError, ShardUnavailable

_log = logging.getLogger("kvray.supervisor")

START_S = 120.0
"""How long a part may take to answer for the first time; a busy machine takes a minute for it."""

_POLL_S = 1.0
_CALL_TIMEOUT_S = 5.0
_PING_TIMEOUT_S = 1.0
_FROZEN_S = 5.0
"""The supervisor ends a part after so long a silence: no part works so long without a pause."""
_LOST_S, _LOST_MAX = 3600.0, 64
"""How long a node that Ray lost is told of, and how many of them."""
_MISSES = 3
"""The part has also missed this many pings in a row, however long the rounds were."""
_START_PAUSE_MAX_S = 60.0
"""The pause before another start of what cannot be started: the first is a second, each next one
twice as long. Each start costs a process and its log files."""
_BY_RAY = "Ray"
_ASKED_MAX = 200
"""Parts that one round asks: 30 ms of CPU, however many there are."""
_NODES_PER_S = 500
"""Nodes that are looked at in a second, on average: of 3,000 a look takes 40 ms of CPU."""
_LOOK_MAX_S = 10.0
_LEAVE_S = 30.0
"""How long what only an idle node has may take to others, at least, if Ray does not give it more;
then it goes to the node's disk."""


def chosen_nodes(nodes: list[dict[str, Any]], shard: ShardConfig) -> set[str]:
    """Return the ids of the living ones of `ray.nodes()` that are to have a shard."""
    name, _, value = (shard.label or "").partition("=")
    return {
        node["NodeID"]
        for node in nodes
        if node["Alive"]
        and (shard.resource is None or node["Resources"].get(shard.resource, 0) > 0)
        and (shard.label is None or node.get("Labels", {}).get(name) == value)
    }


def going() -> set[str]:
    """Return the nodes, as `node_of` names them, that Ray drains or has lost: it starts none there.

    A part that ends there has ended for good, though Ray lists it until the node is gone.
    """
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    lost = {node["NodeID"] for node in nodes if not node["Alive"]}
    return {node_id[:12] for node_id in lost | draining_nodes().keys()}


class SupervisorActor:
    """Polls Ray's nodes, since Ray has no event for them, and starts and ends parts.

    Each chosen node has a shard and, as soon as there are two, a mover. Ray restarts a frozen part
    that the supervisor has ended.
    """

    def __init__(self, config: KVRayConfig) -> None:
        """Reconcile in the background until stopped. Runs again when Ray restarts it."""
        calls.set_up_process()
        # The supervisor gives its settings to all that it starts, and Ray restarts it with them.
        # So other settings need another supervisor, and no second place can contradict it.
        self._config = config
        self._build_info = build_info_of(
            settings_of(config), ray.get_runtime_context().get_node_id()
        )
        self._lookups = lookup_names(config.lookup.partitions)
        self._shards: dict[str, Any] = {}
        self._movers: dict[str, Any] = {}
        # Part -> its handle, and part -> the node that it is on; those of lookups are not told.
        self._parts: dict[str, Any] = {}
        self._homes: dict[str, str] = {}
        self._nodes: dict[str, dict[str, Any]] = {}
        self._draining: dict[str, float | None] = {}
        self._to_go: set[str] = set()  # those of them, and of all since the last look
        """Nodes whose shards were told that Ray wants the node to go."""
        self._lost: OrderedDict[str, tuple[dict[str, str], float]] = OrderedDict()
        """Node that Ray lost and did not want to drain -> its host, and when; the oldest first."""
        self._idle = IdleNodes(config.shard.release_idle_s)
        self._leaving: dict[str, Any] = {}
        """Node -> the call by which its shard leaves it."""
        self._look_at = 0.0
        self._share = Share(_ASKED_MAX)
        self._pings = Pings(patience_s=_FROZEN_S)
        self._silences = Silences(frozen_s=_FROZEN_S, start_s=START_S, misses=_MISSES)
        self._starts: dict[str, tuple[int, float, str]] = {}
        """Part that was not heard since its start -> how often it was started, when it may be
        started again, and why the start before came to nothing."""
        self._counts = PartCounts()
        self._metrics = MetricsExport(config.cluster_name)
        self._looked = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvray-supervisor", daemon=True)
        self._thread.start()

    def ping(self) -> None:
        """Answer."""

    def build_info(self) -> BuildInfo:
        """Return the code and settings that it runs with."""
        return self._build_info

    def admit(self, proof: str) -> None:
        """Refuse a caller without the tier's token."""
        check_proof(self._config, proof)

    def config(self) -> KVRayConfig:
        """Return the configuration that the tier runs with."""
        return self._config

    def shards(self) -> list[str]:
        """Return the ids of the nodes that have a shard, after a first look at the nodes."""
        self._looked.wait(_CALL_TIMEOUT_S)
        return list(self._shards)

    def shard_names(self) -> list[str]:
        """Return the names of all shards, for the lookup; ShardUnavailable before the first look.

        The lookup forgets a shard that is not among them, so a part of them must not do.
        """
        if not self._looked.is_set():
            raise ShardUnavailable("The supervisor has not looked at the nodes yet; call again.")
        return [shard_name(node_id) for node_id in list(self._shards)]

    def movers(self) -> list[str]:
        """Return the ids of the nodes that have a mover."""
        return list(self._movers)

    def lost(self) -> dict[str, dict[str, Any]]:
        """Return the nodes that Ray lost in the last hour and that are not back: host, and age."""
        nodes, now = self._nodes, time.monotonic()
        here = {calls.host_of(nodes[one])["ip"] for one in list(self._shards) if one in nodes}
        return {
            node_id[:12]: {"host": host, "s_ago": now - at}
            for node_id, (host, at) in self._lost.copy().items()
            if host["ip"] not in here and now - at < _LOST_S
        }

    def faults(self) -> dict[str, str]:
        """Return the parts that cannot be started, and why; one failure may be chance."""
        remedy = "Mend its node, or leave it out with shard.label or shard.resource."
        return {
            name: f"{name} cannot be started: {why} {remedy}"
            for name, (tries, _, why) in self._starts.copy().items()
            if tries > 2
        }

    def stop(self) -> None:
        """Start no more parts."""
        self._stopping.set()
        self._thread.join(_CALL_TIMEOUT_S)

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                try:
                    self._reconcile()
                    self._looked.set()
                except (KVRayError, ray.exceptions.RayError) as error:
                    _log.warning("the nodes cannot be checked now: %s", calls.in_short(error))
                    self._look_at = 0.0  # a part that is needed may be gone for good
                self._stopping.wait(_POLL_S)
        except Exception:  # noqa: BLE001 - the end of the thread, and of the process
            # Ray restarts the supervisor, which finds its shards by their names.
            _log.exception("the supervisor ended by a defect")
            os._exit(1)

    def _reconcile(self) -> None:
        now = time.monotonic()
        if now >= self._look_at:
            self._look()
            self._look_at = now + min(len(self._nodes) / _NODES_PER_S, _LOOK_MAX_S)
        self._order_drains()
        self._end_frozen()

    def _order_drains(self) -> None:
        """Tell shards whose nodes Ray wants to go, again each time: one may be new.

        Nobody waits for their answers: such nodes are often cut off already, and all at once.
        """
        draining = draining_nodes()
        for node_id in self._shards.keys() & draining.keys():
            self._shards[node_id].drain.remote(_BY_RAY, draining[node_id])
        staying = self._shards.keys() & (self._draining.keys() - draining.keys())
        call_offs = {
            shard_name(node_id): self._shards[node_id].call_off_drain for node_id in staying
        }
        calls.ask_all(call_offs, _PING_TIMEOUT_S, _BY_RAY)
        self._draining = draining
        self._to_go |= draining.keys()

    def _look(self) -> None:
        """Look at all nodes and names, and start what is missing."""
        nodes = ray.nodes()  # type: ignore[no-untyped-call]
        named = set(calls.list_actors())
        self._leave_idle(named)
        self._see_to_lookups({name for name in named if is_lookup(name)})
        self._nodes = {node["NodeID"]: node for node in nodes}
        chosen = chosen_nodes(nodes, self._config.shard)
        left = {node_id for node_id in self._idle.left if shard_name(node_id) not in named}
        for node_id in self._shards.keys() & left:
            _log.info("node %s is not used and has no shard now", self._name(node_id))
            del self._shards[node_id]
            self._movers.pop(node_id, None)
            calls.kill_actor(mover_name(node_id))
        chosen -= left
        for node_id in sorted(chosen):
            # An actor that was ended for good has lost its name; one that Ray restarts keeps it.
            if self._is_to_start(shard_name(node_id), self._shards.get(node_id), named):
                self._shards[node_id] = create_shard(node_id, self._config)
                _log.info("node %s has a shard", self._name(node_id))
        for node_id in self._shards.keys() - chosen:
            _log.warning("node %s is gone, and its blocks with it", self._name(node_id))
            if node_id not in self._to_go and (known := self._nodes.get(node_id)):
                self._lost[node_id] = calls.host_of(known), time.monotonic()
                if len(self._lost) > _LOST_MAX:
                    self._lost.popitem(last=False)
            del self._shards[node_id]
            self._movers.pop(node_id, None)
        self._to_go = set(self._draining)
        for node_id in sorted(self._shards) if len(self._shards) > 1 else ():
            if self._is_to_start(mover_name(node_id), self._movers.get(node_id), named):
                self._movers[node_id] = create_mover(node_id, self._config)
                _log.info("node %s has a mover", self._name(node_id))
        self._take_parts()

    def _name(self, node_id: str) -> str:
        """Return what the log calls a node: its host and its id."""
        node, known = node_id[:12], self._nodes.get(node_id)
        return node if known is None else labels({node: calls.host_of(known)}, with_ids=True)[node]

    def _leave_idle(self, named: Set[str]) -> None:
        """Have shards end where nothing but kvray is: to Ray a node with an actor is never idle.

        Each is asked until it has no name any more: Ray may have started it again meanwhile.
        """
        asked = list(self._leaving.values())
        done, _ = ray.wait(asked, num_returns=len(asked), timeout=0) if asked else ([], [])
        for node_id, answer in list(self._leaving.items()):
            if answer in done:
                del self._leaving[node_id]
                # One that has ended says nothing; False: it stays.
                with contextlib.suppress(ray.exceptions.RayError):
                    if ray.get(answer, timeout=_PING_TIMEOUT_S) is False:
                        self._idle.stay(node_id)
        unused = frozenset() if self._config.shard.release_idle_s is None else unused_nodes()
        self._idle.note(unused, self._draining.keys(), time.monotonic())
        for node_id in self._shards.keys() & self._idle.left - self._leaving.keys():
            if shard_name(node_id) in named:
                seconds = max(_LEAVE_S, self._draining.get(node_id) or 0.0)
                self._leaving[node_id] = self._shards[node_id].leave.remote(seconds)

    def _see_to_lookups(self, named: Set[str]) -> None:
        """Start the partitions of the lookup that are not `named`, and end those beyond them."""
        for partition, name in enumerate(self._lookups):
            if name not in named and self._is_to_start(name, self._parts.get(name), named):
                _log.warning("%s was gone and starts", name)
                create_lookup(self._config.cluster_name, self._config.shard.silent_s, partition)
        for name in sorted(named - set(self._lookups)):
            _log.info("%s ends: the lookup has fewer partitions", name)
            calls.kill_actor(name)

    def _is_to_start(self, name: str, before: Any, named: Set[str]) -> bool:
        """Return whether to start, or to find, the part of that name; `before` is its last actor.

        An actor that cannot be made has no name: only its handle tells why.
        """
        if name in named:
            return before is None
        now = time.monotonic()
        tries, due, why = self._starts.get(name, (0, now, ""))
        if now < due:
            return False
        if tries and before is not None:
            try:
                calls.call(before.ping, timeout_s=_PING_TIMEOUT_S)
            except KVRayError as error:
                why = str(error)
                _log.warning("%s could not be started: %s", name, why)
        self._starts[name] = tries + 1, now + min(2 ** min(tries, 9), _START_PAUSE_MAX_S), why
        return True

    def _take_parts(self) -> None:
        """Ask the parts that there are now, and forget the others."""
        before = self._parts
        self._homes = {shard_name(node_id): node_id for node_id in self._shards}
        self._homes |= {mover_name(node_id): node_id for node_id in self._movers}
        handles = (*self._shards.values(), *self._movers.values())
        self._parts = dict(zip(self._homes, handles, strict=True))
        self._parts |= {name: calls.get_actor(name) for name in self._lookups}
        gone = before.keys() - self._parts.keys()
        self._pings.forget(gone)
        self._silences.forget(gone)
        self._share.retain(self._homes)
        self._counts.expect(self._parts)

    def _end_frozen(self) -> None:
        """End parts that have answered nobody for long, on nodes that can be reached."""
        # They may be new ones.
        self._parts |= {name: calls.get_actor(name) for name in self._lookups}
        known, silent = self._ask_lookup()
        heard = (known - silent) & self._parts.keys()
        asked = {*self._lookups} | self._share.take((self._silences.silent, silent), heard)
        found = self._pings.round(
            {name: self._parts[name] for name in asked}, timeout_s=_PING_TIMEOUT_S
        )
        unheard = self._parts.keys() - found.alive - heard
        self._starts = {name: one for name, one in self._starts.items() if name in unheard}
        well = found.alive | found.dead | heard
        now = time.monotonic()
        frozen = self._silences.note(
            asked, well | self._cut_off(asked - well), now, starting=found.starting
        )
        figures = self._counts.note(asked, found.alive | (heard - asked), frozen)
        self._metrics.attempt(lambda _: figures, now)
        for name in frozen:
            home = self._homes.get(name)
            where = f" on {self._name(home)}" if home else ""
            _log.warning("%s%s is frozen and restarts", name, where)
            ray.kill(self._parts[name], no_restart=False)

    def _ask_lookup(self) -> tuple[Set[str], Set[str]]:
        """Return the shards that the lookup knows, and those of them that it does not hear.

        Its first partition hears them all. A shard that answers its polls lives, and needs no ping.
        While it does not answer it knows nobody.
        """
        with contextlib.suppress(KVRayError):
            status = calls.call(self._parts[LOOKUP_NAME].status, timeout_s=_PING_TIMEOUT_S)
            return status["shards"].keys(), set(status["silent"])
        return frozenset(), frozenset()

    def _cut_off(self, silent: Set[str]) -> Set[str]:
        """Return the `silent` parts that may live: nothing of their node can be reached.

        A cut cable silences all parts of a node, for a moment after its repair too.
        """
        homes = {name: self._homes.get(name) for name in silent}
        nodes = {home: self._nodes[home] for home in homes.values() if home in self._nodes}
        unreached = nodes.keys() - reachable(nodes, timeout_s=_PING_TIMEOUT_S)
        return {name for name, home in homes.items() if home in unreached}


def create_supervisor(config: KVRayConfig) -> Any:
    """Return the tier's supervisor; start it if there is none."""
    return calls.create_actor(SupervisorActor, SUPERVISOR_NAME, config)
