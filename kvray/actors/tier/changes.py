"""Decides which parts of a running tier restart when its settings or its code change; pure.

The table names the parts that read each setting when they start. A part restarts if one of its
settings or its code has changed. The new shard adopts the arena of the old one, so only settings
under `NEW_ARENA` and `ASIDE` cost blocks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from kvray.actors.build_info import BuildInfo, settings_of
from kvray.actors.names import LOOKUP_NAME, MOVER_PREFIX, SHARD_PREFIX, SUPERVISOR_NAME
from kvray.config import KVRayConfig
from kvray.errors import ConfigError

Settings = Mapping[str, Any]
"""Dotted key -> value as in JSON: what another version of kvray can read too."""


class Effect(Enum):
    """What a changed setting needs, in words for `kvray up --plan` and the docs."""

    NOTHING = "nothing restarts: engines and commands read it when they start"
    OTHER_TIER = "refused: it names another tier"
    NODES = "shards start on the nodes that match now, and end on the others"
    LOOKUP = "the lookup restarts, and the shards announce their blocks again"
    MOVER = "movers restart"
    SHARD = "shards restart and keep their arenas"
    SHARD_AND_MOVER = "shards restart and keep their arenas, movers restart"
    AS_NAMED = "the same as each setting named there, on the nodes with that label"
    NEW_ARENA = "needs --recreate: a new arena replaces the old one"
    ASIDE = "needs --recreate: the files on disk are renamed, not read"


EFFECTS: Mapping[str, Effect] = {
    "cluster_name": Effect.OTHER_TIER,
    "arena.dir": Effect.NEW_ARENA,
    "arena.capacity": Effect.NEW_ARENA,
    "arena.slab": Effect.NEW_ARENA,
    "arena.slot_min": Effect.NEW_ARENA,
    "arena.numa": Effect.NEW_ARENA,
    "arena.holders_max": Effect.NEW_ARENA,
    "arena.free_target": Effect.SHARD,
    "arena.policy": Effect.SHARD,
    "arena.lock_wait_s": Effect.MOVER,  # engines have their own
    "arena.limbo_s": Effect.SHARD,
    "arena.lease_warn_s": Effect.SHARD,
    "arena.stopped_s": Effect.SHARD,
    "arena.namespace_quota": Effect.SHARD,
    "arena.quotas": Effect.SHARD,
    "arena.group": Effect.SHARD,
    "nvme.dir": Effect.SHARD,  # the files in the old directory stay there
    "nvme.capacity": Effect.SHARD,
    "nvme.segment": Effect.ASIDE,
    "nvme.free_reserve": Effect.SHARD,
    "nvme.high_watermark": Effect.SHARD,
    "nvme.admission": Effect.SHARD,
    "nvme.write_gib_per_day": Effect.SHARD,
    "nvme.flush_s": Effect.SHARD,
    "nvme.io_threads": Effect.SHARD,
    "shard.announce_s": Effect.SHARD,
    "shard.heartbeat_s": Effect.SHARD,
    "shard.silent_s": Effect.LOOKUP,
    "shard.resource": Effect.NODES,
    "shard.label": Effect.NODES,
    "staging.transports": Effect.MOVER,
    "staging.deadline_s": Effect.SHARD,
    "staging.call_timeout_s": Effect.SHARD_AND_MOVER,
    "staging.handover_s": Effect.SHARD,
    "staging.lease_s": Effect.MOVER,
    "staging.fetches_max": Effect.SHARD_AND_MOVER,
    "staging.bytes_in_flight": Effect.MOVER,
    "nodes": Effect.AS_NAMED,
    "security.auth_token_file": Effect.SHARD,
    "security.tenant_secret_file": Effect.SHARD,
    "security.tenant_quota": Effect.SHARD,
    "security.tenant_quotas": Effect.SHARD,
    "connector.*": Effect.NOTHING,
    "ray.*": Effect.NOTHING,
}

_OF_SHARDS = (Effect.SHARD, Effect.SHARD_AND_MOVER, Effect.NEW_ARENA, Effect.ASIDE)
_COSTS = (Effect.NEW_ARENA, Effect.ASIDE)
_RETIRES_ARENA = ("arena.dir", "arena.numa")
"""A shard replaces an arena of other sizes by itself; with these settings it would not find it."""


def effect_of(setting: str) -> Effect:
    """Return what a change of a setting needs.

    Raises:
        KeyError: `EFFECTS` does not have the setting.
    """
    section = setting.partition(".")[0]
    return EFFECTS[setting] if setting in EFFECTS else EFFECTS[f"{section}.*"]


def on_node(settings: Settings, labels: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings that hold on a node with these labels: a later entry of `nodes` wins."""
    found = dict(settings)
    for entry in settings.get("nodes", ()):
        name, _, value = entry["label"].partition("=")
        if labels.get(name) == value:
            for section in ("arena", "nvme"):
                given = entry.get(section, {})
                found |= {f"{section}.{key}": one for key, one in given.items()}
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One part that is restarted."""

    name: str
    reasons: tuple[str, ...]
    """For people: the settings and the code that have changed."""
    costs: tuple[str, ...] = ()
    """Those of the reasons that cost its blocks."""
    retire: bool = False
    """Whether the arena has to be removed; else the next shard would adopt it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The parts that restart, in order; all others go on as they are."""

    supervisor: Step | None = None
    lookup: Step | None = None
    nodes: tuple[tuple[Step, ...], ...] = ()
    """For each node its shard, then its mover."""
    starts: tuple[str, ...] = ()
    """Ids of nodes that are to have a shard and have none."""
    ends: tuple[str, ...] = ()
    """Ids of nodes that have a shard and are not to have one."""

    @property
    def steps(self) -> list[Step]:
        """All of them, in order."""
        ahead = [step for step in (self.supervisor, self.lookup) if step is not None]
        return [*ahead, *(step for node in self.nodes for step in node)]

    @property
    def costs(self) -> list[str]:
        """The reasons that cost blocks, each once."""
        return list(dict.fromkeys(cost for step in self.steps for cost in step.costs))


def plan(
    running: Mapping[str, BuildInfo],
    settings: Settings,
    *,
    labels: Mapping[str, Mapping[str, str]] | None = None,
    installed: Mapping[str, BuildInfo] | None = None,
    restart: bool = False,
) -> Plan:
    """Decide which parts of a tier restart.

    Args:
        running: actor name -> build info of that part. A part that an interrupted run has already
            restarted needs nothing.
        settings: the new ones.
        labels: node id -> Ray's labels of that node.
        installed: node id -> build info of the code installed there now; None: code is no reason.
        restart: whether all parts restart, changed or not.
    """
    steps = {}
    for name, build in running.items():
        here = (labels or {}).get(build["node_id"], {})
        step = _step(name, build, settings, here, installed, restart)
        if step is not None:
            steps[name] = step
    homes: dict[str, list[Step]] = {}
    for prefix in (SHARD_PREFIX, MOVER_PREFIX):
        for name in sorted(steps):
            if name.startswith(prefix):
                homes.setdefault(name.removeprefix(prefix), []).append(steps[name])
    supervisor = steps.get(SUPERVISOR_NAME)
    return Plan(
        supervisor=supervisor,
        lookup=steps.get(LOOKUP_NAME),
        nodes=tuple(tuple(homes[home]) for home in sorted(homes)),
    )


def check_costs(planned: Plan, *, recreate: bool) -> None:
    """Refuse a plan that costs blocks, unless that is meant.

    Raises:
        ConfigError: the plan costs blocks; the message names each reason.
    """
    if planned.costs and not recreate:
        raise ConfigError(
            f"This drops the blocks of each node that it concerns: {'; '.join(planned.costs)}."
            " Undo it, or use --recreate; with an NVMe tier, blocks that are only in memory are"
            " first written to disk."
        )


def _step(
    name: str,
    build: BuildInfo,
    settings: Settings,
    labels: Mapping[str, str],
    installed: Mapping[str, BuildInfo] | None,
    restart: bool,
) -> Step | None:
    before = build["settings"]
    if name.startswith((SHARD_PREFIX, MOVER_PREFIX)):
        before, settings = on_node(before, labels), on_node(settings, labels)
    changed = [setting for setting in _differences(before, settings) if _takes(name, setting)]
    reasons = [_change(setting, before, settings) for setting in changed]
    costs = [
        reason
        for setting, reason in zip(changed, reasons, strict=True)
        if name.startswith(SHARD_PREFIX) and effect_of(setting) in _COSTS
    ]
    now = None if installed is None else installed.get(build["node_id"])
    if now is not None and now["code"] != build["code"]:
        reasons.append(_new_code(build, now))
        if name.startswith(SHARD_PREFIX) and now["arena_format"] != build["arena_format"]:
            was, is_now = build["arena_format"], now["arena_format"]
            costs.append(f"the arena's format is {is_now} now and was {was}")
    if build.get("state") == "failed":
        reasons.append("it has failed")
    if restart and not reasons:
        reasons.append("asked for")
    if not reasons:
        return None
    retire = any(setting in _RETIRES_ARENA for setting in changed)
    return Step(
        name=name,
        reasons=tuple(reasons),
        costs=tuple(costs),
        retire=retire and name.startswith(SHARD_PREFIX),
    )


def _takes(name: str, setting: str) -> bool:
    """Return whether the part of that name reads the setting when it starts."""
    effect = effect_of(setting)
    if name == LOOKUP_NAME:
        return effect is Effect.LOOKUP
    if name.startswith(SHARD_PREFIX):
        return effect in _OF_SHARDS
    if name.startswith(MOVER_PREFIX):
        # It finds a new arena in the same directory by itself.
        return effect in (Effect.MOVER, Effect.SHARD_AND_MOVER) or setting == "arena.dir"
    return effect not in (Effect.NOTHING, Effect.OTHER_TIER)  # the supervisor starts all others


def _differences(before: Settings, settings: Settings) -> list[str]:
    """Return the settings that differ; a setting that is new to the part had its default."""
    known = {**settings_of(KVRayConfig()), **before}
    return [name for name, value in settings.items() if known[name] != value]


def _change(setting: str, before: Settings, settings: Settings) -> str:
    default = settings_of(KVRayConfig())[setting]
    return f"{setting} is {settings[setting]} now and was {before.get(setting, default)}"


def _new_code(build: BuildInfo, now: BuildInfo) -> str:
    if now["version"] == build["version"]:
        return f"the installed code of kvray {now['version']} has changed"
    return f"kvray is {now['version']} now and was {build['version']}"
