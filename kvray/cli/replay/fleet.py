"""The options of `kvray replay --replicas N`, and the plan that they make."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvray.errors import ConfigError

if TYPE_CHECKING:
    from kvray.lab.replay.fleet import FleetPlan

DEFAULTS: Mapping[str, int] = {
    **{"pool": 800, "host": 3_000, "speed": 1, "deadline": 5, "imbalance": 10},
    **{"prefill_rate": 12_000, "token_bytes": 163_840},
    **{"copy_rate": 20, "link_rate": 10, "disk_rate": 3},
}
"""docs/replay.md says where they are from."""
_LINK_LATENCY_S = 0.002


def _option(name: str, metavar: str, text: str, **bounds: Any) -> Any:
    return typer.Option(metavar=metavar, help=f"{text} Default: {DEFAULTS[name]}.", **bounds)


def _positive(name: str, metavar: str, text: str) -> Any:
    return _option(name, metavar, text, min=1e-6, max=1e12)


ReplicasOption = Annotated[
    int | None,
    typer.Option(
        **{"min": 1, "max": 512, "metavar": "N"},
        help="Compare routers instead, on N replicas with a node each.",
    ),
]
RouterOption = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="round_robin, pow2, affinity or kvray. Default: all."),
]
PoolOption = Annotated[str | None, _option("pool", "BLOCKS", "Size of a replica's own pool.")]
HostOption = Annotated[str | None, _option("host", "BLOCKS", "The tier's memory of each node.")]
SpeedOption = Annotated[
    float | None, _positive("speed", "X", "Divide the trace's times by X: more load.")
]
DeadlineOption = Annotated[
    float | None, _positive("deadline", "S", "First tokens after S seconds are no goodput.")
]
ImbalanceOption = Annotated[
    int | None,
    _option(
        "imbalance",
        "N",
        "Queues may differ by N before affinity does as pow2.",
        min=0,
        max=1_000_000,
    ),
]
PrefillRateOption = Annotated[
    float | None, _positive("prefill_rate", "TOKENS/S", "Prefill of a replica.")
]
TokenBytesOption = Annotated[
    float | None, _positive("token_bytes", "BYTES", "KV cache of one token.")
]
CopyRateOption = Annotated[
    float | None, _positive("copy_rate", "GB/S", "From a node's memory to its pool.")
]
LinkRateOption = Annotated[float | None, _positive("link_rate", "GB/S", "From node to node.")]
DiskRateOption = Annotated[
    float | None, _positive("disk_rate", "GB/S", "From disk to memory, with --nvme.")
]


def refuse(given: Mapping[str, object], why: str) -> None:
    """Raise ConfigError if one of the options was given."""
    for name, value in given.items():
        if value is not None:
            raise ConfigError(f"--{name.replace('_', '-')} {why}.")


def make_plan(
    replicas: int, given: Mapping[str, Any], *, disk_blocks: int, seed: int
) -> "FleetPlan":
    """Return the plan of the options that were given; for None it takes the default."""
    from kvray.lab.replay.fleet import FleetPlan
    from kvray.routing import Link, Rates

    values = {
        name: default if given[name] is None else given[name] for name, default in DEFAULTS.items()
    }
    return FleetPlan(
        num_replicas=replicas,
        pool_blocks=values["pool"],
        host_blocks=values["host"],
        disk_blocks=disk_blocks,
        speed=values["speed"],
        deadline_s=values["deadline"],
        imbalance_max=values["imbalance"],
        seed=seed,
        rates=Rates(
            prefill_tokens_per_s=values["prefill_rate"],
            token_bytes=values["token_bytes"],
            host=Link(bytes_per_s=1e9 * values["copy_rate"]),
            remote=Link(latency_s=_LINK_LATENCY_S, bytes_per_s=1e9 * values["link_rate"]),
            disk=Link(bytes_per_s=1e9 * values["disk_rate"]) if disk_blocks else None,
        ),
    )
