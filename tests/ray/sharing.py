"""Two replicas on the two nodes of a tier, and what commands say of them."""

from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from kvray.reference.replica import Replica
from tests.ray.cluster import CONNECTOR, TwoNodes
from tests.ray.teller import Teller
from tests.waiting import wait_for

TOKENS_PER_BLOCK = 32


class Sharing:
    """Two replicas on two nodes of a tier."""

    def __init__(self, nodes: TwoNodes, replicas: list[Replica], teller: Teller) -> None:
        self.nodes = nodes
        self.status = teller.status
        self.first, self.second = replicas

    def say(self, *args: str) -> str:
        """Run a command as somebody on the head; return what it printed."""
        done = self.nodes.machine.run(*args, "-c", str(self.nodes.config_path))
        assert done.returncode == 0, done.stderr
        return done.stdout

    def configure(self, **sections: Any) -> None:
        """Have other values in the configuration."""
        path = self.nodes.config_path
        path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **sections}))

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
        blocks = len(prompt) // TOKENS_PER_BLOCK
        wait_for(lambda: self.num_known() >= before + blocks, "the announcement")
        return tuple(output.token_ids)


def begin_replicas(
    nodes: TwoNodes, *, sizes: Sequence[int] = (1, 1), **options: Any
) -> Iterator[Replica]:
    """Begin to start a replica on each node, one after the other, each of so many ranks."""
    for number, (node, size) in enumerate(zip(nodes.nodes, sizes, strict=True)):
        yield Replica.spawn(
            f"on-node-{number}",
            env={**nodes.engine_environ(node), "KVRAY_CONNECTOR__REPLICA": f"on-node-{number}"},
            model="tiny:11",
            tokens_per_block=TOKENS_PER_BLOCK,
            num_blocks=128,
            connector=CONNECTOR,
            num_threads=1,
            tensor_parallel_size=size,
            **options,
        )


def node_of(shard: dict[str, Any]) -> str:
    """Return the label that metrics have for the node of a shard."""
    return str(shard["shard"]).removeprefix("kvray-shard-")


def counters_of(shard: dict[str, Any], replica: str) -> dict[str, int]:
    (rank,) = [one for one in shard["replicas"] if one["replica"] == replica]
    return dict(rank["counters"])
