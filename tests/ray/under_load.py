"""Two engines on two nodes of a tier that are asked on end, and every answer compared."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from math import inf

import numpy as np

from kvray.config import environ_for
from kvray.lab.chaos import load
from kvray.lab.chaos.judge import hit_share
from kvray.lab.chaos.servers import Question, Questions, Served, Server, ask_oracle
from kvray.lab.chaos.stalls import read_stalls
from tests.ray.cluster import TwoNodes
from tests.waiting import wait_for

_SEED = 7


class UnderLoad:
    """The engines, and what they have answered; figures are of the time since a moment."""

    def __init__(self, nodes: TwoNodes) -> None:
        """Begin to start the engines; they are asked as soon as they answer."""
        count = len(nodes.nodes)
        # One chapter, again and again: everything is in the tier after the first time.
        book = load.make_book(seed=_SEED, num_chapters=1, num_replicas=count)
        questions = ask_oracle(book, lambda done: None)
        self.servers = [
            Server(
                node.name,
                environ=environ_for(nodes.config_path),
                arena_dir=node.arena_dir,
                files=nodes.machine.scratch / node.name,
            )
            for node in nodes.nodes
        ]
        for number, server in enumerate(self.servers):
            server.serve(_batches(book, number, count, questions))

    def wait_for_batches(self, number: int) -> None:
        """Return when each engine has answered so many more."""
        enough = [len(server.served) + number for server in self.servers]
        wait_for(
            lambda: all(
                len(server.served) >= least
                for server, least in zip(self.servers, enough, strict=True)
            ),
            f"{number} batches",
        )

    def check_well(self) -> None:
        """Check that nothing was wrong, failed, hung or died."""
        assert sum((server.losses for server in self.servers), Counter()) == Counter(), [
            failure for server in self.servers for failure in server.failures
        ]
        assert not any(one.wrong_tokens for server in self.servers for one in server.served)

    def hits(self, since: float, until: float = inf) -> list[float]:
        """Return each engine's share of tokens found in the tier."""
        return [round(hit_share(_within(one, since, until)), 3) for one in self.servers]

    def longest_s(self, since: float, until: float = inf) -> float:
        """Return how long the slowest batch took."""
        found = [one for server in self.servers for one in _within(server, since, until)]
        return round(max((one.ended - one.began for one in found), default=0.0), 2)

    def longest_stall_ms(self, since: float) -> float:
        """Return how long kvray held up an engine's scheduler at most, less waits for a core."""
        stalls = np.concatenate([read_stalls(server.stalls_path) for server in self.servers])
        late = stalls[stalls[:, 1] > since]
        return round(1000.0 * float((late[:, 2] - late[:, 3]).max(initial=0.0)), 1)

    def close(self) -> None:
        """End the engines. Twice is fine."""
        for server in self.servers:
            server.close()


@contextlib.contextmanager
def open_under_load(nodes: TwoNodes) -> Iterator[UnderLoad]:
    """Have the engines of a tier asked for the time of a block, and check every answer.

    All that they are asked is in the tier when it begins.
    """
    with contextlib.closing(UnderLoad(nodes)) as made:
        made.wait_for_batches(2 * load.BATCHES)
        yield made
        made.check_well()


def _within(server: Server, since: float, until: float) -> list[Served]:
    return [one for one in [*server.served] if since < one.began < until]


def _batches(
    book: list[load.Chapter], replica: int, count: int, questions: Questions
) -> Iterator[tuple[int, list[Question]]]:
    for place, asks in load.batches_of(book, replica=replica, num_replicas=count, seed=_SEED):
        yield place, [questions[ask] for ask in asks]
