"""`kvray clear`: evict every block, and keep the tier."""

from typing import Annotated

import typer

from kvray.config import load_config
from kvray.console.options import AddressOption, ConfigOption, VerboseOption
from kvray.console.output import boundary, stdout_kept


def clear(
    config: ConfigOption = None,
    address: AddressOption = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Do not ask first.", show_default=False)
    ] = False,
    verbose: VerboseOption = False,
) -> None:
    """Evict every block of every node, from memory and disk.

    The tier goes on. Blocks that an engine is reading stay. Use it to measure
    with an empty tier, or to delete data. Correct answers never need it.
    """
    with boundary(verbose=verbose) as interrupts:
        settings = load_config(config, overrides={"ray.address": address})
        if not yes:
            typer.confirm(f"Evict every block of the tier {settings.cluster_name}?", abort=True)
        with interrupts.masked():
            from kvray.client import Client

        with stdout_kept(), Client(settings) as client:
            num_blocks = client.clear()
        print(f"{num_blocks} blocks were evicted.")
