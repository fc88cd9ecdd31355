"""A whole run: nodes, tier, oracle, replicas without faults and under fire; and all of it ended."""

import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console

from kvray.cli.chaos.campaign import Campaign
from kvray.cli.chaos.faults import Faults
from kvray.cli.chaos.judge import Run, Strike, report
from kvray.cli.chaos.load import (
    MAX_TOKENS,
    Answer,
    Answers,
    Ask,
    Batch,
    Chapter,
    all_asks,
    batches_of,
    conversations_of,
    make_book,
    num_asks,
    prompt_of,
)
from kvray.cli.chaos.network import why_impossible
from kvray.cli.chaos.nodes import Machine
from kvray.cli.chaos.progress import Bars
from kvray.cli.chaos.schedule import KINDS, Fault, Kind, make_schedule
from kvray.cli.chaos.servers import BATCH_SIZE, Losses, Server, spawn
from kvray.cli.chaos.stalls import read_stalls
from kvray.cli.interrupts import Interrupts
from kvray.config import environ_for
from kvray.errors import KVRayError

_NAME = "chaos"
_ARENA = "32MiB"
_NVME = "64MiB"
"""More than the arena, and on the disk that is filled up."""
_SLOT = "16KiB"
_LOCK_WAIT_S = 0.02
"""All nodes share the cores of this machine: wait for a neighbour to be scheduled."""
_MOUNT_BYTES = 96 * 2**20
_DISK_BYTES = 1024 * 2**20
_CONTROL = "control"
_POLL_S = 0.02
_TEND_S = 0.25
_STATUS_TIMEOUT_S = 40.0
_CHAPTERS_MAX = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a run is to be like."""

    duration_s: float
    seed: int
    num_nodes: int
    num_replicas: int
    gap_s: float
    kinds: tuple[str, ...]
    """Names of the kinds of faults; none: all of them."""
    has_network: bool

    @property
    def calm_s(self) -> float:
        """Length of the run without faults."""
        return min(60.0, max(8.0, self.duration_s / 4))

    @property
    def quiet_s(self) -> float:
        """Length of the end of the run, in which nothing strikes and hits have to come back."""
        return min(20.0, self.duration_s / 4)


def play(options: Options, *, console: Console, interrupts: Interrupts) -> dict[str, Any]:
    """Play a run and return its report.

    Raises:
        KVRayError: nodes, tier or an engine did not start.
    """
    book = make_book(
        seed=options.seed,
        num_chapters=min(_CHAPTERS_MAX, 3 + int(options.duration_s / 30)),
        num_replicas=options.num_replicas,
    )
    kinds, left_out = choose_kinds(options)
    schedule = make_schedule(
        seed=options.seed,
        duration_s=options.duration_s,
        quiet_s=options.quiet_s,
        gap_s=options.gap_s,
        kinds=kinds,
    )
    with interrupts.closing() as stack, Bars(console) as bars:
        bars.begin("Computing the answers without kvray", num_asks(book))
        truth = _ask_oracle(book, bars.advance)
        bars.begin("Starting Ray on several nodes", None)
        with interrupts.held():
            is_root = options.has_network
            machine = Machine(
                num_nodes=options.num_nodes,
                has_network=is_root,
                mount_bytes=_MOUNT_BYTES if is_root else None,
                disk_bytes=_DISK_BYTES if is_root else None,
                has_nvme=True,
                waiting=lambda elapsed_s: interrupts.check(),
            )
            stack.callback(machine.close)
        scene = _Scene(options, machine, book, truth)
        stack.callback(scene.close)
        bars.begin("Serving without faults", int(options.calm_s))
        calm = scene.run([], options.calm_s, bars.reach)[0]
        after_calm = scene.last_status
        bars.begin("Serving under fire", int(options.duration_s))
        run, strikes = scene.run(schedule, options.duration_s, bars.reach)
        found = report(run, calm, strikes)
        found["skipped_kinds"] = left_out
        found["fault_free"]["tier_at_the_end"] = after_calm
        found["tier_at_the_end"] = scene.last_status
    return {**found, "seed": options.seed, "duration_s": options.duration_s}


def choose_kinds(options: Options) -> tuple[list[Kind], dict[str, str]]:
    """Return the kinds that can strike here, and why the others cannot."""
    reason = "needs root" if options.has_network else (why_impossible() or "no network wanted")
    wanted = [kind for kind in KINDS if not options.kinds or kind.name in options.kinds]
    left_out = {kind.name: reason for kind in wanted if kind.needs_root and not options.has_network}
    return [kind for kind in wanted if kind.name not in left_out], left_out


class _Scene:
    """A machine, and what runs on it one after the other."""

    def __init__(
        self, options: Options, machine: Machine, book: list[Chapter], truth: Answers
    ) -> None:
        self.last_status: Any = None
        self._options = options
        self._machine = machine
        self._book = book
        self._truth = truth
        self._conversations = conversations_of(book)
        self._servers: list[Server] = []
        self._runs = itertools.count(1)
        self._config_path = machine.write_config(
            {
                "arena": {
                    "capacity": _ARENA,
                    "slab": "2MiB",
                    "slot_min": _SLOT,
                    "limbo_s": 10,
                    "lock_wait_s": _LOCK_WAIT_S,
                },
                "nvme": {"capacity": _NVME, "segment": "2MiB", "free_reserve": "1MiB"},
                "connector": {"model_key": "tiny", "verify_on_load": "always"},
            },
            cluster_name=_NAME,
        )

    def run(
        self, schedule: Sequence[Fault], duration_s: float, reach: Callable[[float], None]
    ) -> tuple[Run, list[Strike]]:
        """Serve on a new tier with new engines for `duration_s`, while the schedule strikes."""
        self._tell("up")
        self._start_servers(next(self._runs))
        faults = Faults(self._machine, self._servers[:-1], _NAME)
        run = Run(began=time.monotonic())
        try:
            for number, server in enumerate(self._servers):
                server.serve(self._batches(number), self._prompt, self._truth)
            campaign = Campaign(
                schedule,
                faults,
                lambda: sum(server.in_flight for server in self._servers[:-1]),
                ends_s=duration_s - self._options.quiet_s,
            )
            self._drive(faults, campaign, run.began + duration_s, reach)
        finally:
            faults.close()
        for server in self._servers:
            server.end()
        for server in self._servers:
            server.join()
        self.last_status = self._status()
        self._collect(run)
        self.close()
        self._tell("down")
        return run, campaign.strikes

    def close(self) -> None:
        """End the engines. Twice is fine."""
        while self._servers:
            self._servers.pop().close()

    def _drive(
        self,
        faults: Faults,
        campaign: Campaign,
        until: float,
        reach: Callable[[float], None],
    ) -> None:
        """Let the campaign go on until then, and nodes that it killed start again."""
        began, tended = time.monotonic(), 0.0
        while (now := time.monotonic()) < until:
            campaign.advance()
            if now - tended > _TEND_S:
                faults.tend()
                tended = now
                reach(now - began)
            time.sleep(_POLL_S)

    def _start_servers(self, run: int) -> None:
        for number in range(self._options.num_replicas + 1):
            is_empty = number == self._options.num_replicas
            node = number % len(self._machine.nodes)
            name = _CONTROL if is_empty else f"replica-{number + 1}"
            arena_dir = self._machine.nodes[node].arena_dir
            self._servers.append(
                Server(
                    name,
                    node_number=node,
                    environ={**environ_for(self._config_path), "KVRAY_ARENA__DIR": str(arena_dir)},
                    stalls_path=self._machine.scratch / f"{name}-{run}.stalls",
                    log_path=self._machine.scratch / f"{name}-{run}.log",
                    is_empty=is_empty,
                )
            )
        for server in self._servers:
            server.begin_start()
        for server in self._servers:
            server.wait_ready()

    def _batches(self, number: int) -> Iterator[Batch]:
        count = self._options.num_replicas
        return batches_of(
            self._book,
            replica=number % count,
            num_replicas=count,
            batch_size=BATCH_SIZE,
            seed=self._options.seed,
        )

    def _prompt(self, ask: Ask) -> Answer:
        return prompt_of(self._conversations[ask.conversation], ask.turn, self._truth)

    def _collect(self, run: Run) -> None:
        for server in self._servers:
            stalls = _without_stops(read_stalls(server.stalls_path), server.stops)
            run.failures += server.failures
            _add(run.losses, server.losses)
            if server is self._servers[-1]:
                run.control_stalls = stalls
            else:
                run.served += server.served
                run.stalls = np.concatenate([run.stalls, stalls])

    def _tell(self, what: str) -> None:
        done = self._machine.run(what, "-c", str(self._config_path))
        if done.returncode:
            raise KVRayError(f"`kvray {what}` failed: {done.stderr.strip()}")

    def _status(self) -> Any:
        """Return what `kvray status` says at a run's end, or why it says nothing."""
        command = ("status", "--json", "-c", str(self._config_path))
        try:
            done = self._machine.run(*command, timeout_s=_STATUS_TIMEOUT_S)
        except KVRayError as error:
            return str(error)
        if done.returncode:
            return done.stderr.strip()[-500:]
        return [_summary(shard) for shard in json.loads(done.stdout)["shards"]]


def _summary(shard: dict[str, Any]) -> dict[str, Any]:
    """Return what tells a shard's life so far, and the counters of the replicas that it serves."""
    counters: dict[str, int] = {}
    for replica in shard.get("replicas", []):
        for name, value in replica["counters"].items():
            counters[name] = counters.get(name, 0) + value
    arena = shard.get("arena", {})
    return {
        **{name: shard.get(name) for name in ("shard", "state", "message")},
        **{name: arena.get(name) for name in ("shard_epoch", "blocks", "evicted", "corrupt")},
        "counters": {name: value for name, value in counters.items() if value},
        "staging": shard.get("staging"),
    }


def _ask_oracle(book: list[Chapter], advance: Callable[[int], None]) -> Answers:
    """Answer every prompt with an engine that has no connector and reuses nothing."""
    conversations, truth = conversations_of(book), Answers()
    with spawn("oracle", None, environ={}) as oracle:
        oracle.wait_ready()
        for asks in all_asks(book):
            prompts = [prompt_of(conversations[ask.conversation], ask.turn, truth) for ask in asks]
            outputs = oracle.generate(prompts, max_tokens=MAX_TOKENS)
            truth |= {ask: one.token_ids for ask, one in zip(asks, outputs, strict=True)}
            advance(len(asks))
    return truth


def _without_stops(stalls: Any, stops: Sequence[tuple[float, float]]) -> Any:
    """Leave the calls out during which the engine was stopped on purpose."""
    kept = np.ones(len(stalls), dtype=bool)
    for began, ended in stops:
        kept &= (stalls[:, 1] + stalls[:, 2] < began) | (stalls[:, 1] > ended)
    return stalls[kept]


def _add(total: Losses, more: Losses) -> None:
    for name in ("engine_deaths", "hung_requests", "failed_requests"):
        setattr(total, name, getattr(total, name) + getattr(more, name))
    total.injected_deaths += more.injected_deaths
    total.injected_requests += more.injected_requests
