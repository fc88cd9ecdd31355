"""What a running tier has to do when its settings or its code change: decisions, no more.

Every setting says here which parts take it when they start. A part is made anew if one of its own
settings or its code is another now, and a shard takes its arena over from the process before: so
nothing that is not named under `NEW_ARENA` or `ASIDE` costs a block.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from pydantic import BaseModel

from kvray.actors.ray_calls import LOOKUP_NAME, MOVER_PREFIX, SHARD_PREFIX, SUPERVISOR_NAME
from kvray.config import KVRayConfig
from kvray.errors import ConfigError

Settings = Mapping[str, Any]
"""Dotted key -> value as in JSON: what another version of kvray can read too."""

Vintage = Mapping[str, Any]
"""What a part was made with: "settings", "code", "version", "arena_format", "node_id", and "state"
of a shard."""


class Effect(Enum):
    """What another value of a setting takes, in words for `kvray up --plan` and the docs."""

    NOTHING = "nothing of the tier: engines and commands read it when they start"
    OTHER_TIER = "refused: it names another tier"
    NODES = "shards start where nodes are meant now, and end where they are not"
    LOOKUP = "the lookup starts anew and hears from the shards what they have"
    MOVER = "movers restart"
    SHARD = "shards restart and keep their arenas"
    SHARD_AND_MOVER = "shards restart and keep their arenas, movers restart"
    AS_NAMED = "on the nodes with that label, what each setting named there takes"
    NEW_ARENA = "needs --recreate: a new arena in place of the one that is there"
    ASIDE = "needs --recreate: the files on disk are put aside"


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
    "arena.namespace_quota": Effect.SHARD,
    "arena.quotas": Effect.SHARD,
    "arena.group": Effect.SHARD,
    "nvme.dir": Effect.SHARD,  # what is in the old directory stays there
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
_MADE_ANEW_ELSEWHERE = ("arena.dir", "arena.numa")
"""A shard that finds an arena of other sizes replaces it by itself; of these it knows nothing."""


def effect_of(setting: str) -> Effect:
    """Return what another value of a setting takes.

    Raises:
        KeyError: nobody has decided that yet; `EFFECTS` is the place.
    """
    section = setting.partition(".")[0]
    return EFFECTS[setting] if setting in EFFECTS else EFFECTS[f"{section}.*"]


def settings_of(config: KVRayConfig) -> dict[str, Any]:
    """Return the configuration as dotted key -> plain value."""
    values = config.model_dump(mode="json")
    found: dict[str, Any] = {}
    for name in type(config).model_fields:
        if isinstance(getattr(config, name), BaseModel):
            found |= {f"{name}.{key}": value for key, value in values[name].items()}
        else:
            found[name] = values[name]
    return found


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
    """One part that is made anew."""

    name: str
    reasons: tuple[str, ...]
    """For people: which settings, which code."""
    costs: tuple[str, ...] = ()
    """Those of the reasons for which its blocks go."""
    retire: bool = False
    """Whether the arena has to be removed, because the next shard would take it over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is made anew, in this order; what is in no step goes on as it is."""

    supervisor: Step | None = None
    lookup: Step | None = None
    nodes: tuple[tuple[Step, ...], ...] = ()
    """One node after the other: its shard, then its mover."""
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
        """For what blocks go, each once."""
        return list(dict.fromkeys(cost for step in self.steps for cost in step.costs))


def plan(
    vintages: Mapping[str, Vintage],
    wanted: Settings,
    *,
    labels: Mapping[str, Mapping[str, str]] | None = None,
    installed: Mapping[str, Vintage] | None = None,
    restart: bool = False,
) -> Plan:
    """Decide which parts of a tier are made anew.

    Args:
        vintages: actor name -> what that part was made with. What was made anew already, by a
            run before this one that was interrupted, needs nothing.
        wanted: the settings that are to hold.
        labels: node id -> Ray's labels of that node.
        installed: node id -> "code", "version" and "arena_format" as installed there now; None:
            code is no reason.
        restart: whether all parts are made anew whatever they were made with.
    """
    steps = {}
    for name, vintage in vintages.items():
        here = (labels or {}).get(vintage["node_id"], {})
        step = _step(name, vintage, wanted, here, installed, restart)
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
    """Refuse a plan for which blocks go, unless that is meant.

    Raises:
        ConfigError: it names each reason.
    """
    if planned.costs and not recreate:
        raise ConfigError(
            f"For this the blocks of every node that it concerns go: {'; '.join(planned.costs)}."
            " Set it back, or say --recreate: with an NVMe tier what is in memory only is written"
            " to disk before."
        )


def _step(
    name: str,
    vintage: Vintage,
    wanted: Settings,
    labels: Mapping[str, str],
    installed: Mapping[str, Vintage] | None,
    restart: bool,
) -> Step | None:
    before = vintage["settings"]
    if name.startswith((SHARD_PREFIX, MOVER_PREFIX)):
        before, wanted = on_node(before, labels), on_node(wanted, labels)
    changed = [setting for setting in _differences(before, wanted) if _takes(name, setting)]
    reasons = [_change(setting, before, wanted) for setting in changed]
    costs = [
        reason
        for setting, reason in zip(changed, reasons, strict=True)
        if name.startswith(SHARD_PREFIX) and effect_of(setting) in _COSTS
    ]
    now = None if installed is None else installed.get(vintage["node_id"])
    if now is not None and now["code"] != vintage["code"]:
        reasons.append(_new_code(vintage, now))
        if name.startswith(SHARD_PREFIX) and now["arena_format"] != vintage["arena_format"]:
            was, is_now = vintage["arena_format"], now["arena_format"]
            costs.append(f"the arena's format is {is_now} now and was {was}")
    if vintage.get("state") == "failed":
        reasons.append("it has failed")
    if restart and not reasons:
        reasons.append("asked for")
    if not reasons:
        return None
    retire = any(setting in _MADE_ANEW_ELSEWHERE for setting in changed)
    return Step(
        name=name,
        reasons=tuple(reasons),
        costs=tuple(costs),
        retire=retire and name.startswith(SHARD_PREFIX),
    )


def _takes(name: str, setting: str) -> bool:
    """Whether the part of that name was made with the setting."""
    effect = effect_of(setting)
    if name == LOOKUP_NAME:
        return effect is Effect.LOOKUP
    if name.startswith(SHARD_PREFIX):
        return effect in _OF_SHARDS
    if name.startswith(MOVER_PREFIX):
        # Another arena of the same directory it finds by itself.
        return effect in (Effect.MOVER, Effect.SHARD_AND_MOVER) or setting == "arena.dir"
    return effect not in (Effect.NOTHING, Effect.OTHER_TIER)  # the supervisor makes all the others


def _differences(before: Settings, wanted: Settings) -> list[str]:
    """Return the settings that differ; one that the part did not know yet had its default."""
    known = {**settings_of(KVRayConfig()), **before}
    return [name for name, value in wanted.items() if known[name] != value]


def _change(setting: str, before: Settings, wanted: Settings) -> str:
    default = settings_of(KVRayConfig())[setting]
    return f"{setting} is {wanted[setting]} now and was {before.get(setting, default)}"


def _new_code(vintage: Vintage, now: Vintage) -> str:
    if now["version"] == vintage["version"]:
        return f"the installed code of kvray {now['version']} has changed"
    return f"kvray is {now['version']} now and was {vintage['version']}"
