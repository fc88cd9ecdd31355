"""A tier on several nodes of this machine, replicas on them, and what is said of both."""

import contextlib
import itertools
import json
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from kvray.config import environ_for, load_config
from kvray.lab.chaos.machine import PAIR, RESOURCE, Machine, Node
from kvray.reference.engine_options import KvConnectorConfig
from kvray.reference.replica import Replica
from kvray.store import Arena
from tests.far import Far
from tests.waiting import HANG_S, wait_for

CONNECTOR = KvConnectorConfig()
"""What a replica is started with, so that it uses the tier."""

SETTINGS: dict[str, dict[str, Any]] = {
    "arena": {"capacity": "64MiB", "slab": "16MiB", "lock_wait_s": 0.05},
    "connector": {"model_key": "tiny", "verify_on_load": "always"},
}
PATIENT = {**SETTINGS, "connector": {**SETTINGS["connector"], "stage_wait_s": 5.0}}

TOKENS_PER_BLOCK = 32
PROMPT_TOKENS = 640
NUM_BLOCKS = PROMPT_TOKENS // TOKENS_PER_BLOCK
WHOLE_TOKENS = PROMPT_TOKENS - TOKENS_PER_BLOCK
"""That an engine loads of such a prompt: it computes at least one token itself."""
REPLICA: dict[str, Any] = {
    "model": "tiny:11",
    "tokens_per_block": TOKENS_PER_BLOCK,
    "num_blocks": 128,
    "connector": CONNECTOR,
    "num_threads": 1,
}


def prompt_of(name: int | str, num_tokens: int = PROMPT_TOKENS) -> list[int]:
    """Return a prompt that is the same for the same name."""
    chance = random.Random(name)
    return [chance.randrange(3, 250) for _ in range(num_tokens)]


def prompts_that_begin_alike() -> Iterator[list[int]]:
    """Give prompts of 544 tokens without end, some of which begin alike; all together never fit."""
    chance = random.Random(7)
    heads = [prompt_of(number, 480) for number in range(96)]
    while True:
        head = heads[int(len(heads) * chance.random() ** 2)]
        yield [*head, *(chance.randrange(3, 250) for _ in range(64))]


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoNodes:
    """A tier that is up on the nodes of a machine."""

    machine: Machine
    config_path: Path
    cluster_name: str = "nodes"
    num_nodes: int = 2

    @property
    def nodes(self) -> list[Node]:
        """The nodes that have a shard."""
        return self.machine.nodes[: self.num_nodes]

    def node_dir(self, node: Node) -> Path:
        """Return where a node's arena and socket are."""
        return node.arena_dir / f"kvray-{self.cluster_name}"

    def engine_environ(self, node: Node) -> dict[str, str]:
        """Return the variables with which an engine finds the tier of its node."""
        return {**environ_for(self.config_path), "KVRAY_ARENA__DIR": str(node.arena_dir)}

    def spawn(self, number: int, **options: Any) -> Replica:
        """Begin to start a replica on a node; `options` are other ones than those of `REPLICA`."""
        name = f"on-node-{number}"
        environ = {**self.engine_environ(self.nodes[number]), "KVRAY_CONNECTOR__REPLICA": name}
        return Replica(name, env=environ, **{**REPLICA, **options})

    @contextlib.contextmanager
    def arena_of(self, node: Node) -> Iterator[Arena]:
        """Attach to a node's arena, as its engines do."""
        with contextlib.closing(Arena(self.node_dir(node), lock_wait_s=5.0)) as arena:
            arena.join("test")
            yield arena

    def say(self, *args: str) -> str:
        """Run a command as somebody on the head; return what it printed."""
        done = self.machine.run(*args, "-c", str(self.config_path), timeout_s=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return str(done.stdout)

    def status(self) -> dict[str, Any]:
        """Return what `kvray status` says."""
        return dict(json.loads(self.say("status", "--json")))

    def has_movers(self) -> bool:
        """Return whether both nodes' movers serve."""
        return [mover["state"] for mover in self.status()["movers"]] == ["serving"] * 2

    def shards(self) -> list[dict[str, Any]]:
        """Return what `kvray status` says of the shards; nothing while the tier's head is gone."""
        done = self.machine.run("status", "--json", "-c", str(self.config_path))
        return list(json.loads(done.stdout)["shards"]) if done.returncode == 0 else []

    def serving(self) -> dict[str, dict[str, Any]]:
        """Return directory -> what `kvray status` says, of the shards that serve."""
        return {one["directory"]: one for one in self.shards() if one["state"] == "serving"}


@contextlib.contextmanager
def open_tier(
    machine: Machine,
    cluster_name: str,
    settings: Mapping[str, Mapping[str, Any]] = SETTINGS,
    *options: str,
    num_nodes: int = 2,
) -> Iterator[TwoNodes]:
    """Have a tier on the first two nodes of a machine, or all, for the time of a block.

    The machine may have others after it.
    """
    resource = PAIR if num_nodes == 2 else RESOURCE
    path = machine.write_config(settings, cluster_name=cluster_name, resource=resource)
    try:
        up = machine.run("up", *options, "-c", str(path))
        assert up.returncode == 0, up.stderr
        yield TwoNodes(
            machine=machine, config_path=path, cluster_name=cluster_name, num_nodes=num_nodes
        )
    finally:
        down = machine.run("down", "-c", str(path))
    assert down.returncode == 0, down.stderr


@contextlib.contextmanager
def open_two_nodes(
    settings: Mapping[str, Mapping[str, Any]] = SETTINGS, **options: Any
) -> Iterator[TwoNodes]:
    """Have a tier on a new `Machine`, made with `options`, for the time of a block."""
    with Machine(**options) as machine, open_tier(machine, "nodes", settings) as nodes:
        yield nodes


class Teller:
    """A process that stays connected to a tier's Ray and says what `kvray status --json` would.

    A command for each question would cost a core more than a second.
    """

    def __init__(self, config_path: Path, environ: Mapping[str, str]) -> None:
        config = load_config(config_path, environ={})
        self._far = Far("kvray.client:Client", config, environ=dict(environ))

    def status(self) -> dict[str, Any]:
        return dict(self._far.call("status", timeout_s=HANG_S))

    def close(self) -> None:
        self._far.kill()


class Sharing:
    """Two replicas on two nodes of a tier."""

    def __init__(self, nodes: TwoNodes, replicas: list[Replica], teller: Teller) -> None:
        self.nodes = nodes
        self.say = nodes.say
        self.status = teller.status
        self.first, self.second = replicas

    def is_ready(self, num_ranks: int = 2) -> bool:
        """Return whether both movers serve, and so many ranks are registered."""
        status = self.status()
        ranks = [rank for shard in status["shards"] for rank in shard.get("replicas", [])]
        movers = [mover["state"] for mover in status["movers"]]
        return movers == ["serving"] * 2 and len(ranks) == num_ranks

    def shards(self) -> list[dict[str, Any]]:
        """Return what the shards of the first and of the second replica's node say."""
        found = {shard["directory"]: shard for shard in self.status()["shards"]}
        return [found[str(self.nodes.node_dir(node))] for node in self.nodes.nodes]

    def num_known(self) -> int:
        return int(self.status()["lookup"]["keys"])

    def compute(self, prompt: list[int], replica: Replica | None = None) -> tuple[int, ...]:
        """Have the first replica answer, and wait until the lookup knows of its blocks."""
        before = self.num_known()
        (output,) = (replica or self.first).generate([prompt], max_tokens=4)
        wait_for(lambda: self.num_known() >= before + NUM_BLOCKS, "the announcement")
        return tuple(output.token_ids)


@contextlib.contextmanager
def open_sharing(
    nodes: TwoNodes, *, sizes: Sequence[int] = (1, 1), **options: Any
) -> Iterator[Sharing]:
    """Have a replica on each node for the time of a block, each of so many ranks."""
    with contextlib.ExitStack() as stack:
        teller = stack.enter_context(
            contextlib.closing(Teller(nodes.config_path, nodes.machine.environ()))
        )
        replicas: list[Replica] = []
        for number, size in enumerate(sizes):
            replicas.append(nodes.spawn(number, tensor_parallel_size=size, **options))
            stack.callback(replicas[-1].kill)
        for replica in replicas:
            replica.wait_ready()
        made = Sharing(nodes, replicas, teller)
        wait_for(lambda: made.is_ready(sum(sizes)), "movers and ranks")
        yield made


@contextlib.contextmanager
def again_and_again(act: Callable[[int], None], *, pause_s: float) -> Iterator[None]:
    """Have a thread call `act` with 0, 1, 2 and so on, for the time of a block."""
    is_over = threading.Event()

    def run() -> None:
        for number in itertools.count():
            act(number)
            if is_over.wait(pause_s):
                break

    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(run)
        try:
            yield
        finally:
            is_over.set()
        running.result()


def node_of(shard: dict[str, Any]) -> str:
    """Return the label that metrics have for the node of a shard."""
    return str(shard["shard"]).removeprefix("kvray-shard-")


def counters_of(shard: dict[str, Any], replica: str) -> dict[str, int]:
    (rank,) = [one for one in shard["replicas"] if one["replica"] == replica]
    return dict(rank["counters"])


OFTEN = {"RAY_metrics_report_interval_ms": "1000"}
"""Variables of nodes whose figures are to be there soon; Ray's own interval is ten seconds."""

_PREFIX = "ray_kvray_"


def scrape(temp_dir: Path) -> list[Sample]:
    """Return the samples of kvray's metrics of all nodes with `temp_dir` as they are now."""
    families: list[Metric] = []
    files = temp_dir.glob("session_2*/metrics_export_port_*")
    for port in {file.read_text() for file in files}:
        # Some are of nodes that have left, or of sessions before this one.
        with suppress(URLError), urlopen(f"http://127.0.0.1:{port}", timeout=10) as answer:
            families += text_string_to_metric_families(answer.read().decode())
    return [one for family in families for one in family.samples if one.name.startswith(_PREFIX)]


def total(samples: list[Sample], metric: str, /, **labels: str) -> int:
    """Return the sum of those samples of a metric that have `labels`; 0 if there are none."""
    meant = (one for one in samples if one.name == f"{_PREFIX}{metric}")
    return round(sum(one.value for one in meant if labels.items() <= one.labels.items()))
