"""`kvray drain`: have a node's blocks go to others before it is taken away."""

import time
from collections.abc import Callable
from typing import Annotated, Any

import typer

from kvray.cli.asking import open_client
from kvray.cli.text.drain import drain_sentence
from kvray.console.boundary import boundary
from kvray.console.options import AddressOption, ConfigOption, VerboseOption
from kvray.console.progress import LaunchProgress
from kvray.console.tables import printer
from kvray.errors import ShardUnavailable

_POLL_S = 0.5
_STALL_S = 60.0
"""The command gives up when nothing has moved for so long; the drain goes on."""


def drain(
    node: Annotated[
        str, typer.Argument(metavar="NODE", help="The beginning of its name in `kvray status`.")
    ],
    deadline: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", min=0, max=86_400, help="How long there is.", show_default=False
        ),
    ] = None,
    cancel: Annotated[
        bool, typer.Option("--cancel", help="The node stays after all.", show_default=False)
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait until the blocks are away.")
    ] = True,
    config: ConfigOption = None,
    address: AddressOption = None,
    verbose: VerboseOption = False,
) -> None:
    """Have what only one node has go to the others, before the node is taken away.

    What is used most goes first. Engines of the node go on until they end. The node gets nothing
    for later until `kvray drain NODE --cancel`. Ray's own notice does the same by itself.
    """
    with boundary(verbose=verbose) as interrupts:
        with open_client(config, address, interrupts) as client:
            if cancel:
                print(f"{client.call_off_drain(node)} stays.")
                return
            shard = client.drain(node, seconds=deadline)
            found = _look(client.status, shard)
            moved, stalls_at = -1, 0.0
            with LaunchProgress(printer(is_error=True), interrupts) as progress:
                while wait and found["state"] == "moving":
                    if found["moved_bytes"] != moved:
                        moved, stalls_at = found["moved_bytes"], time.monotonic() + _STALL_S
                    elif time.monotonic() > stalls_at:
                        raise ShardUnavailable(
                            f"{drain_sentence(shard, found)} Nothing has moved for {_STALL_S:.0f}"
                            " s; it goes on, see `kvray status`."
                        )
                    progress.draining(moved, found["left_bytes"], found.get("message", ""))
                    time.sleep(_POLL_S)
                    found = _look(client.status, shard)
        print(drain_sentence(shard, found))


def _look(status: Callable[[], dict[str, Any]], shard: str) -> dict[str, Any]:
    shards = {one["shard"]: one for one in status()["shards"]}
    found = shards.get(shard, {}).get("drain")
    if found is None:
        raise ShardUnavailable(f"{shard} is not to go, or does not answer; see `kvray status`.")
    return dict(found)
