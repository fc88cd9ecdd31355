"""`kvray up`: start the tier, and a local Ray cluster if there is none."""

from typing import Annotated

import typer

from kvray.cli.launching import carry_out, show_plan
from kvray.config import load_config
from kvray.console.boundary import boundary
from kvray.console.options import (
    AddressOption,
    ConfigOption,
    PlanOption,
    RecreateOption,
    VerboseOption,
)
from kvray.errors import ConfigError


def up(
    config: ConfigOption = None,
    address: AddressOption = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            help="Port of the local Ray's head; a free one by default.",
            show_default=False,
        ),
    ] = None,
    dashboard: Annotated[
        bool, typer.Option(help="Start the local Ray with its dashboard.")
    ] = False,
    wait: Annotated[
        bool,
        typer.Option(
            help="Wait until every chosen node has its shard; otherwise nodes may join later."
        ),
    ] = True,
    recreate: RecreateOption = False,
    plan: PlanOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Start the tier and wait until it serves; running it again is fine.

    A tier that runs with other settings gets the new ones, one node after the other, and keeps its
    arenas. Without an address, this command starts a Ray on this machine that runs until
    `kvray down`.
    """
    with boundary(verbose=verbose) as interrupts:
        settings = load_config(config, overrides={"ray.address": address})
        for option, given in (("--port", port is not None), ("--dashboard", dashboard)):
            if given and settings.ray.address is not None:
                raise ConfigError(
                    f"{option} is for a local Ray, but ray.address names the one at"
                    f" {settings.ray.address}; leave one of the two out."
                )
        with interrupts.masked():
            from kvray.actors.tier.launch import preview
            from kvray.actors.tier.rollout import Rollout

        rollout = Rollout(recreate=recreate)
        if plan:
            show_plan(settings, lambda: preview(settings, rollout))
        else:
            carry_out(settings, rollout, interrupts, port=port, dashboard=dashboard, wait=wait)
