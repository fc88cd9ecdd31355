"""What a change of settings or code takes of a tier that runs, and how long it is waited for."""

from typing import Any

import pytest

from kvray.actors.build_info import BuildInfo, settings_of
from kvray.actors.names import LOOKUP_NAME, MOVER_PREFIX, SHARD_PREFIX, SUPERVISOR_NAME
from kvray.actors.tier import rollout
from kvray.actors.tier import tier as tier_module
from kvray.actors.tier.changes import EFFECTS, Effect, Plan, check_costs, effect_of, plan
from kvray.actors.tier.rollout import Patience
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


def test_a_tier_as_it_should_be_needs_nothing():
    assert plan(tier(), DEFAULTS).steps == ()
    assert plan(tier(), DEFAULTS, installed=INSTALLED).steps == ()


def test_what_a_run_before_has_restarted_already_is_left_alone():
    wanted = changed("arena.free_target")
    parts = tier()
    parts |= {name: made(settings=wanted) for name in (SUPERVISOR_NAME, SHARD, MOVER)}
    parts[f"{SHARD_PREFIX}b"] = made()
    assert names(plan(parts, wanted)) == [f"{SHARD_PREFIX}b"]


def test_one_node_follows_the_other_each_with_its_shard_first():
    parts = tier() | {f"{SHARD_PREFIX}b": made(), f"{MOVER_PREFIX}b": made()}
    planned = plan(parts, changed("staging.fetches_max"))
    assert names(planned) == [SUPERVISOR_NAME, SHARD, MOVER, f"{SHARD_PREFIX}b", f"{MOVER_PREFIX}b"]


def test_reasons_name_the_setting_and_both_values():
    (step,) = plan({SHARD: made()}, changed("arena.free_target")).steps
    assert step.reasons == ("arena.free_target is 7.5 now and was 0.05",)


def test_what_costs_blocks_is_refused_by_name_unless_it_is_meant():
    planned = plan(tier(), {**DEFAULTS, "arena.capacity": 1, "arena.free_target": 0.1})
    with pytest.raises(ConfigError, match=r"arena\.capacity is 1 now and was 4GiB") as error:
        check_costs(planned, recreate=False)
    assert "free_target" not in str(error.value)
    check_costs(planned, recreate=True)
    check_costs(plan(tier(), changed("arena.free_target")), recreate=False)


@pytest.mark.parametrize(("setting", "retire"), [("arena.numa", True), ("arena.slab", False)])
def test_an_arena_that_the_next_shard_would_take_over_is_retired(setting, retire):
    steps = {step.name: step for step in plan(tier(), changed(setting)).steps}
    assert steps[SHARD].retire is retire


def test_other_code_restarts_everything_that_runs_it():
    now = {"node": {**INSTALLED["node"], "code": "2"}}
    assert names(plan(tier(), DEFAULTS, installed=now)) == list(PARTS)
    assert plan(tier(), DEFAULTS, installed={}).steps == (), "its node is gone"


def test_another_format_of_the_arena_costs_its_blocks():
    now = {"node": {"code": "2", "version": "0.2.0", "arena_format": 4}}
    planned = plan(tier(), DEFAULTS, installed=now)
    assert planned.costs == ["the arena's format is 4 now and was 3"]
    assert planned.steps[0].reasons == ("kvray is 0.2.0 now and was 0.1.0",)


def test_a_part_that_has_failed_is_restarted_and_so_is_what_is_asked_for():
    parts = tier() | {SHARD: made(state="failed")}
    assert names(plan(parts, DEFAULTS)) == [SHARD]
    assert names(plan(tier(), DEFAULTS, restart=True)) == list(PARTS)


def test_what_differs_on_nodes_with_a_label_concerns_those_only():
    parts = {SHARD: made(), f"{SHARD_PREFIX}b": made(node_id="big"), MOVER: made(node_id="big")}
    labels = {"big": {"pool": "big"}, "node": {"pool": "small"}}
    planned = plan(parts, changed("nodes"), labels=labels)
    assert names(planned) == [MOVER, f"{SHARD_PREFIX}b"]
    assert planned.costs == ["arena.capacity is 8GiB now and was 4GiB"]
    for name in (f"{SHARD_PREFIX}b", MOVER):
        parts[name] = made(node_id="big", settings=changed("nodes"))
    assert plan(parts, changed("nodes"), labels=labels).steps == ()


def test_a_setting_that_a_part_has_never_heard_of_had_its_default():
    older = {name: value for name, value in DEFAULTS.items() if name != "arena.policy"}
    assert plan({SHARD: made(settings=older)}, DEFAULTS).steps == ()
    (step,) = plan({SHARD: made(settings=older)}, changed("arena.policy")).steps
    assert step.reasons == ("arena.policy is other now and was gittins",)


def test_settings_are_plain_values_under_dotted_names():
    config = load_config(overrides={"arena.dir": "/x", "arena.quotas": {"ab": "1GiB"}}, environ={})
    settings = settings_of(config)
    assert settings["arena.dir"] == "/x"
    assert settings["arena.quotas"] == {"ab": "1GiB"}
    assert settings["staging.transports"] == ["nixl", "object_ref"]
    assert settings["cluster_name"] == "kvray"


class Clock:
    """A clock that only the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(rollout, "time", made)
    return made


def test_a_wait_in_which_nothing_moves_ends(clock):
    wait = Patience(30)
    assert not wait.is_over("starting")
    clock.now += 29
    assert not wait.is_over("starting")
    clock.now += 2
    assert wait.is_over("starting")


def test_a_wait_in_which_something_moves_goes_on_until_it_has_taken_long(clock):
    wait = Patience(30, most_s=100)
    for done in range(4):
        clock.now += 25
        assert not wait.is_over(done)
    clock.now += 1
    assert wait.is_over(5)


def test_a_look_may_have_a_limit_of_its_own(clock):
    wait = Patience(30)
    wait.is_over("no node")
    clock.now += 5
    assert not wait.is_over("no node")
    assert wait.is_over("no node", still_s=2)


@pytest.mark.parametrize(
    ("shards", "kind", "words"),
    [
        (None, ShardUnavailable, "The supervisor does not answer"),
        ([], ConfigError, "No node of the Ray cluster has the resource 'big'"),
        ([{"shard": "a", "state": "starting"}], ShardUnavailable, "no progress (a starting)"),
    ],
    ids=["no supervisor", "no node", "no progress"],
)
def test_a_start_that_does_not_end_says_what_it_waited_for(shards, kind, words):
    config = load_config(environ={}, overrides={"shard.resource": "big"})
    error = tier_module._not_ready(config, shards)
    assert type(error) is kind
    assert words in str(error)


def test_a_lookup_of_a_version_with_a_setting_that_is_no_more_is_planned_for():
    old = made(settings={"shard.silent_s": 9.0, "lookup.gone": 1})
    (step,) = plan({LOOKUP_NAME: old}, DEFAULTS).steps
    assert [reason.split()[0] for reason in step.reasons] == ["shard.silent_s"]
