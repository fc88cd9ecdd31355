"""`kvray up`: start the tier, and a local Ray for it if there is no cluster."""

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from kvray.cli.boundary import boundary
from kvray.cli.options import AddressOption, ConfigOption, VerboseOption
from kvray.cli.progress import LaunchProgress
from kvray.config import KVRayConfig, format_size, load_config
from kvray.errors import ConfigError

if TYPE_CHECKING:
    from kvray.actors.launch import Launch


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
    verbose: VerboseOption = False,
) -> None:
    """Start the tier and wait until it serves; again is fine.

    Without an address it starts a Ray on this machine, which goes on after this command and ends
    with `kvray down`.
    """
    with boundary(verbose=verbose) as interrupts:
        settings = load_config(config, overrides={"ray.address": address})
        if port is not None and settings.ray.address is not None:
            raise ConfigError(
                f"--port is for a local Ray, but the tier goes on the one at"
                f" {settings.ray.address}; leave one of the two out."
            )
        with interrupts.masked():
            from kvray.actors.launch import bring_up

        console = Console(stderr=True, highlight=False)
        # Held back, a signal is seen at the next report: a Ray half started is not lost sight of.
        with LaunchProgress(console, interrupts) as progress, interrupts.held():
            launch = bring_up(
                settings,
                port=port,
                dashboard=dashboard,
                waiting=progress.waiting,
                report=progress.report,
            )
        _tell(settings, launch)


def _tell(settings: KVRayConfig, launch: "Launch") -> None:
    console = Console(highlight=False, soft_wrap=True)
    verb = "is up" if launch.started_tier else "was up already"
    console.print(f"The tier [bold]{settings.cluster_name}[/] {verb}: {_describe(launch.shards)}.")
    if launch.local is None:
        console.print(f"Ray: {settings.ray.address}")
    else:
        dashboard = f", dashboard at {launch.local.dashboard_url}"
        console.print(
            f"Ray: {launch.local.address} (local{dashboard if launch.local.dashboard_url else ''})"
        )


def _describe(shards: list[dict[str, Any]]) -> str:
    capacity = sum(shard["arena"]["capacity_bytes"] for shard in shards)
    plural = "" if len(shards) == 1 else "s"
    return f"{len(shards)} shard{plural}, {format_size(capacity)}"
