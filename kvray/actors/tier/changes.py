"""Decides which parts of a running tier restart when its settings or its code change; pure.

A table says which parts read a setting when they start. A part restarts if one of its settings or
its code has changed. The new shard adopts the arena of the old one, so only `NEW_ARENA` and `ASIDE`
cost blocks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from kvray.actors.build_info import BuildInfo, settings_of
from kvray.actors.names import MOVER_PREFIX, SHARD_PREFIX, is_lookup
from kvray.config import KVRayConfig
from kvray.errors import ConfigError

Settings = Mapping[str, Any]
"""Dotted key -> value as in JSON, which another version of kvray can read."""


class Effect(Enum):
    """The consequence of a changed setting, in the words of docs/launch.md."""

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


EFFECTS: Mapping[str, Effect] = {  # `section.*`: the settings of it that are not named
    "cluster_name": Effect.OTHER_TIER,
    "arena.dir": Effect.NEW_ARENA,
    "arena.capacity": Effect.NEW_ARENA,
    "arena.slab": Effect.NEW_ARENA,
    "arena.slot_min": Effect.NEW_ARENA,
    "arena.numa": Effect.NEW_ARENA,
    "arena.holders_max": Effect.NEW_ARENA,
    "arena.lock_wait_s": Effect.MOVER,  # engines have their own
    "arena.*": Effect.SHARD,
    "nvme.segment": Effect.ASIDE,
    "nvme.*": Effect.SHARD,  # the files in an old nvme.dir stay there
    "lookup.*": Effect.SHARD,  # the supervisor starts and ends the partitions
    "shard.silent_s": Effect.LOOKUP,
    "shard.resource": Effect.NODES,
    "shard.label": Effect.NODES,
    "shard.release_idle_s": Effect.NODES,
    "shard.*": Effect.SHARD,
    "staging.transports": Effect.MOVER,
    "staging.lease_s": Effect.MOVER,
    "staging.bytes_in_flight": Effect.MOVER,
    "staging.call_timeout_s": Effect.SHARD_AND_MOVER,
    "staging.fetches_max": Effect.SHARD_AND_MOVER,
    "staging.*": Effect.SHARD,
    "copies.*": Effect.SHARD,
    "nodes": Effect.AS_NAMED,
    "security.*": Effect.SHARD,
    "tracing.*": Effect.SHARD,
    "events.*": Effect.SHARD,
    "connector.*": Effect.NOTHING,
    "ray.*": Effect.NOTHING,
}

_OF_SHARDS = (Effect.SHARD, Effect.SHARD_AND_MOVER, Effect.NEW_ARENA, Effect.ASIDE)
_COSTS = (Effect.NEW_ARENA, Effect.ASIDE)
_RETIRES_ARENA = ("arena.dir", "arena.numa")
"""A shard replaces an arena of other sizes itself, but does not find it after these changes."""


def effect_of(setting: str) -> Effect:
    """Return the consequence of a change of `setting`."""
    section = setting.partition(".")[0]
    return EFFECTS[setting] if setting in EFFECTS else EFFECTS[f"{section}.*"]


def on_node(settings: Settings, labels: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings of a node with these labels: a later entry of `nodes` wins."""
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
    """One part that restarts."""

    name: str
    reasons: tuple[str, ...]
    """For people: the settings and the code that have changed."""
    costs: tuple[str, ...] = ()
    """Those of the reasons that cost its blocks."""
    retire: bool = False
    """Whether to remove the arena, which the next shard would adopt otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The parts that restart, in order; all others go on as they are."""

    steps: tuple[Step, ...] = ()
    """Supervisor, lookup, then of one node after the other the shard and the mover."""
    starts: tuple[str, ...] = ()
    """Ids of nodes that get a shard."""
    ends: tuple[str, ...] = ()
    """Ids of nodes that lose their shard."""

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
    """Decide which parts of a tier restart for these `settings`.

    `running` is the build info of each part by its name; new already if an earlier run restarted
    it. `labels` and `installed` go by node id: Ray's labels, and the build info of the code there
    (without it code is no reason). `restart`: all parts restart, changed or not.
    """
    steps = []
    for name in sorted(running, key=_turn):
        build = running[name]
        here = (labels or {}).get(build["node_id"], {})
        step = _step(name, build, settings, here, (installed or {}).get(build["node_id"]))
        if restart and not step.reasons:
            step = replace(step, reasons=("asked for",))
        if step.reasons:
            steps.append(step)
    return Plan(steps=tuple(steps))


def check_costs(planned: Plan, *, recreate: bool) -> None:
    """Raise ConfigError, with each reason, if a plan costs blocks and `recreate` is not set."""
    if planned.costs and not recreate:
        raise ConfigError(
            f"This drops the blocks of the nodes that it concerns: {'; '.join(planned.costs)}."
            " Undo it, or allow it with --recreate. An NVMe tier first writes to disk the blocks"
            " that are only in memory."
        )


def _turn(name: str) -> tuple[int, str, int]:
    """Return a part's place in the order of restarts."""
    for kind, prefix in enumerate((SHARD_PREFIX, MOVER_PREFIX)):
        if name.startswith(prefix):
            return 2, name.removeprefix(prefix), kind
    return int(is_lookup(name)), name, 0


def _step(
    name: str,
    build: BuildInfo,
    settings: Settings,
    labels: Mapping[str, str],
    now: BuildInfo | None,
) -> Step:
    """Return the step for a part; it has no reasons if the part need not restart."""
    # A setting that is new to the part had its default.
    before = {**settings_of(KVRayConfig()), **build["settings"]}
    if name.startswith((SHARD_PREFIX, MOVER_PREFIX)):
        before, settings = on_node(before, labels), on_node(settings, labels)
    changed = {
        setting: f"{setting} is {value} now and was {before[setting]}"
        for setting, value in settings.items()
        if before[setting] != value and _takes(name, setting)
    }
    reasons = list(changed.values())
    costs = [reason for setting, reason in changed.items() if effect_of(setting) in _COSTS]
    if now is not None and now["code"] != build["code"]:
        if now["version"] == build["version"]:
            reasons.append(f"the installed code of kvray {now['version']} has changed")
        else:
            reasons.append(f"kvray is {now['version']} now and was {build['version']}")
        was, is_now = build["arena_format"], now["arena_format"]
        if was != is_now:
            costs.append(f"the arena's format is {is_now} now and was {was}")
    if build.get("state") == "failed":
        reasons.append("it has failed")
    if not name.startswith(SHARD_PREFIX):
        return Step(name=name, reasons=tuple(reasons))  # only a shard has blocks
    retire = any(setting in _RETIRES_ARENA for setting in changed)
    return Step(name=name, reasons=tuple(reasons), costs=tuple(costs), retire=retire)


def _takes(name: str, setting: str) -> bool:
    """Return whether the part of that name reads the setting when it starts."""
    effect = effect_of(setting)
    if is_lookup(name):
        return effect is Effect.LOOKUP
    if name.startswith(SHARD_PREFIX):
        return effect in _OF_SHARDS
    if name.startswith(MOVER_PREFIX):
        # It finds a new arena in the same directory by itself.
        return effect in (Effect.MOVER, Effect.SHARD_AND_MOVER) or setting == "arena.dir"
    return effect not in (Effect.NOTHING, Effect.OTHER_TIER)  # the supervisor starts all others
