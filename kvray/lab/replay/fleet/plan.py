"""What is replayed: replicas, their memory, their rates and the load."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvray.routing import Link, Rates


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """Equal replicas, each on a node of its own, and the load that they get."""

    num_replicas: int
    pool_blocks: int
    """Of each replica's own pool."""
    host_blocks: int
    """Of each node's part of the tier."""
    disk_blocks: int = 0
    """Of each node's disk; 0: there is none."""
    rates: Rates
    speed: float = 1.0
    """The trace's times are divided by it."""
    deadline_s: float = 5.0
    """First tokens after it are no goodput."""
    seed: int = 0
    """Of the numbers that routers draw."""
    imbalance_max: int = 10
    """Difference of queue lengths above which `affinity` falls back to `pow2`."""

    def merged(self) -> FleetPlan:
        """Return the plan of one replica with the memory and the prefill rate of all."""
        count, rates = self.num_replicas, self.rates
        return replace(
            self,
            num_replicas=1,
            pool_blocks=count * self.pool_blocks,
            host_blocks=count * self.host_blocks,
            disk_blocks=count * self.disk_blocks,
            rates=replace(
                rates,
                prefill_tokens_per_s=count * rates.prefill_tokens_per_s,
                host=_faster(rates.host, count),
                disk=None if rates.disk is None else _faster(rates.disk, count),
            ),
        )


def _faster(link: Link, times: int) -> Link:
    return replace(link, bytes_per_s=times * link.bytes_per_s)
