"""All that can be set, with defaults and bounds; kvray.yaml's schema and a table follow from it."""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

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

from kvray.config.values import DURATION, AbsolutePath, Label, Listed, NamespaceName, Seconds, Size

WEIGHTS_VERSION_MAX = 256  # characters
TENANT_NAME = r"[A-Za-z0-9][A-Za-z0-9_.:@-]{0,127}"
"""What a tenant may be called."""

_EVENTS_MIN, _EVENTS_MAX = 16 * 2**20, 256 * 2**20

TenantName = Annotated[str, Field(pattern=rf"^{TENANT_NAME}$")]
NOT_BY_LABEL = ("arena.dir", "arena.lock_wait_s")
"""Settings that engines read too, which do not know what labels Ray has given to their node."""


class _Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,  # the description of each setting
    )

    @model_validator(mode="before")
    @classmethod
    def _take_empty_for_defaults(cls, values: object) -> object:
        """Read a section whose keys are all commented out, which YAML gives as null."""
        return {} if values is None else values


class ArenaConfig(_Section):
    """The shared memory of one node."""

    dir: AbsolutePath = Path("/dev/shm")
    """tmpfs or hugetlbfs mount for the arena, the shared memory of a node's blocks"""
    capacity: Size = 4 * 2**30
    """bytes of blocks that one node keeps in memory"""
    slab: Size = 64 * 2**20
    """piece of the arena that holds blocks of one size"""
    slot_min: Size = 64 * 2**10
    """smallest slot for a block; a smaller one needs larger tables"""
    group: str | None = Field(default=None, coerce_numbers_to_str=True)
    """Unix group, by name or number, whose engines may open arena and socket; none: only those of
    this user"""
    mount: Literal["memory", "any"] = "memory"
    """memory: refuse a new arena on what is no tmpfs, hugetlbfs or ramfs; any: for a trial"""
    numa: Literal["interleave", "local"] = "interleave"
    """interleave: spread the arena over the NUMA nodes; local: keep it on one of them"""
    free_target: float = Field(default=0.05, ge=0, le=0.9)
    """share of the slots that eviction keeps free"""
    policy: Literal["gittins", "lru"] = "gittins"
    """rule that chooses the blocks to evict; `kvray replay` compares them"""
    holders_max: int = Field(default=256, ge=4, le=4096)
    """most processes that may attach to the arena at once"""
    lock_wait_s: Seconds = Field(default=0.002, gt=0, le=1)
    """longest wait for the arena's lock; after it the request is a miss"""
    limbo_s: Seconds = Field(default=30.0, ge=0)
    """how long the slots of a dead writer stay unused: a late copy may still arrive"""
    lease_warn_s: Seconds = Field(default=60.0, gt=0)
    """age at which a warning names a lease that is still held"""
    stopped_s: Seconds = Field(default=30.0, gt=0)
    """how long a stopped process may hold the arena's lock before kvray kills it"""
    namespace_quota: Size | None = None
    """most bytes of a node's arena for the blocks of one namespace; none: no bound"""
    quotas: dict[NamespaceName, Size] = Field(default_factory=dict, max_length=63)
    """the same for single namespaces, named by the first digits of their digest, in quotes"""


class NvmeConfig(_Section):
    """The blocks that a node keeps on a local disk; they outlive every process."""

    dir: AbsolutePath | None = None
    """directory on a local disk for blocks that leave memory; none: no NVMe tier"""
    capacity: Size = 64 * 2**30
    """most bytes of kvray's files on one node's disk"""
    segment: Size = 2**30
    """bytes of blocks in one file"""
    free_reserve: Size = 8 * 2**30
    """bytes of the file system that kvray leaves free"""
    high_watermark: float = Field(default=0.8, gt=0, le=1)
    """share of the arena in use above which the next blocks to evict are written to disk"""
    admission: Literal["likely", "twice", "all"] = "likely"
    """blocks that are written when they leave memory: those the policy expects to come back, those
    found before or leaving for the second time, or all"""
    write_gib_per_day: float | None = Field(default=None, gt=0)
    """most GiB written to disk in any 24 hours; none: no bound"""
    flush_s: Seconds = Field(default=60.0, ge=0)
    """longest time for writing blocks to disk when the tier ends"""
    io_threads: int = Field(default=4, ge=1, le=64)
    """most reads or writes of one call that run at once"""


class ShardConfig(_Section):
    """The actor that owns a node's arena."""

    announce_s: Seconds = Field(default=0.05, gt=0, le=5)
    """how often a shard looks for changes to tell the lookup"""
    heartbeat_s: Seconds = Field(default=0.5, gt=0, le=30)
    """how long a shard without news lets the lookup wait for a reply"""
    silent_s: Seconds = Field(default=1.5, gt=0)
    """time without a reply to the lookup after which nobody asks a shard for blocks"""
    resource: str | None = Field(default=None, min_length=1)
    """Ray resource that a node must have to get a shard; none: every node"""
    label: Label | None = None
    """Ray label key=value that a node must have to get a shard; none: every node"""
    release_idle_s: Seconds | None = Field(default=60.0, gt=0)
    """time after which a shard leaves a node that Ray's autoscaler started and nobody uses, so that
    the autoscaler can end it; none: it stays"""


class LookupConfig(_Section):
    """The actors that know which nodes have which blocks."""

    partitions: int = Field(default=1, ge=1, le=64)
    """number of lookup actors on Ray's head node, each with a share of the blocks; more than one is
    for tiers of hundreds of nodes"""


class StagingConfig(_Section):
    """How blocks of other nodes come here."""

    transports: Annotated[tuple[Literal["nixl", "object_ref"], ...], Listed] = Field(
        default=("nixl", "object_ref"), min_length=1
    )
    """transports between nodes, the best first; two nodes use the first that both have"""
    deadline_s: Seconds = Field(default=10.0, gt=0)
    """longest time to fetch blocks from another node"""
    call_timeout_s: Seconds = Field(default=1.0, gt=0)
    """deadline of a call to another node that moves no blocks"""
    handover_s: Seconds = Field(default=2.0, gt=0)
    """how long a node keeps staged blocks for the engine that asked for them"""
    lease_s: Seconds = Field(default=5.0, gt=0)
    """lease on blocks at the node that sends them, renewed until they have arrived"""
    fetches_max: int = Field(default=4, ge=1, le=1024)
    """most fetches of one node at once"""
    bytes_in_flight: Size = 256 * 2**20
    """most bytes on their way to one node at once"""


class CopiesConfig(_Section):
    """Blocks that several nodes have in memory."""

    share: float = Field(default=0.5, ge=0, le=1)
    """share of a node's arena beyond which its copies of others' blocks go before all else"""
    idle_s: Seconds = Field(default=60.0, gt=0)
    """how long a copy may be unused before it goes before all else"""


class ConnectorConfig(_Section):
    """One replica's connector inside TensorRT-LLM."""

    replica: str | None = None
    """name of the replica in figures and logs; none: host name, process id and a random part"""
    model_key: str | None = Field(default=None, min_length=1)
    """name of model and revision; with it kvray reads no checkpoint to find one"""
    weights_version: str | None = Field(default=None, min_length=1, max_length=WEIGHTS_VERSION_MAX)
    """version of the weights that the engine starts with, where they are replaced while it runs;
    none: the checkpoint's"""
    verify_on_load: Literal["auto", "always", "never"] = "auto"
    """whether loads verify the checksums of blocks; auto: only loads into CPU memory"""
    attach_retry_s: Seconds = Field(default=1.0, gt=0, le=60)
    """how often an engine without an arena looks for one"""
    stage_wait_s: Seconds = Field(default=0.05, ge=0, le=5)
    """longest wait of the engine's scheduler for blocks of other nodes; 0: never"""
    hold: Size = 2**30
    """with vLLM, memory of each rank for blocks that it copies and checks before the promise"""
    saves_max: int = Field(default=256, ge=1, le=65_536)
    """most forward passes whose blocks wait to be stored; blocks of more are dropped"""


class EventsConfig(_Section):
    """KV events for routers; see docs/kv_events.md."""

    port: int | None = Field(default=None, ge=1024, le=65_000)
    """first port of a node's events: each replica has two; none: no events"""
    host: str = Field(default="127.0.0.1", min_length=1)
    """address that events are published on, with the token ids of prompts; 0.0.0.0 or ::, all"""


class SecurityConfig(_Section):
    """Who may do what; see docs/security.md."""

    auth_token_file: AbsolutePath | None = None
    """file with the token that changing and ending the tier ask for; none: no token"""
    tenant_secret_file: AbsolutePath | None = None
    """file, on every node, with the secret that keeps tenants apart; none: no tenants"""
    tenant_quota: Size | None = None
    """most bytes of a node's arena for the blocks of one tenant; none: no bound"""
    tenant_quotas: dict[TenantName, Size] = Field(default_factory=dict, max_length=63)
    """the same for single tenants, by name"""


class TracingConfig(_Section):
    """OpenTelemetry spans of requests; see docs/tracing.md."""

    startup_hook: str | None = Field(default=None, pattern=r"^[\w.]+:\w+$")
    """function, module:name, that sets up the SDK in shards and endpoints; none: Ray's own hook"""


class RayConfig(_Section):
    """How the Ray cluster is reached or started."""

    address: str | None = None
    """host:port of the Ray cluster; none: a local one"""
    timeout_s: Seconds = Field(default=30.0, gt=0)
    """deadline of each Ray call"""


def _part_of(section: type[BaseModel]) -> GetPydanticSchema:
    """Take any part of a section: it is checked as the section is, and holds what it sets only."""

    def given(part: BaseModel) -> dict[str, Any]:
        return {name: getattr(part, name) for name in sorted(part.model_fields_set)}

    def dump(given: dict[str, Any], info: SerializationInfo) -> dict[str, Any]:
        whole = section.model_construct(**given)
        return whole.model_dump(mode=info.mode, include=set(given))

    part = Annotated[section, AfterValidator(given), PlainSerializer(dump)]  # type: ignore[valid-type]
    return GetPydanticSchema(lambda source, handler: handler(part))


class NodeConfig(_Section):
    """What differs on the nodes that have one label."""

    label: Label
    """Ray label key=value of the nodes that this entry is for"""
    arena: Annotated[dict[str, Any], _part_of(ArenaConfig)] = Field(default_factory=dict)
    """arena settings of these nodes; dir and lock_wait_s cannot differ by label"""
    nvme: Annotated[dict[str, Any], _part_of(NvmeConfig)] = Field(default_factory=dict)
    """nvme settings of these nodes"""


class KVRayConfig(_Section):
    """Everything that can be set, with its default."""

    cluster_name: str = Field(default="kvray", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,31}$")
    """name of the tier"""
    arena: ArenaConfig = ArenaConfig()
    nvme: NvmeConfig = NvmeConfig()
    shard: ShardConfig = ShardConfig()
    lookup: LookupConfig = LookupConfig()
    staging: StagingConfig = StagingConfig()
    copies: CopiesConfig = CopiesConfig()
    connector: ConnectorConfig = ConnectorConfig()
    events: EventsConfig = EventsConfig()
    security: SecurityConfig = SecurityConfig()
    tracing: TracingConfig = TracingConfig()
    ray: RayConfig = RayConfig()
    nodes: tuple[NodeConfig, ...] = Field(default=(), max_length=64)
    """settings that differ on some nodes; a later entry wins"""

    @property
    def events_bytes(self) -> int:
        """Bytes that KV events may take beside the arena."""
        share = min(_EVENTS_MAX, max(_EVENTS_MIN, self.arena.capacity // 64))
        return 0 if self.events.port is None else share

    @property
    def node_dir(self) -> Path:
        """Directory of this node's arena, lock and socket files."""
        return self.arena.dir / f"kvray-{self.cluster_name}"

    @property
    def nvme_dir(self) -> Path | None:
        """Directory of this node's blocks on disk, if it is to have any there."""
        return None if self.nvme.dir is None else self.nvme.dir / f"kvray-{self.cluster_name}"


SECTIONS = KVRayConfig.model_fields.keys() - {"cluster_name", "nodes"}


def variable_of(dotted: str) -> str:
    """Return the variable that names a setting."""
    return f"KVRAY_{dotted.upper().replace('.', '__')}"


class SettingRow(NamedTuple):
    """One setting, as tables show it."""

    name: str
    """Dotted."""
    kind: str
    default: str
    description: str


@cache
def json_schema() -> str:
    """Return the schema of a configuration file, as JSON text."""
    schema = KVRayConfig.model_json_schema()
    sections = schema["$defs"]
    defaults = KVRayConfig().model_dump(mode="json")
    _amend(schema["properties"], defaults)
    for name, found in schema["properties"].items():
        if "$ref" in found:
            section = sections[found["$ref"].rpartition("/")[2]]
            _amend(section["properties"], defaults[name])
            # A section whose keys are all commented out is null to YAML.
            schema["properties"][name] = {
                "anyOf": [{"$ref": found["$ref"]}, {"type": "null"}],
                "description": section["description"],
            }
    of_nodes = sections[NodeConfig.__name__]["properties"]
    for dotted in NOT_BY_LABEL:
        name, _, key = dotted.partition(".")
        of_nodes[name].setdefault("properties", {})[key] = False
    schema.pop("title")
    draft = "https://json-schema.org/draft/2020-12/schema"
    schema = {"$schema": draft, "title": "kvray.yaml", **schema}
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


@cache
def setting_rows() -> tuple[SettingRow, ...]:
    """Return every setting, in the order of the schema; those of `nodes` are one."""
    schema = json.loads(json_schema())
    return tuple(_rows(schema["properties"], schema["$defs"], ""))


_BOUNDS = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to"}
_DURATION = {"type": "string", "pattern": f"^{DURATION}$"}


def _amend(properties: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Say what pydantic does not: units of durations, and defaults as one writes them."""
    for name, found in properties.items():
        found.pop("title", None)
        if "description" in found:
            found["description"] = " ".join(found["description"].split())
        if "default" in found or found.get("type") == "object":  # pydantic leaves factories out
            found["default"] = defaults[name]
        if name.endswith("_s"):
            found["description"] += " (seconds)"
            found["examples"] = [defaults[name], "30s"]
            bounds = {key: found.pop(key) for key in ("type", *_BOUNDS) if key in found}
            found["anyOf"] = [*found.get("anyOf", [bounds]), _DURATION]
        if "patternProperties" in found:
            found["additionalProperties"] = False


def _rows(properties: dict[str, Any], sections: dict[str, Any], at: str) -> Iterator[SettingRow]:
    for name, found in properties.items():
        reference = found.get("anyOf", [{}])[0].get("$ref", "").rpartition("/")[2]
        if reference:
            yield from _rows(sections[reference]["properties"], sections, f"{at}{name}.")
        else:
            default = found.get("default", "")
            if not isinstance(default, str):  # as YAML has it
                default = "" if default is None else json.dumps(default)
            says = found.get("description", "")
            yield SettingRow(f"{at}{name}", _kind(found), default, says)


def _kind(found: dict[str, Any]) -> str:
    """Return in words what a value may be."""
    if "anyOf" in found:
        if _DURATION in found["anyOf"]:
            return _kind(found["anyOf"][0]).replace("number", "duration")
        kinds = [_kind(one) for one in found["anyOf"] if one.get("type") != "null"]
        is_size = kinds[0].startswith("whole number from 1 to") and kinds[1:] == ["text"]
        return "size" if is_size else " or ".join(kinds)
    if "enum" in found:
        return ", ".join(found["enum"])
    if found.get("type") in ("integer", "number"):
        kind = "whole number" if found["type"] == "integer" else "number"
        return " ".join([kind, *(f"{_BOUNDS[k]} {found[k]:g}" for k in _BOUNDS if k in found)])
    if found.get("pattern") == "^/":
        return "absolute path"
    kinds_of = {"array": "list", "object": "mapping", "string": "text"}
    return kinds_of[found["type"]]
