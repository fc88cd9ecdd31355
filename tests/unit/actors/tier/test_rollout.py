"""What a change of settings or code takes of a tier that runs, and how long it is waited for."""

from types import SimpleNamespace
from typing import Any

import pytest
from ray._private.state import state

from kvray.actors.build_info import BuildInfo, settings_of
from kvray.actors.names import LOOKUP_NAME, MOVER_PREFIX, SHARD_PREFIX, SUPERVISOR_NAME
from kvray.actors.ray_glue import calls
from kvray.actors.tier import rollout
from kvray.actors.tier import tier as tier_module
from kvray.actors.tier.changes import EFFECTS, Effect, Plan, Step, effect_of, plan
from kvray.actors.tier.rollout import SILENT, Patience, Rollout, carry_out, look
from kvray.config import KVRayConfig, load_config
from kvray.errors import ConfigError, ShardUnavailable

SHARD, MOVER = f"{SHARD_PREFIX}a", f"{MOVER_PREFIX}a"
PARTS = (SUPERVISOR_NAME, LOOKUP_NAME, SHARD, MOVER)
INSTALLED = {"node": {"code": "1", "version": "0.1.0", "arena_format": 3}}
DEFAULTS = settings_of(KVRayConfig())

SOME = {"label": "pool=big", "arena": {"capacity": "8GiB", "free_target": 0.1}, "nvme": {}}
OTHER: dict[type, Any] = {int: 7, float: 7.5, str: "other", list: ["object_ref"], dict: {"ab": 1}}


def made(**changes: object) -> BuildInfo:
    return {"settings": DEFAULTS, "node_id": "node", **INSTALLED["node"], **changes}


def tier(**changes: object) -> dict[str, BuildInfo]:
    parts = {name: made(**changes) for name in PARTS}
    silent = {"shard.silent_s": DEFAULTS["shard.silent_s"]}
    return {**parts, LOOKUP_NAME: {**parts[LOOKUP_NAME], "settings": silent}}


def names(planned: Plan) -> list[str]:
    return [step.name for step in planned.steps]


def changed(setting: str) -> dict[str, Any]:
    """Return the defaults with another value of one setting, which need not be a sensible one."""
    other = [SOME] if setting == "nodes" else OTHER.get(type(DEFAULTS[setting]), "other")
    return {**DEFAULTS, setting: other}


FREE = changed("arena.free_target")


def test_nothing_is_decided_of_settings_that_there_are_not():
    sections = {name.partition(".")[0] for name in DEFAULTS}
    assert [
        name
        for name in EFFECTS
        if name not in DEFAULTS and not (name.endswith(".*") and name[:-2] in sections)
    ] == []


@pytest.mark.parametrize("setting", [name for name in DEFAULTS if name != "cluster_name"])
def test_another_value_restarts_the_parts_that_were_started_with_the_setting(setting):
    planned = plan(tier(), changed(setting))
    if effect_of(setting) is Effect.NOTHING:
        assert planned.steps == ()
    elif setting == "nodes":
        assert names(planned) == [SUPERVISOR_NAME], "no node has the label"
    else:
        lookup = [LOOKUP_NAME] if setting == "shard.silent_s" else []
        assert names(planned) == [SUPERVISOR_NAME, *lookup, SHARD, MOVER]
    assert bool(planned.costs) == (effect_of(setting) is Effect.RECREATE)


@pytest.mark.parametrize(("setting", "retire"), [("arena.numa", True), ("arena.slab", False)])
def test_an_arena_that_the_next_shard_would_take_over_is_retired(setting, retire):
    steps = {step.name: step for step in plan(tier(), changed(setting)).steps}
    assert steps[SHARD].retire is retire


OTHER_CODE = {"node": {**INSTALLED["node"], "code": "2"}}
SHARD_B, MOVER_B = f"{SHARD_PREFIX}b", f"{MOVER_PREFIX}b"


RESTARTS: dict[str, tuple[dict[str, BuildInfo], dict[str, Any], dict[str, Any], Any]] = {
    "a tier as it should be needs nothing": ({}, DEFAULTS, {}, ()),
    "nor with the same code": ({}, DEFAULTS, {"installed": INSTALLED}, ()),
    "other code restarts all": ({}, DEFAULTS, {"installed": OTHER_CODE}, PARTS),
    "unless its node is gone": ({}, DEFAULTS, {"installed": {}}, ()),
    "so does who asks for it": ({}, DEFAULTS, {"restart": True}, PARTS),
    "what has failed": ({SHARD: made(state="failed")}, DEFAULTS, {}, (SHARD,)),
    "one node follows the other, each with its shard first": (
        {SHARD_B: made(), MOVER_B: made()},
        *(changed("staging.fetches_max"), {}),
        (SUPERVISOR_NAME, SHARD, MOVER, SHARD_B, MOVER_B),
    ),
    "what a run before has restarted already is left alone": (
        tier(settings=FREE) | {SHARD_B: made()},
        *(FREE, {}),
        (SHARD_B,),
    ),
}


@pytest.mark.parametrize(("others", "wanted", "more", "restarted"), RESTARTS.values(), ids=RESTARTS)
def test_what_is_restarted_and_in_which_order(others, wanted, more, restarted):
    assert names(plan(tier() | others, wanted, **more)) == list(restarted)


def test_another_format_of_the_arena_costs_its_blocks():
    now = {"node": {"code": "2", "version": "0.2.0", "arena_format": 4}}
    planned = plan(tier(), DEFAULTS, installed=now)
    assert planned.costs == ["the arena's format is 4 now and was 3"]
    assert planned.steps[0].reasons == ("kvray is 0.2.0 now and was 0.1.0",)


def test_what_differs_on_nodes_with_a_label_concerns_those_only():
    parts = {SHARD: made(), SHARD_B: made(node_id="big"), MOVER: made(node_id="big")}
    labels = {"big": {"pool": "big"}, "node": {"pool": "small"}}
    planned = plan(parts, changed("nodes"), labels=labels)
    assert names(planned) == [MOVER, SHARD_B]
    assert planned.costs == ["arena.capacity is 8GiB now and was 4GiB"]
    for name in (SHARD_B, MOVER):
        parts[name] = made(node_id="big", settings=changed("nodes"))
    assert plan(parts, changed("nodes"), labels=labels).steps == ()


def test_a_setting_that_a_part_has_never_heard_of_had_its_default_and_one_that_is_no_more_is_none():
    older = {name: value for name, value in DEFAULTS.items() if name != "arena.policy"}
    assert plan({SHARD: made(settings=older)}, DEFAULTS).steps == ()
    (step,) = plan({SHARD: made(settings=older)}, changed("arena.policy")).steps
    assert step.reasons == ("arena.policy is other now and was gittins",), "with both values"
    old = made(settings={"shard.silent_s": 9.0, "lookup.gone": 1})
    (step,) = plan({LOOKUP_NAME: old}, DEFAULTS).steps
    assert [reason.split()[0] for reason in step.reasons] == ["shard.silent_s"]


def test_settings_are_plain_values_under_dotted_names():
    config = load_config(overrides={"arena.dir": "/x", "arena.quotas": {"ab": "1GiB"}}, environ={})
    settings = settings_of(config)
    assert settings["arena.dir"] == "/x"
    assert settings["arena.quotas"] == {"ab": "1GiB"}
    assert settings["staging.transports"] == ["nixl", "object_ref"]
    assert settings["cluster_name"] == "kvray"


LOOKS: dict[str, list[tuple[int, object, dict[str, Any], bool]]] = {
    "nothing moves": [(0, "a", {}, False), (29, "a", {}, False), (31, "a", {}, True)],
    "something moves until it has taken long": [
        *((seconds, seconds, {}, False) for seconds in (25, 50, 75, 100)),
        (101, 5, {}, True),
    ],
    "a look has a limit of its own": [(0, "a", {}, False), (5, "a", {"still_s": 2}, True)],
}
"""A look: after how many seconds, what is seen, its limit, and whether the wait is over."""


@pytest.mark.parametrize("looks", LOOKS.values(), ids=LOOKS)
def test_when_a_wait_is_over(monkeypatch, looks):
    now = 1000.0
    monkeypatch.setattr(rollout, "time", SimpleNamespace(monotonic=lambda: now))
    wait = Patience(30, most_s=100)
    for seconds, seen, limit, is_over in looks:
        now = 1000.0 + seconds
        assert wait.is_over(seen, **limit) is is_over


@pytest.mark.parametrize(
    ("shards", "kind", "words"),
    [
        (None, ShardUnavailable, "The supervisor does not answer"),
        ([], ConfigError, "No node of the Ray cluster has the resource 'big'"),
        ([{"shard": "a", "state": "starting"}], ShardUnavailable, "no progress (a starting)"),
    ],
    ids=["no supervisor", "no node", "no progress"],
)
def test_a_start_that_does_not_end_says_what_it_waited_for(shards, kind, words, monkeypatch):
    monkeypatch.setattr(calls, "ask_all", lambda methods, timeout_s: {"": methods[""]})
    config = load_config(environ={}, overrides={"shard.resource": "big"})
    error = tier_module._not_ready(config, shards, SimpleNamespace(ping=None))
    assert type(error) is kind
    assert words in str(error)


def test_a_part_that_the_supervisor_restarts_at_once_has_ended(monkeypatch):
    now = ["old", "old", "new"]
    monkeypatch.setattr(calls, "list_actors", lambda: [SHARD])
    monkeypatch.setattr(calls, "get_actor", lambda _: now.pop(0) if len(now) > 1 else now[0])
    assert calls.await_end(SHARD, "old", 10.0)
    assert not calls.await_end(SHARD, "new", 0.0), "it is still there"
    monkeypatch.setattr(calls, "list_actors", list)
    assert calls.await_end(SHARD, "new", 0.0)


def test_a_node_that_goes_is_asked_nothing_and_its_parts_stay_as_they_are(monkeypatch):
    stays, goes = "a" * 56, "b" * 56
    parts = {f"{SHARD_PREFIX}{one[:12]}": made(node_id=one) for one in (stays, goes)}
    node = {"Alive": True, "Resources": {}}
    monkeypatch.setattr("ray.nodes", lambda: [{"NodeID": one, **node} for one in (stays, goes)])
    monkeypatch.setattr(state, "get_draining_nodes", lambda: {goes: 0})
    monkeypatch.setattr(calls, "list_actors", lambda *_: [*parts])
    monkeypatch.setattr(calls, "ask", lambda names, *_, **__: {one: parts[one] for one in names})
    monkeypatch.setattr(calls, "on_node", lambda node, _: INSTALLED["node"])
    monkeypatch.setattr(calls, "ask_all", lambda methods, *_, **__: methods)
    config = load_config(environ={}, overrides={"arena.free_target": 0.2})
    planned = look(config, Rollout(), timeout_s=1.0, observer=SILENT)
    assert (names(planned), planned.starts, planned.ends) == ([f"{SHARD_PREFIX}{'a' * 12}"], (), ())

    ended: list[str] = []
    monkeypatch.setattr(rollout, "_end", lambda name, *_, **__: ended.append(name))
    monkeypatch.setattr(rollout, "create_supervisor", lambda _: SimpleNamespace(ping=None))
    late = Plan(steps=(Step(name=f"{SHARD_PREFIX}{'b' * 12}", reasons=("asked for",)),))
    carry_out(late, config, timeout_s=1.0, observer=SILENT)
    assert not ended, "it goes since the plan was made"
