"""`kvray doctor`: what of the tier does not work as well as it could, and what to do."""

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

from kvray.cli.boundary import boundary, stdout_kept
from kvray.cli.options import AddressOption, ConfigOption, VerboseOption
from kvray.cli.transports import ways, ways_table
from kvray.config import load_config


def doctor(
    config: ConfigOption = None,
    address: AddressOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    verbose: VerboseOption = False,
) -> None:
    """Say which transport moves blocks between which nodes, and why that one."""
    with boundary(verbose=verbose) as interrupts:
        settings = load_config(config, overrides={"ray.address": address})
        with interrupts.masked():
            from kvray.client import Client

        with stdout_kept(), Client(settings) as client:
            found = client.status()
        made = ways(found)
        if as_json:
            print(json.dumps({"transports": [asdict(way) for way in made]}, indent=2))
            return
        console = Console(highlight=False)
        if not made:
            console.print("The tier has one node: there is nothing to move blocks between.")
            return
        console.print(ways_table(made))
        for way in made:
            if way.transport is None:
                console.print(
                    f"Nothing comes from {way.source} to {way.target}: {way.why}.",
                    markup=False,
                    soft_wrap=True,
                )
