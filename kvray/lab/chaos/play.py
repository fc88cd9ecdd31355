"""A whole run: nodes, tier, oracle, and replicas, first without faults and then under fire."""

import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console

from kvray.config import environ_for
from kvray.console.interrupts import Interrupts
from kvray.console.progress import ProgressLine
from kvray.errors import KVRayError
from kvray.lab.chaos import load
from kvray.lab.chaos.campaign import Campaign
from kvray.lab.chaos.faults import Faults
from kvray.lab.chaos.judge import Run, Strike, report
from kvray.lab.chaos.load import Answer, Answers, Ask, Chapter
from kvray.lab.chaos.machine import Machine
from kvray.lab.chaos.network import why_impossible
from kvray.lab.chaos.schedule import KINDS, Fault, Kind, make_schedule
from kvray.lab.chaos.servers import BATCH_SIZE, Questions, Server, spawn
from kvray.lab.chaos.stalls import read_stalls

_NAME = "chaos"
_SETTINGS: dict[str, dict[str, Any]] = {
    "arena": {
        "capacity": "32MiB",
        "slab": "2MiB",
        "slot_min": "16KiB",
        "limbo_s": 10,
        # All nodes share the cores of this machine: wait for a neighbour to be scheduled.
        "lock_wait_s": 0.02,
    },
    # Larger than the arena, and on the disk that faults fill up.
    "nvme": {"capacity": "64MiB", "segment": "2MiB", "free_reserve": "1MiB"},
    "connector": {"model_key": "tiny", "verify_on_load": "always"},
}
_MOUNT_BYTES = 96 * 2**20
_DISK_BYTES = 1024 * 2**20
_POLL_S = 0.02
_TEND_S = 0.25
_STATUS_TIMEOUT_S = 40.0
_CHAPTERS_MAX = 16

Advance = Callable[..., None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of a run."""

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
        """Length of the end of the run, without faults, in which hits have to come back."""
        return min(20.0, self.duration_s / 4)


def play(options: Options, *, console: Console, interrupts: Interrupts) -> dict[str, Any]:
    """Play a run and return its report.

    Raises:
        KVRayError: nodes, tier or an engine did not start.
    """
    book = load.make_book(
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
    with interrupts.closing() as stack, ProgressLine(console) as line:
        with line.during("Computing the answers without kvray", load.num_asks(book)) as advance:
            truth = _ask_oracle(book, advance)
        with line.during("Starting Ray on several nodes"), interrupts.held():
            machine = Machine(
                num_nodes=options.num_nodes,
                has_network=options.has_network,
                mount_bytes=_MOUNT_BYTES if options.has_network else None,
                disk_bytes=_DISK_BYTES if options.has_network else None,
                has_nvme=True,
                waiting=lambda elapsed_s: interrupts.check(),
            )
            stack.callback(machine.close)
        scene = _Scene(options, machine, book, truth)
        stack.callback(scene.close)
        with line.during("Serving without faults", options.calm_s) as advance:
            calm, _, calm_status = scene.run([], options.calm_s, advance)
        with line.during("Serving under fire", options.duration_s) as advance:
            run, strikes, status = scene.run(schedule, options.duration_s, advance)
    found = report(run, calm, strikes)
    found["skipped_kinds"] = left_out
    found["fault_free"]["tier_at_the_end"] = calm_status
    found["tier_at_the_end"] = status
    return {**found, "seed": options.seed, "duration_s": options.duration_s}


def choose_kinds(options: Options) -> tuple[list[Kind], dict[str, str]]:
    """Return the kinds that can strike here, and why the others cannot."""
    asked = [kind for kind in KINDS if not options.kinds or kind.name in options.kinds]
    if options.has_network:
        return asked, {}
    reason = why_impossible() or "no network was asked for"
    possible = [kind for kind in asked if not kind.needs_root]
    return possible, {kind.name: reason for kind in asked if kind.needs_root}


class _Scene:
    """A machine, and the tiers and engines that run on it one after the other."""

    def __init__(
        self, options: Options, machine: Machine, book: list[Chapter], truth: Answers
    ) -> None:
        self._options = options
        self._machine = machine
        self._book = book
        self._truth = truth
        self._conversations = load.conversations_of(book)
        self._servers: list[Server] = []
        """The last one has an empty connector, for comparison."""
        self._runs = itertools.count(1)
        self._config_path = machine.write_config(_SETTINGS, cluster_name=_NAME)

    def run(
        self, schedule: Sequence[Fault], duration_s: float, advance: Advance
    ) -> tuple[Run, list[Strike], Any]:
        """Serve on a new tier with new engines while the schedule strikes.

        Returns:
            The results, the strikes, and the tier's status at the end.
        """
        self._tell("up")
        self._start_servers(next(self._runs))
        served = self._servers[:-1]
        faults = Faults(self._machine, served, _NAME)
        run = Run(began=time.monotonic())
        try:
            for number, server in enumerate(self._servers):
                server.serve(self._batches(number))
            campaign = Campaign(
                schedule,
                faults,
                lambda: sum(server.in_flight for server in served),
                ends_s=duration_s - self._options.quiet_s,
            )
            self._drive(faults, campaign, run.began + duration_s, advance)
        finally:
            faults.close()
        for server in self._servers:
            server.end()
        for server in self._servers:
            server.join()
        status = self._status()
        self._collect(run)
        self.close()
        self._tell("down")
        return run, campaign.strikes, status

    def close(self) -> None:
        """End the engines. Twice is fine."""
        while self._servers:
            self._servers.pop().close()

    def _drive(self, faults: Faults, campaign: Campaign, until: float, advance: Advance) -> None:
        """Advance the campaign until then, and restart the nodes that it killed."""
        tended = time.monotonic()
        while (now := time.monotonic()) < until:
            campaign.advance()
            if now - tended > _TEND_S:
                faults.tend()
                advance(now - tended)
                tended = now
            time.sleep(_POLL_S)

    def _start_servers(self, run: int) -> None:
        for number in range(self._options.num_replicas + 1):
            is_empty = number == self._options.num_replicas
            node = self._machine.nodes[number % len(self._machine.nodes)]
            name = "control" if is_empty else f"replica-{number + 1}"
            environ = environ_for(self._config_path) | {"KVRAY_ARENA__DIR": str(node.arena_dir)}
            files = self._machine.scratch / f"{name}-{run}"
            self._servers.append(Server(name, environ=environ, files=files, is_empty=is_empty))
        for server in self._servers:
            server.begin_start()
        for server in self._servers:
            server.wait_ready()

    def _batches(self, number: int) -> Iterator[tuple[int, Questions]]:
        count, seed = self._options.num_replicas, self._options.seed
        batches = load.batches_of(
            self._book,
            replica=number % count,
            num_replicas=count,
            batch_size=BATCH_SIZE,
            seed=seed,
        )
        for batch in batches:
            yield batch.place, [(self._prompt(ask), self._truth[ask]) for ask in batch.asks]

    def _prompt(self, ask: Ask) -> Answer:
        return load.prompt_of(self._conversations[ask.conversation], ask.turn, self._truth)

    def _collect(self, run: Run) -> None:
        for server in self._servers:
            run.failures += server.failures
            run.losses += server.losses
            stalls = _without_stops(read_stalls(server.stalls_path), server.stops)
            if server is self._servers[-1]:
                run.control_stalls = stalls
            else:
                run.served += server.served
                run.stalls = np.concatenate([run.stalls, stalls])

    def _tell(self, command: str) -> None:
        done = self._machine.run(command, "-c", str(self._config_path))
        if done.returncode:
            raise KVRayError(f"`kvray {command}` failed: {done.stderr.strip()}")

    def _status(self) -> Any:
        """Return a summary of `kvray status` at a run's end, or why there is none."""
        command = ("status", "--json", "-c", str(self._config_path))
        try:
            done = self._machine.run(*command, timeout_s=_STATUS_TIMEOUT_S)
        except KVRayError as error:
            return str(error)
        if done.returncode:
            return done.stderr.strip()[-500:]
        return [_summary(shard) for shard in json.loads(done.stdout)["shards"]]


def _summary(shard: dict[str, Any]) -> dict[str, Any]:
    """Return the life of a shard in a few figures, with the counters of its replicas."""
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


def _ask_oracle(book: list[Chapter], advance: Advance) -> Answers:
    """Answer every prompt with an engine that has no connector and reuses nothing."""
    conversations, truth = load.conversations_of(book), Answers()
    with spawn("oracle", None, environ={}) as oracle:
        oracle.wait_ready()
        for asks in load.all_asks(book):
            prompts = [
                load.prompt_of(conversations[ask.conversation], ask.turn, truth) for ask in asks
            ]
            outputs = oracle.generate(prompts, max_tokens=load.MAX_TOKENS)
            truth |= {ask: one.token_ids for ask, one in zip(asks, outputs, strict=True)}
            advance(len(asks))
    return truth


def _without_stops(stalls: Any, stops: Sequence[tuple[float, float]]) -> Any:
    """Leave the calls out during which the engine was stopped on purpose."""
    kept = np.ones(len(stalls), dtype=bool)
    for began, ended in stops:
        kept &= (stalls[:, 1] + stalls[:, 2] < began) | (stalls[:, 1] > ended)
    return stalls[kept]
