"""`kvray upgrade`: have a tier that runs go on with the code that is installed now."""

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
from kvray.errors import ShardUnavailable


def upgrade(
    config: ConfigOption = None,
    address: AddressOption = None,
    restart: Annotated[
        bool,
        typer.Option("--all", help="Also parts whose code has not changed.", show_default=False),
    ] = False,
    recreate: RecreateOption = False,
    plan: PlanOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Make anew what runs other code than its node has installed, one node after the other.

    Arenas are kept, and engines that are attached go on. Install the new version on every node
    first. Interrupted, it goes on where it was when it is run again.
    """
    with boundary(verbose=verbose) as interrupts:
        settings = load_config(config, overrides={"ray.address": address})
        with interrupts.masked():
            from kvray.actors.launch import preview
            from kvray.actors.rollout import Rollout

        rollout = Rollout(upgrade=True, restart=restart, recreate=recreate)
        planned = preview(settings, rollout)
        if planned is None:
            raise ShardUnavailable(
                f"The tier {settings.cluster_name!r} is not running, so there is nothing to"
                " upgrade; start it with `kvray up`."
            )
        if plan:
            show_plan(settings, planned)
        else:
            carry_out(settings, rollout, interrupts)
