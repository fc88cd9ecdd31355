"""`kvray drain`, `kvray clear` and `kvray prefetch`: have blocks go elsewhere, go, or come."""

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kvray.actors.hosts import named
from kvray.cli.asking import duration, open_client, read_tokens, show_answer
from kvray.cli.status import drain_sentence
from kvray.config import load_config
from kvray.console.interrupts import Interrupts
from kvray.console.options import AddressOption, ConfigOption, JsonOption, flag
from kvray.console.output import printer
from kvray.console.progress import LaunchProgress
from kvray.errors import ShardUnavailable

_POLL_S = 0.5
_STALL_S = 60.0
"""The command gives up when nothing has moved for so long; the drain goes on."""


def drain(
    interrupts: Interrupts,
    node: Annotated[
        str,
        typer.Argument(metavar="NODE", help="Its host's name or IP, or the beginning of its id."),
    ],
    deadline: Annotated[float | None, duration("How long there is.", 0, 86_400)] = None,
    cancel: Annotated[bool, flag("--cancel", "The node stays after all.")] = False,
    wait: Annotated[bool, flag("--wait/--no-wait", "Wait until the blocks are away.")] = True,
    config: ConfigOption = None,
    address: AddressOption = None,
) -> None:
    """Move blocks that only this node holds to other nodes before you remove it.

    What is used most goes first. It fails if the deadline comes first. Engines of the node go on
    until they end. The node gets nothing for later until `kvray drain NODE --cancel`. Ray's own
    notice does the same by itself.
    """
    if cancel:
        with open_client(config, address) as client:
            stays = named(f"{client.call_off_drain(node)} stays.", client.hosts())
        print(stays)  # out here: in there it would go to stderr, as what Ray prints
        return
    with open_client(config, address) as client:
        hosts = client.hosts()
        shard = client.drain(node, seconds=deadline)
        found = _look(client.status, shard)
        moved, stalls_at = -1, 0.0
        with LaunchProgress(printer(is_error=True), interrupts) as progress:
            while wait and found["state"] == "moving":
                if found["moved_bytes"] != moved:
                    moved, stalls_at = found["moved_bytes"], time.monotonic() + _STALL_S
                elif time.monotonic() > stalls_at:
                    raise ShardUnavailable(
                        f"{named(drain_sentence(shard, found), hosts)} Nothing has moved for"
                        f" {_STALL_S:.0f} s; it goes on, see `kvray status`."
                    )
                progress.draining(moved, found["left_bytes"], found.get("message", ""))
                time.sleep(_POLL_S)
                found = _look(client.status, shard)
    print(named(drain_sentence(shard, found), hosts))
    if found["state"] == "late" and found["left_bytes"]:
        raise typer.Exit(1)


def _look(status: Callable[[], dict[str, Any]], shard: str) -> dict[str, Any]:
    shards = {one["shard"]: one for one in status()["shards"]}
    found = shards.get(shard, {}).get("drain")
    if found is None:
        raise ShardUnavailable(f"{shard} is not to go, or does not answer; see `kvray status`.")
    return dict(found)


def clear(
    config: ConfigOption = None,
    address: AddressOption = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask first.")] = False,
) -> None:
    """Evict every block of every node, from memory and disk.

    The tier goes on. Blocks that an engine is reading stay. Use it to measure
    with an empty tier, or to delete data. Correct answers never need it.
    """
    name = load_config(config).cluster_name
    if not yes:
        typer.confirm(f"Evict every block of the tier {name}?", abort=True)
    with open_client(config, address) as client:
        num_blocks = client.clear()
    print(f"{num_blocks} blocks were evicted.")


def prefetch(
    tokens: Annotated[
        Path,
        typer.Argument(
            metavar="TOKENS",
            help="A file with the prompt's token ids: one JSON list, or numbers between white"
            " space; - is stdin.",
        ),
    ],
    replica: Annotated[str, typer.Option(help="Name of the replica in `kvray ls`.")],
    salt: Annotated[str | None, typer.Option(help="The request's cache salt.")] = None,
    lora: Annotated[
        str | None, typer.Option(help="Path of the request's LoRA adapter on the nodes.")
    ] = None,
    config: ConfigOption = None,
    address: AddressOption = None,
    as_json: JsonOption = False,
) -> None:
    """Bring a prompt's blocks from other nodes and disk to a replica.

    The next request with this prompt then hits.
    """
    token_ids = read_tokens(tokens)
    with open_client(config, address) as client:
        brought = client.prefetch(token_ids, replica=replica, salt=salt, lora=lora)
    said = [
        f"{brought.num_tokens:,} of {len(token_ids):,} tokens are ready for {replica},"
        f" {brought.staged_tokens:,} of them came now."
    ]
    if brought.reason != "none":
        said.append(f"Why not more: {brought.reason.replace('_', ' ')}.")
    show_answer(asdict(brought), lambda _: said, as_json=as_json)
