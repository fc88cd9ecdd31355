"""A process that counts and exports what a router does, until its stdin is closed."""

import select
import sys
import time
from contextlib import closing

from kvray import Client
from kvray.actors.routers.pools import EVENTS_STAT, Pools
from kvray.actors.telemetry.metrics_export import MetricsThread
from kvray.events.publisher import ZmqPublisher
from kvray.routing import Outcomes
from kvray.serve.router import figures_of
from tests.unit.events.test_publisher import Held, free_port, stored

EVERY_S = 0.2


def main() -> None:
    outcomes, held = Outcomes(), Held()
    places = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    with (
        Client() as client,
        closing(Pools()) as pools,
        closing(ZmqPublisher(held, first=1)) as publisher,
    ):
        publisher.bind(*places)
        told = {"endpoint": places[0], "replay_endpoint": places[1]}
        pools.follow({"engine": {EVENTS_STAT: told}})
        # The client has joined the tier's Ray, and a process of Ray's exports metrics.
        thread = MetricsThread(
            lambda _: figures_of(outcomes.totals() | pools.totals()), client.cluster_name
        )
        while not select.select([sys.stdin], [], [], EVERY_S)[0]:
            outcomes.surveyed("answered")
            outcomes.sent("prefix")
            outcomes.first_token(0.3, 0.2)
            held.blocks[len(held.blocks)] = None
            publisher.publish([stored(len(held.blocks) - 1)])
            publisher.serve(time.monotonic())
        thread.stop()


if __name__ == "__main__":
    main()
