"""The settings of a shard, from the configuration."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvray.actors.shard.events.publisher import EventSettings
from kvray.actors.shard.nvme_tier import NvmeSettings
from kvray.config import ArenaConfig, CopiesConfig, KVRayConfig, ShardConfig, StagingConfig
from kvray.identity.tenant import tenant_id
from kvray.store import ArenaSpec
from kvray.store.arena.quotas import name_of
from kvray.store.machine.capacity import MemoryClaims
from kvray.store.nvme import NvmeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSettings:
    """The settings of a shard, some of them worked out for its node."""

    directory: Path
    spec: ArenaSpec
    arena: ArenaConfig
    shard: ShardConfig
    staging: StagingConfig = field(default_factory=StagingConfig)
    copies: CopiesConfig = field(default_factory=CopiesConfig)
    lookup_partitions: int = 1
    quotas: Mapping[str, int] = field(default_factory=dict)
    """Bytes that the blocks of namespaces may take of the arena, see `quotas.set_quotas`."""
    admission: str = "likely"  # decides which evicted blocks are kept on disk
    nvme: NvmeSettings | None = None  # None: the node keeps nothing on disk
    events: EventSettings | None = None  # None: it publishes no KV events
    tenant_secret_file: Path | None = None
    """Has what the salts of prompts that are prefetched are derived with; None: no tenants."""

    @classmethod
    def of(cls, config: KVRayConfig, claims: MemoryClaims | None = None) -> "ShardSettings":
        """Return what a configuration says; `claims` is what Ray takes of the node's memory."""
        return cls(
            directory=config.node_dir,
            spec=ArenaSpec.of(config, claims),
            arena=config.arena,
            shard=config.shard,
            staging=config.staging,
            copies=config.copies,
            lookup_partitions=config.lookup.partitions,
            quotas=_quotas(config),
            admission=config.nvme.admission,
            nvme=_nvme(config),
            events=_events(config),
            tenant_secret_file=config.security.tenant_secret_file,
        )


def _quotas(config: KVRayConfig) -> dict[str, int]:
    """Return bytes by the hex digits that an arena knows namespaces by, or else tenants."""
    arena, security = config.arena, config.security
    for_each = security.tenant_quota or arena.namespace_quota
    named = {name_of(tenant_id(name)): size for name, size in security.tenant_quotas.items()}
    return {**({} if for_each is None else {"": for_each}), **arena.quotas, **named}


def _events(config: KVRayConfig) -> EventSettings | None:
    host, port = config.events.host, config.events.port
    if port is None:
        return None
    return EventSettings(host=host, port=port, bytes_max=config.events_bytes)


def _nvme(config: KVRayConfig) -> NvmeSettings | None:
    nvme = config.nvme
    if config.nvme_dir is None:
        return None
    per_day = nvme.write_gib_per_day
    return NvmeSettings(
        directory=config.nvme_dir,
        spec=NvmeSpec(
            cluster_name=config.cluster_name,
            capacity=nvme.capacity,
            segment=nvme.segment,
            slot_min=config.arena.slot_min,
            free_reserve=nvme.free_reserve,
            io_threads=nvme.io_threads,
            group=config.arena.group,
        ),
        high_watermark=nvme.high_watermark,
        bytes_per_day=None if per_day is None else per_day * 2**30,
        flush_s=nvme.flush_s,
        reads_max=config.staging.fetches_max,
    )
