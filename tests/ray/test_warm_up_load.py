"""A node is added under load: how much its engine finds, and how soon, with and without a warm-up.

Two nodes' engines answer prompts over shared prefixes; a few of these are asked for often. Then a
third node and its engine come. Each engine is asked for prompts of the same distribution.
"""

import random
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field

import pytest

from kvray.cli.text.hits import COMPUTED, token_sources
from kvray.lab.chaos.machine import Machine
from kvray.lab.chaos.node import Node
from kvray.lab.reference.output import Output
from kvray.lab.reference.replica import Replica
from tests.ray.cluster import CONNECTOR, SETTINGS, TwoNodes, open_tier
from tests.ray.teller import Teller
from tests.waiting import wait_for

pytestmark = [pytest.mark.ray, pytest.mark.long]

NUM_PREFIXES, PREFIX_TOKENS, OWN_TOKENS = 64, 640, 40
POOL_BLOCKS = 96  # four prompts
PAUSE_S = 0.25  # between two prompts of an engine
BEFORE_S, WINDOW_S = 30.0, 10.0


@dataclass(slots=True)
class Driver:
    """Asks one engine for prompts, one after the other, until it is stopped."""

    replica: Replica
    seed: int
    outputs: list[tuple[float, Output]] = field(default_factory=list)
    stopping: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, name=f"driver {self.seed}")
        self.thread.start()

    def _run(self) -> None:
        drawn = random.Random(self.seed)
        weights = [1 / rank for rank in range(1, NUM_PREFIXES + 1)]
        while not self.stopping.wait(PAUSE_S):
            (number,) = drawn.choices(range(NUM_PREFIXES), weights)
            prefix = random.Random(number).choices(range(3, 259), k=PREFIX_TOKENS)
            prompt = [*prefix, *drawn.choices(range(3, 259), k=OWN_TOKENS)]
            self.outputs.append((time.monotonic(), self.replica.generate(prompt, max_tokens=2)))

    def close(self) -> None:
        self.stopping.set()
        self.thread.join()
        self.replica.close()

    def first_tokens(self, since: float, until: float) -> list[float]:
        return [one.ttft_s for at, one in self.outputs if since <= at < until]


@dataclass(slots=True)
class Fleet:
    """The engines of a tier, and what they found in a stretch of time."""

    tier: TwoNodes
    stack: ExitStack
    teller: Teller
    drivers: dict[str, Driver] = field(default_factory=dict)

    def start(self, node: Node) -> Replica:
        replica = Replica.start(
            node.name,
            env={**self.tier.engine_environ(node), "KVRAY_CONNECTOR__REPLICA": node.name},
            model="tiny",
            connector=CONNECTOR,
            num_blocks=POOL_BLOCKS,
            num_threads=1,
        )
        self.stack.callback(replica.close)
        return replica

    def drive(self, replica: Replica) -> None:
        driver = Driver(replica, seed=len(self.drivers) + 1000)
        self.drivers[replica.name] = self.stack.enter_context(closing(driver))

    def counters(self) -> dict[str, dict[str, float]]:
        ranks = [one for shard in self.teller.status()["shards"] for one in shard["replicas"]]
        return {one["replica"]: token_sources(one["counters"]) for one in ranks}

    def window(self) -> dict[str, dict[str, float]]:
        """Return each engine's shares of prompt tokens by source, and its median first token."""
        began, before = time.monotonic(), self.counters()
        time.sleep(WINDOW_S)
        ended, after = time.monotonic(), self.counters()
        found = {}
        for name, driver in self.drivers.items():
            grown = {at: after[name][at] - before.get(name, {}).get(at, 0) for at in after[name]}
            total = sum(grown.values())
            shares = {source: tokens / total for source, tokens in grown.items()}
            first = statistics.median(driver.first_tokens(began, ended))
            found[name] = {**shares, "hits": 1 - shares[COMPUTED], "first_token_ms": 1000 * first}
        return found


@pytest.fixture(scope="module")
def three_nodes() -> Iterator[Machine]:
    with Machine(num_nodes=3) as made:
        yield made


def play(machine: Machine, *, share: float) -> list[dict[str, dict[str, float]]]:
    """Add a node to a tier under load; return the windows since its engine was ready."""
    *old, new = machine.nodes
    new.kill()
    arena = {**SETTINGS["arena"], "slot_min": "16KiB"}  # its blocks are as small
    settings = {**SETTINGS, "arena": arena, "warm_up": {"share": share}}
    with (
        open_tier(machine, "warm" if share else "cold", settings, num_nodes=3) as tier,
        ExitStack() as stack,
    ):
        stack.callback(new.kill)
        teller = stack.enter_context(closing(Teller(tier.config_path, machine.environ())))
        fleet = Fleet(tier, stack, teller)
        for node in old:
            fleet.drive(fleet.start(node))
        time.sleep(BEFORE_S)
        joins = time.monotonic()
        new.start()
        directory = str(tier.node_dir(new))

        def serves() -> bool:
            return directory in [
                one["directory"] for one in teller.status()["shards"] if one["state"] == "serving"
            ]

        wait_for(serves, "the new shard")
        replica = fleet.start(new)
        if share:
            done = machine.run("warm", "--replica", new.name, "-c", str(tier.config_path))
            assert done.returncode == 0, done.stderr
            print(done.stdout.strip())
        for name, driver in fleet.drivers.items():
            before = driver.first_tokens(joins - WINDOW_S, joins)
            meanwhile = driver.first_tokens(joins, time.monotonic())
            medians = (f"{1000 * statistics.median(some):.1f}" for some in (before, meanwhile))
            print(name, "first token before the other joins, and meanwhile, ms:", *medians)
        fleet.drive(replica)
        return [fleet.window() for _ in range(2)]


def test_a_new_node_hits_as_much_as_the_others_within_ten_seconds(three_nodes: Machine) -> None:
    found = {share: play(three_nodes, share=share) for share in (0.0, 0.5)}
    for share, windows in found.items():
        for number, window in enumerate(windows):
            print(f"\nwarm_up.share {share}, {number * WINDOW_S:.0f} s after it was ready")
            for name, figures in window.items():
                print(name, {key: round(value, 3) for key, value in figures.items()})
    *others, new = found[0.5][0].values()
    assert new["hits"] >= 0.9 * statistics.mean(one["hits"] for one in others)
    cold = found[0.0][0]["node3"]
    assert new["remote"] < cold["remote"] / 2, "what came before need not be fetched"
