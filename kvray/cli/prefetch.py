"""`kvray prefetch`: bring a prompt's blocks to a replica before its engine sees the prompt."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kvray.cli.asking import open_client, read_tokens
from kvray.console.options import AddressOption, ConfigOption, JsonOption, VerboseOption
from kvray.console.output import boundary


def prefetch(
    tokens: Annotated[
        Path,
        typer.Argument(
            metavar="TOKENS",
            help="A file with the prompt's token ids: one JSON list, or numbers between white"
            " space; - is stdin.",
        ),
    ],
    replica: Annotated[str, typer.Option(help="Name of the replica in `kvray status`.")],
    salt: Annotated[
        str | None, typer.Option(help="The request's cache salt.", show_default=False)
    ] = None,
    lora: Annotated[
        str | None,
        typer.Option(help="Path of the request's LoRA adapter on the nodes.", show_default=False),
    ] = None,
    config: ConfigOption = None,
    address: AddressOption = None,
    as_json: JsonOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Bring a prompt's blocks from other nodes and disk to a replica.

    The next request with this prompt then hits.
    """
    with boundary(verbose=verbose) as interrupts:
        token_ids = read_tokens(tokens)
        with open_client(config, address, interrupts) as client:
            brought = client.prefetch(token_ids, replica=replica, salt=salt, lora=lora)
        if as_json:
            print(json.dumps(asdict(brought), indent=2))
            return
        print(
            f"{brought.num_tokens:,} of {len(token_ids):,} tokens are ready for {replica},"
            f" {brought.staged_tokens:,} of them came now."
        )
        if brought.reason != "none":
            print(f"Why not more: {brought.reason.replace('_', ' ')}.")
