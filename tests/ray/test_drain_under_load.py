"""A node of three goes under load, arenas full: what a drain saves of the next minute's hits.

All runs ask for the same prompts in the same order. Each node has a third of those that people use,
beside so many others that its arena is full.
"""

import contextlib
import random
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from kvray.errors import KVRayError
from kvray.lab.chaos.machine import Machine
from kvray.lab.chaos.network import why_impossible
from kvray.reference.replica import Replica
from kvray.store import Arena
from kvray.store.arena import slabs
from kvray.store.arena.layout import READY
from tests.ray.cluster import CONNECTOR, SETTINGS, TwoNodes, open_tier
from tests.ray.sharing import TOKENS_PER_BLOCK
from tests.unit.store.small_arena import chain, store
from tests.waiting import HANG_S

pytestmark = [pytest.mark.ray, pytest.mark.long]

PROMPT_TOKENS = 620  # the last block of 640 could never hit
NUM_USED = 81
"""Prompts that are asked for again and again; they fit in the memory of two nodes."""
SLOW_MBIT = 10
LOAD_S = 20.0
DEADLINE_S = 30
MINUTE_S = 60.0
LENGTH = PROMPT_TOKENS // TOKENS_PER_BLOCK
CONFIG = {
    **SETTINGS,
    "arena": {**SETTINGS["arena"], "capacity": "16MiB", "slab": "1MiB", "slot_min": "16KiB"},
    "connector": {**SETTINGS["connector"], "stage_wait_s": 5.0},
}


def prompt_of(name: str) -> list[int]:
    chosen = random.Random(name)
    return [chosen.randrange(3, 250) for _ in range(PROMPT_TOKENS)]


USED = [prompt_of(f"used {at}") for at in range(NUM_USED)]


@dataclass(slots=True)
class Run:
    """A tier of three nodes, an engine on each, and what became of the requests."""

    tier: TwoNodes
    replicas: list[Replica]
    failed: list[str] = field(default_factory=list)
    blocks: list[tuple[int, int]] = field(default_factory=list)
    """Of each arena, and for how many there is room."""
    answers: dict[int, set[tuple[int, ...]]] = field(default_factory=dict)

    def ask(self, at: int, number: int) -> int:
        """Ask an engine for a prompt; return its hit tokens."""
        try:
            output = self.replicas[number].generate(USED[at], max_tokens=2, timeout_s=60.0)
        except KVRayError as error:
            self.failed.append(str(error))
            return 0
        self.answers.setdefault(at, set()).add(tuple(output.token_ids))
        return int(output.hit_tokens)

    def fill(self) -> None:
        """Have each engine compute its share of the prompts, in an arena full of others' blocks."""
        for number, node in enumerate(self.tier.nodes):
            self.ask(number, number)
            with contextlib.closing(Arena(self.tier.node_dir(node), lock_wait_s=5.0)) as arena:
                arena.join("others")
                (size,) = slabs.block_sizes(arena.tables)
                room = arena.tables.geometry.capacity // arena.tables.geometry.stride(size)
                for at in range(room // LENGTH):
                    store(arena, chain(LENGTH, seed=f"{number} {at}"), block_bytes=size)
                self.blocks.append((arena.stats()["blocks"], room))
        self.each(range(NUM_USED))
        self.each(range(NUM_USED))

    def each(self, prompts: Iterable[int]) -> None:
        """Ask each node for its own of the prompts; the three at once."""

        def one(number: int) -> None:
            for at in prompts:
                if at % 3 == number:
                    self.ask(at, number)

        with ThreadPoolExecutor(3) as threads:
            list(threads.map(one, range(3)))

    def load(self, seconds: float) -> None:
        """Ask each node for some of its own prompts, again and again."""
        until, order = time.monotonic() + seconds, random.Random("load")
        while time.monotonic() < until:
            self.each(order.sample(range(NUM_USED), 9))

    def ask_those_that_stay(self) -> list[int]:
        """Ask two nodes for each prompt within a minute; return their hit tokens by first node."""
        began, rng = time.monotonic(), random.Random("order")
        hits = [0, 0, 0]
        for nth, at in enumerate(rng.sample(range(NUM_USED), NUM_USED)):
            time.sleep(max(0.0, began + nth * MINUTE_S / NUM_USED - time.monotonic()))
            hits[at % 3] += self.ask(at, nth % 2)
        return hits

    def keys(self, node: int, *, are_used: bool) -> set[bytes]:
        """Return the keys of a node's blocks: of the prompts that are used, or of the others."""
        with contextlib.closing(
            Arena(self.tier.node_dir(self.tier.nodes[node]), lock_wait_s=5.0)
        ) as arena:
            tables = arena.tables
            slots = tables.slots_in(READY)
            slots = slots[(tables.slot_namespace[slots] != 0) == are_used]
            return {key.tobytes() for key in tables.slot_key[slots]}


@contextlib.contextmanager
def opened(*, has_network: bool = False) -> Iterator[Run]:
    with contextlib.ExitStack() as stack:
        machine = stack.enter_context(Machine(num_nodes=3, has_network=has_network))
        tier = stack.enter_context(open_tier(machine, "loaded", CONFIG, num_nodes=3))
        replicas: list[Replica] = []
        stack.callback(lambda: [one.kill() for one in replicas])
        for number, node in enumerate(tier.nodes):
            replicas.append(
                Replica.spawn(
                    f"on-node-{number}",
                    env=tier.engine_environ(node),
                    model="tiny:11",
                    tokens_per_block=TOKENS_PER_BLOCK,
                    num_blocks=48,
                    connector=CONNECTOR,
                    num_threads=1,
                )
            )
        for replica in replicas:
            replica.wait_ready()
        run = Run(tier, replicas)
        run.fill()
        yield run


def drain(run: Run, deadline_s: int) -> None:
    """Have Ray drain the third node."""
    machine, directory = run.tier.machine, str(run.tier.node_dir(run.tier.nodes[2]))
    (node_id,) = (one["node_id"] for one in run.tier.shards() if one["directory"] == directory)
    done = machine.begin(
        "ray.scripts.scripts",
        "drain-node",
        f"--address={machine.address}",
        f"--node-id={node_id}",
        "--reason=DRAIN_NODE_REASON_PREEMPTION",
        "--reason-message=spot",
        f"--deadline-remaining-seconds={deadline_s}",
    )
    assert done.wait(HANG_S) == 0


def lose(run: Run) -> None:
    run.replicas[2].kill()
    run.tier.nodes[2].kill()


def test_of_the_hits_of_a_node_that_goes_a_drain_saves_nearly_all() -> None:
    hits: dict[str, int] = {}
    for name in ("kept", "drained", "lost"):
        with opened() as run:
            run.load(LOAD_S)
            if name == "drained":
                drain(run, DEADLINE_S)
            run.load(DEADLINE_S)
            if name != "kept":
                lose(run)
            of_nodes = run.ask_those_that_stay()
            hits[name] = sum(of_nodes)
            print(f"{name}: {of_nodes} hit tokens; blocks of {run.blocks}; {run.failed[:2]}")
            assert not run.failed
            assert all(len(answers) == 1 for answers in run.answers.values()), "no other text"
    print({name: round(hits[name] / hits["kept"], 3) for name in hits})
    assert hits["drained"] >= 0.95 * hits["kept"]
    assert hits["lost"] <= 0.75 * hits["kept"]


@pytest.mark.skipif(why_impossible() is not None, reason="needs network namespaces")
def test_in_two_seconds_over_a_slow_link_only_what_is_worth_most_goes() -> None:
    with opened(has_network=True) as run:
        run.load(LOAD_S)
        network = run.tier.machine.network
        assert network is not None
        network.slow(3, mbit=SLOW_MBIT, latency_ms=400)  # the head is 0
        used, others = (run.keys(2, are_used=are_used) for are_used in (True, False))
        drain(run, 2)
        run.load(6.0)
        came = {
            are_used: run.keys(0, are_used=are_used) | run.keys(1, are_used=are_used)
            for are_used in (True, False)
        }
        moved, cold = used & came[True], others & came[False]
        print(f"{len(moved)} of {len(used)} used blocks moved, {len(cold)} of {len(others)} others")
        network.speed_up(3)
        lose(run)
        hits = run.ask_those_that_stay()
        print(f"{hits} hit tokens; {run.failed[:2]}")
        assert not run.failed
        assert all(len(answers) == 1 for answers in run.answers.values()), "nothing half is there"
        assert 0 < len(moved) < len(used), "the link has time for some of them"
        assert len(cold) <= 0.1 * len(moved), "the others are worth less"
