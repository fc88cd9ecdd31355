"""A process that counts and exports what a router does, until its stdin is closed."""

import select
import sys

from kvray import Client
from kvray.actors.telemetry.metrics_export import MetricsThread
from kvray.routing import Outcomes
from kvray.serve.router import figures_of

EVERY_S = 0.2


def main() -> None:
    outcomes = Outcomes()
    with Client() as client:  # it joins the tier's Ray, and a process of Ray's exports metrics
        thread = MetricsThread(lambda _: figures_of(outcomes.totals()), client.cluster_name)
        while not select.select([sys.stdin], [], [], EVERY_S)[0]:
            outcomes.surveyed("answered")
            outcomes.sent("prefix")
            outcomes.first_token(0.3, 0.2)
        thread.stop()


if __name__ == "__main__":
    main()
