"""`kvray down`: end the tier, and its Ray if `kvray up` started one."""

from typing import Annotated

import typer
from rich.console import Console

from kvray.cli.boundary import boundary
from kvray.cli.options import AddressOption, ConfigOption, VerboseOption
from kvray.cli.progress import LaunchProgress
from kvray.config import load_config


def down(
    config: ConfigOption = None,
    address: AddressOption = None,
    flush: Annotated[
        bool,
        typer.Option(
            "--flush/--no-flush",
            help="Whether blocks that are in memory only are written to the NVMe tier before,"
            " the last used first, for nvme.flush_s at most.",
        ),
    ] = True,
    verbose: VerboseOption = False,
) -> None:
    """End the tier, free its memory, and end its Ray if `kvray up` started it; again is fine.

    Engines go on without a tier. What is on disk stays, for the next `kvray up`.
    """
    with boundary(verbose=verbose) as interrupts:
        settings = load_config(config, overrides={"ray.address": address})
        with interrupts.masked():
            from kvray.actors.claim import owner_of
            from kvray.actors.launch import take_down

        progress = LaunchProgress(Console(stderr=True, highlight=False), interrupts)
        with progress, interrupts.held():
            found = take_down(settings, flush=flush, report=progress.flushing)
        name, console = settings.cluster_name, Console(highlight=False, soft_wrap=True)
        console.print(
            f"The tier [bold]{name}[/] is down." if found else f"No tier {name} was running."
        )
        if (owner := owner_of(settings.node_dir)) is not None:
            console.print(
                f"{owner} of another Ray cluster owns {settings.node_dir}, which stays; run"
                " `kvray down` with the --address of that cluster."
            )
