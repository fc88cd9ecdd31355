"""Decides which parts of a running tier restart when its settings or its code change; pure.

A part restarts if a setting that it was started with, or its code, differs now. The new shard
adopts the arena of the old one, so only what needs `--recreate` costs blocks.
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
    RESTART = "shards, movers and supervisor restart; shards keep their arenas"
    RECREATE = "needs --recreate: the blocks in memory, or those on disk, are lost"
    REFUSE = "refused: it names another tier"


EFFECTS: Mapping[str, Effect] = {  # `section.*`: the settings of it that are not named
    "cluster_name": Effect.REFUSE,
    "arena.dir": Effect.RECREATE,
    "arena.capacity": Effect.RECREATE,
    "arena.slab": Effect.RECREATE,
    "arena.slot_min": Effect.RECREATE,
    "arena.numa": Effect.RECREATE,
    "arena.holders_max": Effect.RECREATE,
    "nvme.segment": Effect.RECREATE,
    "connector.*": Effect.NOTHING,
    "ray.*": Effect.NOTHING,
}
"""All other settings restart what was started with them."""
_RETIRES_ARENA = ("arena.dir", "arena.numa")
"""A shard replaces an arena of other sizes itself, but does not find it after these changes."""


def effect_of(setting: str) -> Effect:
    """Return the consequence of a change of `setting`."""
    section = setting.partition(".")[0]
    return EFFECTS.get(setting) or EFFECTS.get(f"{section}.*", Effect.RESTART)


def on_node(settings: Settings, labels: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings of a node with these labels: a later entry of `nodes` wins."""
    found = {name: value for name, value in settings.items() if name != "nodes"}
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
    before: Settings = build["settings"]
    if is_lookup(name):
        # It has few of them, perhaps one that this version has no more.
        settings = {setting: settings[setting] for setting in before if setting in settings}
    else:
        # A setting that is new to the part had its default.
        before = {**settings_of(KVRayConfig()), **before}
    if name.startswith((SHARD_PREFIX, MOVER_PREFIX)):
        before, settings = on_node(before, labels), on_node(settings, labels)
    changed = {
        setting: f"{setting} is {value} now and was {before[setting]}"
        for setting, value in settings.items()
        if before[setting] != value and effect_of(setting) in (Effect.RESTART, Effect.RECREATE)
    }
    reasons = list(changed.values())
    costs = [why for setting, why in changed.items() if effect_of(setting) is Effect.RECREATE]
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
