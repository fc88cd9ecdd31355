"""`kvray warm`: give a node what others use most, before it is asked for."""

import time
from typing import Annotated

import typer

from kvray.cli.asking import open_client
from kvray.cli.text.warm_up import warm_up_sentence
from kvray.console.boundary import boundary
from kvray.console.options import AddressOption, ConfigOption, VerboseOption
from kvray.console.progress import LaunchProgress
from kvray.console.tables import printer
from kvray.errors import ShardUnavailable

_POLL_S = 0.5


def warm(
    node: Annotated[
        str | None,
        typer.Argument(
            metavar="NODE", help="The beginning of its name in `kvray status`.", show_default=False
        ),
    ] = None,
    replica: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The nodes of this replica.", show_default=False),
    ] = None,
    deadline: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", min=0, max=3600, help="How long it may take.", show_default=False
        ),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait until the blocks are there.")
    ] = True,
    config: ConfigOption = None,
    address: AddressOption = None,
    verbose: VerboseOption = False,
) -> None:
    """Give a node, or the nodes of a replica, the blocks that others use most.

    They fill free memory, up to warm_up.share of it, and nothing goes for them. New nodes and the
    replicas of kvray.serve get that by themselves.
    """
    with boundary(verbose=verbose) as interrupts:
        with open_client(config, address, interrupts) as client:
            shards = client.warm_up(node, replica=replica, seconds=deadline)
            found = client.warming(shards)
            with LaunchProgress(printer(is_error=True), interrupts) as progress:
                while wait and any(one["state"] == "moving" for one in found.values()):
                    progress.warming(found.values())
                    time.sleep(_POLL_S)
                    found = client.warming(shards)
        for shard, one in found.items():
            if one["state"] == "failed":
                raise ShardUnavailable(warm_up_sentence(shard, one))
            print(warm_up_sentence(shard, one))
