"""The common part of `kvray up` and `kvray upgrade`: show a plan, or carry it out."""

from typing import TYPE_CHECKING, Any

from rich.console import Console

from kvray.config import KVRayConfig, format_size
from kvray.console.interrupts import Interrupts
from kvray.console.output import printer
from kvray.console.progress import LaunchProgress

if TYPE_CHECKING:
    from kvray.actors.tier.changes import Plan
    from kvray.actors.tier.launch import Launch
    from kvray.actors.tier.rollout import Rollout


def show_plan(settings: KVRayConfig, planned: "Plan | None") -> None:
    """Print the changes that would be made."""
    console, name = _console(), settings.cluster_name
    if planned is None:
        where = "" if settings.ray.address else ", with a Ray on this machine"
        console.print(f"The tier {name} is not running. It would be started{where}.")
        return
    for step in planned.steps:
        console.print(f"{step.name} would be restarted: {'; '.join(step.reasons)}.")
    for node_id in planned.starts:
        console.print(f"Node {node_id[:12]} would get a shard.")
    for node_id in planned.ends:
        console.print(
            f"The shard of node {node_id[:12]} would end, and its blocks in memory would be lost."
        )
    if planned.costs:
        console.print(
            f"Blocks would be lost, so this needs --recreate: {'; '.join(planned.costs)}."
        )
    if not (planned.steps or planned.starts or planned.ends):
        console.print(f"The tier {name} is up to date. Nothing would be done.")


def carry_out(
    settings: KVRayConfig,
    rollout: "Rollout",
    interrupts: Interrupts,
    *,
    port: int | None = None,
    dashboard: bool = False,
    wait: bool = True,
) -> None:
    """Bring the tier up as `settings` say, and report each step."""
    with interrupts.masked():
        from kvray.actors.tier.launch import bring_up
        from kvray.actors.tier.rollout import Observer

    console = _console()
    done: list[str] = []

    def tell(sentence: str) -> None:
        done.append(sentence)
        console.print(sentence)

    # A signal waits for the next report, so that a half-started Ray is not left behind.
    progress = LaunchProgress(printer(is_error=True), interrupts)
    with progress, interrupts.held():
        launch = bring_up(
            settings,
            port=port,
            dashboard=dashboard,
            observer=Observer(waiting=progress.waiting, report=progress.report, told=tell),
            wait=wait,
            rollout=rollout,
        )
    if not launch.started_ray and (port is not None or dashboard):
        console.print(
            "--port and --dashboard apply when Ray starts, but it ran already. To change them, run"
            " `kvray down` first."
        )
    _tell(console, settings, launch, has_changed=launch.started_tier or bool(done))


def _tell(console: Console, settings: KVRayConfig, launch: "Launch", *, has_changed: bool) -> None:
    verb = "is up" if has_changed else "was up already"
    console.print(f"The tier {settings.cluster_name} {verb}: {_describe(launch.shards)}.")
    for sentence in _about_disks(launch.shards):
        console.print(sentence)
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


def _about_disks(shards: list[dict[str, Any]]) -> list[str]:
    """Return what is wrong or doubtful about the nodes' disks; equal sentences once."""
    disks = [shard["nvme"] for shard in shards if "nvme" in shard]
    found = [text for disk in disks for text in (disk["message"], *disk.get("remarks", ())) if text]
    return list(dict.fromkeys(found))


def _console() -> Console:
    return printer(soft_wrap=True)
