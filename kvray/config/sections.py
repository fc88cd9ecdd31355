"""Everything that can be set, with its default, its bounds and what it is."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetPydanticSchema,
    PlainSerializer,
    SerializationInfo,
    model_validator,
)

from kvray.config.sizes import Size
from kvray.config.values import AbsolutePath, Label, Listed, NamespaceName, Seconds

TENANT_NAME = r"[A-Za-z0-9][A-Za-z0-9_.:@-]{0,127}"
"""What a tenant may be called."""

TenantName = Annotated[str, Field(pattern=rf"^{TENANT_NAME}$")]


class _Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _take_empty_for_defaults(cls, values: object) -> object:
        """Read a section whose keys are all commented out, which YAML gives as null."""
        return {} if values is None else values


class ArenaConfig(_Section):
    """The shared memory of one node."""

    dir: AbsolutePath = Field(
        default=Path("/dev/shm"), description="tmpfs or hugetlbfs mount that holds the arena"
    )
    capacity: Size = Field(default=4 * 2**30, description="bytes of blocks per node")
    slab: Size = Field(default=64 * 2**20, description="unit in which block sizes share it")
    slot_min: Size = Field(default=64 * 2**10, description="smallest slot; bounds the tables")
    group: str | None = Field(
        default=None,
        coerce_numbers_to_str=True,
        description="Unix group, by name or number, whose members' engines may open arena and"
        " socket too; none: those of the same user only",
    )
    numa: Literal["interleave", "local"] = Field(
        default="interleave", description="over the NUMA nodes, or on the one that makes it"
    )
    free_target: float = Field(
        default=0.05, ge=0, le=0.9, description="share of the slots kept free by evicting ahead"
    )
    policy: Literal["gittins", "s3fifo", "lru"] = Field(
        default="gittins", description="what decides which blocks go first; see kvray replay"
    )
    holders_max: int = Field(default=256, ge=4, le=4096, description="processes attached at once")
    lock_wait_s: Seconds = Field(
        default=0.002, gt=0, le=1, description="longest try for the arena's lock; then a miss"
    )
    limbo_s: Seconds = Field(
        default=30.0, ge=0, description="how long a dead writer's slots wait before reuse"
    )
    lease_warn_s: Seconds = Field(
        default=60.0, gt=0, description="leases older than this are named"
    )
    stopped_s: Seconds = Field(
        default=30.0,
        gt=0,
        description="how long a stopped process may keep the arena's lock; then it is ended",
    )
    namespace_quota: Size | None = Field(
        default=None, description="bytes that the blocks of one namespace may take; none: no bound"
    )
    quotas: dict[NamespaceName, Size] = Field(
        default_factory=dict,
        max_length=63,
        description="the same for namespaces named by the start of their digest, in quotes",
    )


class NvmeConfig(_Section):
    """The blocks that a node keeps on a local disk; they outlive every process."""

    dir: AbsolutePath | None = Field(
        default=None, description="directory on a local disk for the blocks; none: no NVMe tier"
    )
    capacity: Size = Field(default=64 * 2**30, description="bytes of files per node, at most")
    segment: Size = Field(default=2**30, description="bytes of blocks in one file")
    free_reserve: Size = Field(
        default=8 * 2**30, description="bytes of the file system that are left to others"
    )
    high_watermark: float = Field(
        default=0.8,
        gt=0,
        le=1,
        description="share of the arena in use above which what goes next is written to disk",
    )
    admission: Literal["likely", "twice", "all"] = Field(
        default="likely", description="which of the blocks that leave the arena are written"
    )
    write_gib_per_day: float | None = Field(
        default=None, gt=0, description="most that is written in any 24 hours; none: any number"
    )
    flush_s: Seconds = Field(
        default=60.0, ge=0, description="longest time that the end of a tier writes to disk"
    )
    io_threads: int = Field(default=4, ge=1, le=64, description="transfers that one call has")


class ShardConfig(_Section):
    """The actor that owns a node's arena."""

    announce_s: Seconds = Field(default=0.05, gt=0, le=5, description="lag of announcements")
    heartbeat_s: Seconds = Field(default=0.5, gt=0, le=30, description="heartbeat to the lookup")
    silent_s: Seconds = Field(
        default=1.5, gt=0, description="a shard unheard of for longer is not asked for blocks"
    )
    resource: str | None = Field(
        default=None,
        min_length=1,
        description="Ray resource a node must have to get a shard; none: every node",
    )
    label: Label | None = Field(
        default=None,
        description="Ray label key=value a node must have to get a shard; none: every node",
    )


class StagingConfig(_Section):
    """How blocks of other nodes come here."""

    transports: Annotated[tuple[Literal["nixl", "object_ref"], ...], Listed] = Field(
        default=("nixl", "object_ref"),
        min_length=1,
        description="ways between nodes, the best first; the first that both ends have is taken",
    )
    deadline_s: Seconds = Field(default=10.0, gt=0, description="longest time a fetch may take")
    call_timeout_s: Seconds = Field(
        default=1.0, gt=0, description="deadline of a call to another node that moves no blocks"
    )
    handover_s: Seconds = Field(
        default=2.0, gt=0, description="how long staged blocks are kept for whoever asked"
    )
    lease_s: Seconds = Field(
        default=5.0, gt=0, description="lease at the holder; renewed while blocks are on their way"
    )
    fetches_max: int = Field(default=4, ge=1, le=1024, description="fetches of a node at once")
    bytes_in_flight: Size = Field(
        default=256 * 2**20, description="bytes on their way to a node at once"
    )


class ConnectorConfig(_Section):
    """One replica's connector inside TensorRT-LLM."""

    replica: str | None = Field(default=None, description="name of the replica; else host-pid")
    model_key: str | None = Field(
        default=None,
        min_length=1,
        description="names model and revision; then no checkpoint is read or waited for",
    )
    verify_on_load: Literal["auto", "always", "never"] = Field(
        default="auto", description="check checksums of loaded blocks; auto: when loading to CPU"
    )
    load: Literal["sync", "async"] = Field(
        default="sync",
        description="async: requests wait while their blocks are made ready, others go on",
    )
    park_lease_s: Seconds = Field(
        default=30.0,
        gt=0,
        description="how long a request that may go on keeps its blocks; later it stops the engine",
    )
    attach_retry_s: Seconds = Field(
        default=1.0, gt=0, le=60, description="how often an engine without an arena looks again"
    )
    stage_wait_s: Seconds = Field(
        default=0.05,
        ge=0,
        le=5,
        description="longest wait of the engine's scheduler for blocks of other nodes; 0: never",
    )
    saves_max: int = Field(
        default=256, ge=1, le=65_536, description="passes whose saves may wait; more are dropped"
    )


class SecurityConfig(_Section):
    """Who may do what; see docs/security.md."""

    auth_token_file: AbsolutePath | None = Field(
        default=None,
        description="file with the token that clearing and ending the tier ask for; none: no token",
    )
    tenant_secret_file: AbsolutePath | None = Field(
        default=None,
        description="file, on every node, with the secret that keeps tenants apart; none: no"
        " tenants",
    )
    tenant_quota: Size | None = Field(
        default=None, description="bytes of a node's arena that one tenant may take; none: no bound"
    )
    tenant_quotas: dict[TenantName, Size] = Field(
        default_factory=dict, max_length=63, description="the same for tenants by their names"
    )


class RayConfig(_Section):
    """How the Ray cluster is reached or started."""

    address: str | None = Field(default=None, description="GCS address; none: a local cluster")
    timeout_s: Seconds = Field(default=30.0, gt=0, description="deadline of each Ray call")


def _given(section: BaseModel) -> dict[str, Any]:
    """Return what a section sets, without its defaults."""
    return {name: getattr(section, name) for name in sorted(section.model_fields_set)}


def _part_of(section: type[BaseModel]) -> GetPydanticSchema:
    """Take any part of a section: it is checked as the section is, and holds what it sets only."""

    def dump(given: dict[str, Any], info: SerializationInfo) -> dict[str, Any]:
        whole = section.model_construct(**given)
        return whole.model_dump(mode=info.mode, include=set(given))

    part = Annotated[section, AfterValidator(_given), PlainSerializer(dump)]  # type: ignore[valid-type]
    return GetPydanticSchema(lambda source, handler: handler(part))


class NodeConfig(_Section):
    """What differs on the nodes that have one label."""

    label: Label = Field(description="Ray label key=value of the nodes that are meant")
    arena: Annotated[dict[str, Any], _part_of(ArenaConfig)] = Field(
        default_factory=dict, description="settings of arena there; dir and lock_wait_s cannot be"
    )
    nvme: Annotated[dict[str, Any], _part_of(NvmeConfig)] = Field(
        default_factory=dict, description="settings of nvme there"
    )


class KVRayConfig(_Section):
    """Everything that can be set, with its default."""

    cluster_name: str = Field(
        default="kvray", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,31}$", description="names the tier"
    )
    arena: ArenaConfig = ArenaConfig()
    nvme: NvmeConfig = NvmeConfig()
    shard: ShardConfig = ShardConfig()
    staging: StagingConfig = StagingConfig()
    connector: ConnectorConfig = ConnectorConfig()
    security: SecurityConfig = SecurityConfig()
    ray: RayConfig = RayConfig()
    nodes: tuple[NodeConfig, ...] = Field(
        default=(), max_length=64, description="what differs on some nodes; a later entry wins"
    )

    @model_validator(mode="after")
    def _have_quotas_of_one_kind(self) -> "KVRayConfig":
        """Blocks count for their tenant or, without tenants, for their namespace."""
        arena, security = self.arena, self.security
        if security.tenant_secret_file is None:
            if security.tenant_quota or security.tenant_quotas:
                raise ValueError(
                    "security.tenant_quota and security.tenant_quotas need"
                    " security.tenant_secret_file; set it too"
                )
        elif arena.namespace_quota or arena.quotas:
            raise ValueError(
                "with security.tenant_secret_file blocks count for tenants, not for namespaces;"
                " set security.tenant_quota in place of arena.namespace_quota and arena.quotas"
            )
        return self

    @property
    def node_dir(self) -> Path:
        """Directory of this node's arena, lock and socket files."""
        return self.arena.dir / f"kvray-{self.cluster_name}"

    @property
    def nvme_dir(self) -> Path | None:
        """Directory of this node's blocks on disk, if it is to have any there."""
        return None if self.nvme.dir is None else self.nvme.dir / f"kvray-{self.cluster_name}"
