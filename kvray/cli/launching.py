"""What `kvray up` and `kvray upgrade` share: showing a plan, carrying it out, saying what is up."""

from typing import TYPE_CHECKING, Any

from rich.console import Console

from kvray.cli.interrupts import Interrupts
from kvray.cli.progress import LaunchProgress
from kvray.config import KVRayConfig, format_size

if TYPE_CHECKING:
    from kvray.actors.changes import Plan
    from kvray.actors.launch import Launch
    from kvray.actors.rollout import Rollout


def show_plan(settings: KVRayConfig, planned: "Plan | None") -> None:
    """Print what would be done, and do nothing."""
    console, name = _console(), settings.cluster_name
    if planned is None:
        where = "" if settings.ray.address else ", with a Ray on this machine"
        console.print(f"The tier {name} is not running: it would be started{where}.")
        return
    for step in planned.steps:
        console.print(f"{step.name} would be made anew: {'; '.join(step.reasons)}.")
    for node_id in planned.starts:
        console.print(f"Node {node_id[:12]} would get a shard.")
    for node_id in planned.ends:
        console.print(f"The shard of node {node_id[:12]} would end, and its blocks in memory go.")
    if planned.costs:
        console.print(f"Blocks go, so it takes --recreate: {'; '.join(planned.costs)}.")
    if not (planned.steps or planned.starts or planned.ends):
        console.print(f"The tier {name} is as it should be: nothing would be done.")


def carry_out(
    settings: KVRayConfig,
    rollout: "Rollout",
    interrupts: Interrupts,
    *,
    port: int | None = None,
    dashboard: bool = False,
    wait: bool = True,
) -> None:
    """Bring the tier up as `settings` say, and say what was done.

    Raises:
        KVRayError: as `bring_up`.
    """
    with interrupts.masked():
        from kvray.actors.launch import bring_up

    console = _console()
    done: list[str] = []

    def tell(sentence: str) -> None:
        done.append(sentence)
        console.print(sentence)

    # Held back, a signal is seen at the next report: a Ray half started is not lost sight of.
    progress = LaunchProgress(Console(stderr=True, highlight=False), interrupts)
    with progress, interrupts.held():
        launch = bring_up(
            settings,
            port=port,
            dashboard=dashboard,
            waiting=progress.waiting,
            report=progress.report,
            wait=wait,
            rollout=rollout,
            told=tell,
        )
    _tell(console, settings, launch, has_changed=launch.started_tier or bool(done))


def _tell(console: Console, settings: KVRayConfig, launch: "Launch", *, has_changed: bool) -> None:
    verb = "is up" if has_changed else "was up already"
    console.print(f"The tier [bold]{settings.cluster_name}[/] {verb}: {_describe(launch.shards)}.")
    if launch.local is None:
        console.print(f"Ray: {settings.ray.address}")
    else:
        dashboard = f", dashboard at {launch.local.dashboard_url}"
        console.print(
            f"Ray: {launch.local.address} (local{dashboard if launch.local.dashboard_url else ''})"
        )


def _describe(shards: list[dict[str, Any]]) -> str:
    serving = [shard for shard in shards if shard["state"] == "serving"]
    capacity = sum(shard["arena"]["capacity_bytes"] for shard in serving)
    plural = "" if len(serving) == 1 else "s"
    rest = f", {len(shards) - len(serving)} to come" if len(shards) > len(serving) else ""
    return f"{len(serving)} shard{plural}, {format_size(capacity)}{rest}"


def _console() -> Console:
    return Console(highlight=False, soft_wrap=True)
