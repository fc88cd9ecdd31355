"""`kvray down`: end the tier, and its Ray if `kvray up` started one."""

from typing import Annotated

import typer

from kvray.config import load_config
from kvray.console.options import AddressOption, ConfigOption, VerboseOption
from kvray.console.output import boundary, printer
from kvray.console.progress import LaunchProgress
from kvray.errors import ShardUnavailable


def down(
    config: ConfigOption = None,
    address: AddressOption = None,
    flush: Annotated[
        bool,
        typer.Option(
            "--flush/--no-flush",
            help="First write blocks that are only in memory to the NVMe tier, the latest used"
            " first, for at most nvme.flush_s.",
        ),
    ] = True,
    verbose: VerboseOption = False,
) -> None:
    """End the tier, free its memory, and end its Ray if `kvray up` started it.

    Running it again is fine. Engines go on without a tier. Blocks on disk stay for the next
    `kvray up`.
    """
    with boundary(verbose=verbose) as interrupts:
        settings = load_config(config, overrides={"ray.address": address})
        with interrupts.masked():
            from kvray.actors.owner.claim import owner_of
            from kvray.actors.tier.launch import take_down
            from kvray.actors.tier.rollout import Observer

        progress = LaunchProgress(printer(is_error=True), interrupts)
        with progress, interrupts.held():
            found = take_down(settings, flush=flush, observer=Observer(report=progress.flushing))
        owner = owner_of(settings.node_dir)
        if owner is not None and not found:
            raise ShardUnavailable(owner.keeps(settings.node_dir))
        name, console = settings.cluster_name, printer(soft_wrap=True)
        console.print(f"The tier {name} is down." if found else f"No tier {name} was running.")
        if owner is not None:
            console.print(
                f"{owner} of another Ray cluster owns {settings.node_dir}, which stays; run"
                " `kvray down` with the --address of that cluster."
            )
