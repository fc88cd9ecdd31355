"""`kvray pin`: have a prompt stay in memory for a time, list what is pinned, and end it."""

import getpass
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kvray.cli.asking import open_client, read_tokens, show_answer
from kvray.cli.pin.duration import parse_duration, shown_duration
from kvray.cli.text.explanation import node_of
from kvray.console.boundary import boundary
from kvray.console.options import AddressOption, ConfigOption, JsonOption, VerboseOption
from kvray.console.tables import empty_table, printer
from kvray.errors import ConfigError

_NAME_MAX = 80


def _option(help_text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help_text, show_default=False, **more)


def pin(
    tokens: Annotated[
        Path | None,
        typer.Argument(
            metavar="TOKENS",
            help="A file with the prompt's token ids: one JSON list, or numbers between white"
            " space; - is stdin. Without it the pins are listed.",
            show_default=False,
        ),
    ] = None,
    duration: Annotated[
        str | None, _option("How long it holds: 90s, 30m, 1h or 7d.", "--for", metavar="TIME")
    ] = None,
    name: Annotated[str | None, _option("Its name; by default the file's.")] = None,
    owner: Annotated[str | None, _option("Who has it; by default you.")] = None,
    replica: Annotated[
        str | None, _option("A replica whose prompt it is, if they are not all alike.")
    ] = None,
    salt: Annotated[str | None, _option("The request's cache salt.")] = None,
    lora: Annotated[str | None, _option("Path of the request's LoRA adapter on the nodes.")] = None,
    remove: Annotated[str | None, _option("End the pin of this name.", metavar="NAME")] = None,
    config: ConfigOption = None,
    address: AddressOption = None,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Have a prompt's blocks stay in memory, on every node that has them or gets them.

    Use it for system prompts that must not go. Without TOKENS it lists the pins.
    """
    with boundary(verbose=verbose) as interrupts:
        if tokens is not None and remove is not None:
            raise ConfigError("Give TOKENS to pin a prompt, or --remove to end a pin, not both.")
        if tokens is None and duration is not None:
            raise ConfigError("--for needs TOKENS, the file with the prompt to pin.")
        given: dict[str, Any] = {}
        if tokens is not None:
            given = _given(tokens, duration, name, owner)
            given |= {"replica": replica, "salt": salt, "lora": lora}
        with open_client(config, address, interrupts) as client:
            if given:
                client.pin(read_tokens(tokens or Path()), **given)
            if remove is not None:
                client.unpin(remove)
                print(f"{remove} is no pin any longer.")
                return
            found = client.pins()
        if given:
            found = [one for one in found if one["name"] == given["name"]]
        show_answer({"pins": found}, lambda told: _print(told["pins"]), as_json=as_json)


def _given(
    tokens: Path, duration: str | None, name: str | None, owner: str | None
) -> dict[str, Any]:
    if duration is None:
        raise ConfigError("Say how long the pin holds, for example --for 1h.")
    names = {"name": name or tokens.stem, "owner": owner or getpass.getuser()}
    for what, one in names.items():
        if not (0 < len(one) <= _NAME_MAX and one.isprintable()):
            raise ConfigError(f"--{what} {one!r:.90} is no text of 1 to {_NAME_MAX} characters.")
    return {**names, "seconds": parse_duration(duration)}


def _print(pins: Sequence[Mapping[str, Any]]) -> None:
    console = printer()
    if not pins:
        console.print("Nothing is pinned.")
        return
    table = empty_table("pin", "owner", "blocks here", numbers=("tokens", "blocks", "left"))
    for one in pins:
        here = {node_of(shard): count for shard, count in one["here"].items() if count}
        table.add_row(
            one["name"],
            one["owner"],
            "\n".join(f"{count:,} on {node}" for node, count in here.items()) or "not stored yet",
            f"{one['num_tokens']:,}",
            f"{one['num_blocks']:,}",
            shown_duration(one["seconds_left"]),
        )
    console.print(table)
