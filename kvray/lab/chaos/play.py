"""A whole run: nodes, tier, oracle, and replicas, first without faults and then under fire."""

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvray.config import environ_for
from kvray.errors import ConfigError, KVRayError
from kvray.lab.chaos import load
from kvray.lab.chaos.faults import Campaign, Faults
from kvray.lab.chaos.judge import Results, chaos_report, report
from kvray.lab.chaos.load import Phase
from kvray.lab.chaos.machine import Machine, Node
from kvray.lab.chaos.network import why_impossible
from kvray.lab.chaos.schedule import KINDS, Fault, draw_settings, make_schedule
from kvray.lab.chaos.servers import Question, Questions, Server, ask_oracle
from kvray.lab.chaos.stalls import read_stalls
from kvray.lab.report import Report
from kvray.lab.runner import Runner

_NAME = "chaos"
_MOUNT_BYTES = 96 * 2**20
_DISK_BYTES = 1024 * 2**20
_POLL_S = 0.02
_RESTART_EVERY_S = 0.25
_PHASES_MAX = 16
_SETTLE_S = 60.0
"""How long nodes may take to be back to normal after the last fault."""

Advance = Callable[..., None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of `kvray chaos`, whose help says what they are."""

    duration: float
    seed: int
    nodes: int
    replicas: int
    gap: float
    only: Sequence[str] | None  # kinds of faults; None: all
    network: bool

    @property
    def calm_s(self) -> float:
        """Length of the run without faults."""
        return min(60.0, max(8.0, self.duration / 4))

    @property
    def quiet_s(self) -> float:
        """Length of the end of the run, without faults, in which hits have to come back."""
        return min(20.0, self.duration / 4)


def run(runner: Runner, **options: Any) -> Report:
    """Play a run; KVRayError: an option is wrong, or nodes, tier or an engine did not start."""
    made = Options(**options)
    names = {kind.name for kind in KINDS}
    if unknown := sorted(set(made.only or ()) - names):
        raise ConfigError(
            f"There is no kind of fault {unknown[0]!r}; give one of {', '.join(sorted(names))}."
        )
    impossible = why_impossible()
    made = replace(made, network=made.network and impossible is None)
    num_phases = min(_PHASES_MAX, 3 + int(made.duration / 30))
    workload = load.make_workload(seed=made.seed, num_phases=num_phases, num_replicas=made.replicas)
    # The kinds that can strike here, and why the others cannot.
    kinds = [kind for kind in KINDS if not made.only or kind.name in made.only]
    left_out = {
        kind.name: "no other node would be there" for kind in kinds if kind.nodes_min > made.nodes
    }
    if not made.network:
        reason = impossible or "no network was asked for"
        left_out |= {kind.name: reason for kind in kinds if kind.needs_root}
    if len(left_out) == len(kinds):
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise ConfigError(f"No kind of fault can strike here ({reasons}); give others with --only.")
    schedule = make_schedule(
        seed=made.seed,
        duration_s=made.duration,
        quiet_s=made.quiet_s,
        gap_s=made.gap,
        kinds=[kind for kind in kinds if kind.name not in left_out],
        num_nodes=made.nodes,
    )
    num_asks = sum(map(len, load.all_asks(workload)))
    with runner.during("Computing the answers without kvray", num_asks) as advance:
        questions = ask_oracle(workload, advance)
    with runner.during("Starting Ray on several nodes"):
        machine = Machine(
            num_nodes=made.nodes,
            has_network=made.network,
            mount_bytes=_MOUNT_BYTES if made.network else None,
            disk_bytes=_DISK_BYTES if made.network else None,
            has_nvme=True,
        )
        runner.stack.callback(machine.close)
    serving = _Serving(made, machine, workload, questions, runner.stack)
    with runner.during("Serving without faults", made.calm_s) as advance:
        calm = serving.serve([], made.calm_s, advance)
    with runner.during("Serving under fire", made.duration) as advance:
        results = serving.serve(schedule, made.duration, advance)
    more = {
        "skipped_kinds": left_out,
        "seed": made.seed,
        "settings": draw_settings(made.seed),
        "duration_s": made.duration,
    }
    return chaos_report({**report(results, calm), **more})


class _Serving:
    """A machine, and the tiers and engines that serve on it one after the other."""

    def __init__(
        self,
        options: Options,
        machine: Machine,
        workload: list[Phase],
        questions: Questions,
        stack: contextlib.ExitStack,
    ) -> None:
        self._options = options
        self._machine = machine
        self._workload = workload
        self._questions = questions
        self._stack = stack
        self._numbers = itertools.count(1)
        self._config_path = machine.write_config(draw_settings(options.seed), cluster_name=_NAME)

    def serve(self, schedule: Sequence[Fault], duration_s: float, advance: Advance) -> Results:
        """Serve on a new tier with new engines while the schedule strikes."""
        self._run("up")
        nodes, joined = itertools.cycle(self._machine.nodes), list[Server]()
        servers = [
            self._begin_server(f"replica-{number}", next(nodes))
            for number in range(1, self._options.replicas + 1)
        ]
        for server in servers:
            server.replica.wait_ready()

        def welcome(node: Node) -> Server:
            joined.append(self._begin_server(f"joined-{len(joined) + 1}", node))
            joined[-1].serve(self._batches(len(joined) % self._options.replicas))
            return joined[-1]

        faults = Faults(self._machine, servers, self._config_path, welcome)
        until = time.monotonic() + duration_s
        try:
            for number, server in enumerate(servers):
                server.serve(self._batches(number))
            campaign = Campaign(
                schedule,
                faults.strike,
                faults.end,
                lambda: sum(server.in_flight for server in servers),
                ends_s=duration_s - self._options.quiet_s,
            )
            self._drive(faults, campaign, until, advance)
        finally:
            faults.close()
        for server in servers:
            server.end()
        for server in servers:
            server.join()
        results = _collect(servers, joined)
        results.strikes = campaign.strikes
        if unsettled := self._unsettled():
            results.losses["unsettled_nodes"] = len(unsettled)
            results.failures += unsettled
        for server in servers:
            server.close()
        self._run("down")
        return results

    def _begin_server(self, name: str, node: Node) -> Server:
        server = Server(
            name,
            environ=environ_for(self._config_path),
            arena_dir=node.arena_dir,
            files=self._machine.scratch / f"{name}-{next(self._numbers)}",
        )
        self._stack.callback(server.close)
        return server

    def _drive(self, faults: Faults, campaign: Campaign, until: float, advance: Advance) -> None:
        """Advance the campaign until then, and see to what it leaves behind."""
        looked = time.monotonic()
        while (now := time.monotonic()) < until:
            campaign.advance()
            if now - looked > _RESTART_EVERY_S:
                faults.tend()
                advance(now - looked)
                looked = now
            time.sleep(_POLL_S)

    def _batches(self, replica: int) -> Iterator[tuple[int, list[Question]]]:
        count, seed = self._options.replicas, self._options.seed
        batches = load.batches_of(self._workload, replica=replica, num_replicas=count, seed=seed)
        for place, asks in batches:
            yield place, [self._questions[ask] for ask in asks]

    def _unsettled(self) -> list[str]:
        """Return a sentence about each node that is not back to normal, after a while."""
        deadline = time.monotonic() + _SETTLE_S
        while True:
            done = self._machine.run("status", "--json", "-c", str(self._config_path))
            shards = json.loads(done.stdout)["shards"] if done.returncode == 0 else []
            found = [
                f"{one['shard']} is {one['state']}, drain: {one.get('drain')}."
                for one in shards
                if one["state"] != "serving" or one.get("drain")
            ]
            if len(shards) != len(self._machine.nodes):
                found.append(f"{len(shards)} shards answer. {done.stderr}")
            if not found or time.monotonic() > deadline:
                return found

    def _run(self, command: str) -> None:
        done = self._machine.run(command, "-c", str(self._config_path))
        if done.returncode:
            raise KVRayError(f"`kvray {command}` failed: {done.stderr.strip()}")


def _collect(servers: Sequence[Server], joined: Sequence[Server]) -> Results:
    results = Results(joined=[served for server in joined for served in server.served])
    for server in (*servers, *joined):
        results.failures += server.failures
        results.losses += server.losses
    kept = []
    for server in servers:
        stalls = read_stalls(server.stalls_path)
        for began, ended in server.stops:  # the engine was stopped on purpose
            stalls = stalls[(stalls[:, 1] + stalls[:, 2] < began) | (stalls[:, 1] > ended)]
        kept.append(stalls)
    results.stalls = np.concatenate(kept)
    results.served = [served for server in servers for served in server.served]
    return results
