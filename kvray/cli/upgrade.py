"""`kvray upgrade`: restart a running tier with the installed code."""

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
from kvray.errors import ShardUnavailable


def upgrade(
    config: ConfigOption = None,
    address: AddressOption = None,
    restart: Annotated[
        bool,
        typer.Option("--all", help="Restart all parts, changed or not.", show_default=False),
    ] = False,
    recreate: RecreateOption = False,
    plan: PlanOption = False,
    verbose: VerboseOption = False,
) -> None:
    """Restart every part that runs other code than its node has installed, node by node.

    Arenas stay, and attached engines go on. Install the new version on every node first. Run the
    command again after an interruption; it continues where it was.
    """
    with boundary(verbose=verbose) as interrupts:
        settings = load_config(config, overrides={"ray.address": address})
        with interrupts.masked():
            from kvray.actors.tier.launch import preview
            from kvray.actors.tier.rollout import Rollout

        rollout = Rollout(upgrade=True, restart=restart, recreate=recreate)
        planned = preview(settings, rollout)
        if planned is None:
            raise ShardUnavailable(
                f"The tier {settings.cluster_name!r} is not running, so there is nothing to"
                " upgrade; start it with `kvray up`."
            )
        if plan:
            show_plan(settings, lambda: planned)
        else:
            carry_out(settings, rollout, interrupts)
