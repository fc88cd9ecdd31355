"""`kvray clear`: let go of everything that is stored, and keep the tier."""

from typing import Annotated

import typer

from kvray.cli.boundary import boundary, stdout_kept
from kvray.cli.options import AddressOption, ConfigOption, VerboseOption
from kvray.config import load_config


def clear(
    config: ConfigOption = None,
    address: AddressOption = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Do not ask first.", show_default=False)
    ] = False,
    verbose: VerboseOption = False,
) -> None:
    """Let go of every stored block of every node, in memory and on disk; the tier goes on.

    What an engine is reading stays. Nothing wrong is ever served without it: it is for measuring
    from an empty tier, and for what must be deleted.
    """
    with boundary(verbose=verbose) as interrupts:
        settings = load_config(config, overrides={"ray.address": address})
        if not yes:
            typer.confirm(
                f"Let go of all that the tier {settings.cluster_name} has stored?", abort=True
            )
        with interrupts.masked():
            from kvray.client import Client

        with stdout_kept(), Client(settings) as client:
            num_blocks = client.clear()
        print(f"{num_blocks} blocks have gone.")
