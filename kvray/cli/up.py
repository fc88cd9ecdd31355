"""`kvray up`: start the tier, and a local Ray for it if there is no cluster."""

from typing import Annotated

import typer

from kvray.cli.boundary import boundary
from kvray.cli.launching import carry_out, show_plan
from kvray.cli.options import (
    AddressOption,
    ConfigOption,
    PlanOption,
    RecreateOption,
    VerboseOption,
)
from kvray.config import load_config
from kvray.errors import ConfigError


def up(
    config: ConfigOption = None,
    address: AddressOption = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            help="Port of the local Ray's head; else a free one.",
            show_default=False,
        ),
    ] = None,
    dashboard: Annotated[
        bool, typer.Option(help="Start the local Ray with its dashboard.")
    ] = False,
    wait: Annotated[
        bool,
        typer.Option(
            help="Wait until every node that is meant has its shard; without, nodes may join later."
        ),
    ] = True,
    recreate: RecreateOption = False,
    plan: PlanOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Start the tier and wait until it serves; again is fine.

    A tier that runs with other settings is brought to these, one node after the other, with its
    arenas kept. Without an address it starts a Ray on this machine, which goes on after this
    command and ends with `kvray down`.
    """
    with boundary(verbose=verbose) as interrupts:
        settings = load_config(config, overrides={"ray.address": address})
        if port is not None and settings.ray.address is not None:
            raise ConfigError(
                f"--port is for a local Ray, but the tier goes on the one at"
                f" {settings.ray.address}; leave one of the two out."
            )
        with interrupts.masked():
            from kvray.actors.launch import preview
            from kvray.actors.rollout import Rollout

        rollout = Rollout(recreate=recreate)
        if plan:
            show_plan(settings, preview(settings, rollout))
        else:
            carry_out(settings, rollout, interrupts, port=port, dashboard=dashboard, wait=wait)
