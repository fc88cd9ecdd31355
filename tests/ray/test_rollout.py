"""A tier that runs is brought to other settings and other code, and keeps its blocks."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvray
from kvray.actors.names import LOOKUP_NAME, SUPERVISOR_NAME
from kvray.actors.ray_glue.calls import call, get_actor, kill_actor, list_actors
from kvray.actors.tier import tier
from kvray.actors.tier.local_ray import LocalRay
from kvray.actors.tier.rollout import Observer, Rollout
from kvray.client import Client
from kvray.config import KVRayConfig
from kvray.errors import ConfigError
from kvray.store.arena.layout import FORMAT_VERSION
from tests.ray.command_line import Shell, open_shell
from tests.ray.conftest import TIMEOUT_S, Engine, actor_process, config_with
from tests.unit.store.small_arena import chain
from tests.waiting import wait_for

pytestmark = pytest.mark.ray

StartEngine = Callable[[KVRayConfig], Engine]
NUM_BLOCKS = 5
FETCHED = f"fetch(link.arena, chain({NUM_BLOCKS}), link.arena.lease(chain({NUM_BLOCKS}))[0])"
"""An engine reads every block and compares its bytes."""


class Life:
    """An engine that stays attached to a tier, and what the tier was when it stored its blocks."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        assert engine.say("link.register(registration)") == "None"
        engine.say(f"store(link.arena, chain({NUM_BLOCKS})) and None")
        (self.shard,) = tier.status(timeout_s=TIMEOUT_S)["shards"]

    def check_kept(self, shard: dict[str, Any], *, restarts: int = 1) -> None:
        """Check that the blocks are those from before, in the same arena, and the engine lives."""
        before, now = self.shard["arena"], shard["arena"]
        assert now["arena_id"] == before["arena_id"]
        assert now["shard_epoch"] == before["shard_epoch"] + restarts
        assert (shard["pid"] == self.shard["pid"]) == (restarts == 0)
        assert self.engine.say(FETCHED) == "True"
        with Client(config_with()) as client:
            wait_for(lambda: client.match(chain(NUM_BLOCKS)).num_blocks == NUM_BLOCKS, "the lookup")
        wait_for(lambda: _replicas() == ["one"], "the engine's registering again")


@pytest.fixture
def life(running: KVRayConfig, engine: StartEngine) -> Life:
    return Life(engine(running))


def _replicas() -> list[str]:
    (shard,) = tier.status(timeout_s=TIMEOUT_S)["shards"]
    return [replica["replica"] for replica in shard["replicas"]]


def test_other_settings_of_a_shard_come_with_a_new_one_that_keeps_the_arena(
    local: LocalRay, running: KVRayConfig, life: Life
) -> None:
    done: list[str] = []
    other = config_with(arena__free_target=0.2, shard__silent_s=2.5)
    (shard,) = tier.up(other, timeout_s=TIMEOUT_S, observer=Observer(told=done.append))
    life.check_kept(shard)
    assert [sentence.partition(" was restarted: ")[0] for sentence in done] == [
        "The supervisor",
        "The lookup",
        shard["shard"],
    ]
    assert "arena.free_target is 0.2 now and was 0.05" in done[2]
    assert "5 blocks in memory as before" in done[2]
    again: list[str] = []
    (same,) = tier.up(other, timeout_s=TIMEOUT_S, observer=Observer(told=again.append))
    assert (same["pid"], again) == (shard["pid"], [])


def test_a_supervisor_that_ray_starts_again_has_the_settings_of_the_last_up(
    local: LocalRay, running: KVRayConfig
) -> None:
    other = config_with(arena__free_target=0.2)
    tier.up(other, timeout_s=TIMEOUT_S)
    for kind in ("Supervisor", "Shard"):
        process = actor_process(local, kind)
        process.kill()
        process.wait(TIMEOUT_S)
    wait_for(lambda: _free_target(SUPERVISOR_NAME) == 0.2, "the supervisor")
    (name,) = (name for name in list_actors() if name.startswith("kvray-shard-"))
    wait_for(lambda: _free_target(name) == 0.2, "the shard")
    done: list[str] = []
    tier.up(other, timeout_s=TIMEOUT_S, observer=Observer(told=done.append))
    assert done == []


def _free_target(name: str) -> object:
    try:
        build = call(get_actor(name).build_info, timeout_s=1.0)
    except kvray.errors.ShardUnavailable:
        return None  # Ray is about to start it
    return build["settings"]["arena.free_target"]


def test_a_rollout_that_was_interrupted_is_finished_by_the_next_up(
    running: KVRayConfig, life: Life
) -> None:
    other = config_with(arena__free_target=0.2)

    class Interrupt(Exception):
        pass

    def interrupt(sentence: str) -> None:
        if sentence.startswith("The supervisor"):
            raise Interrupt

    with pytest.raises(Interrupt):
        tier.up(other, timeout_s=TIMEOUT_S, observer=Observer(told=interrupt))
    kill_actor(SUPERVISOR_NAME)  # as if it had come a moment earlier
    done: list[str] = []
    (shard,) = tier.up(other, timeout_s=TIMEOUT_S, observer=Observer(told=done.append))
    life.check_kept(shard)
    assert len(done) == 1


def test_a_new_arena_is_made_only_when_it_is_meant_and_engines_follow(
    running: KVRayConfig, life: Life
) -> None:
    larger = config_with(arena__capacity="32MiB")
    with pytest.raises(ConfigError, match=r"arena\.capacity is 32MiB now and was 16MiB.*recreate"):
        tier.up(larger, timeout_s=TIMEOUT_S)
    (shard,) = tier.status(timeout_s=TIMEOUT_S)["shards"]
    life.check_kept(shard, restarts=0)
    (shard,) = tier.up(larger, timeout_s=TIMEOUT_S, rollout=Rollout(recreate=True))
    assert shard["arena"]["capacity_bytes"] == 32 * 2**20
    assert shard["arena"]["blocks"] == 0
    new = repr(shard["arena"]["arena_id"])
    wait_for(lambda: life.engine.say("link.arena.arena_id") == new, "attaching")


def test_a_shard_that_failed_over_its_settings_is_mended_by_an_up_with_better_ones(
    running: KVRayConfig, life: Life
) -> None:
    with pytest.raises(kvray.errors.KVRayError, match="NVMe tier"):
        tier.up(config_with(nvme__dir="/proc/nowhere"), timeout_s=TIMEOUT_S)
    (shard,) = tier.up(running, timeout_s=TIMEOUT_S)
    assert shard["state"] == "serving"
    assert life.engine.say(FETCHED) == "True"


def test_shards_of_nodes_that_are_not_meant_any_more_end(running: KVRayConfig) -> None:
    elsewhere = config_with(shard__resource="kvray_shard")
    done: list[str] = []
    assert (
        tier.up(elsewhere, timeout_s=TIMEOUT_S, wait=False, observer=Observer(told=done.append))
        == []
    )
    assert any("no longer among those that get a shard" in sentence for sentence in done)
    assert not running.node_dir.exists()
    assert not any(name.startswith("kvray-shard-") for name in list_actors())


def test_everything_restarts_when_that_is_asked_for(running: KVRayConfig, life: Life) -> None:
    done: list[str] = []
    (shard,) = tier.up(
        running,
        timeout_s=TIMEOUT_S,
        rollout=Rollout(restart=True),
        observer=Observer(told=done.append),
    )
    life.check_kept(shard)
    assert len(done) == 3
    assert LOOKUP_NAME in list_actors()


# -- other code, as a user installs it ------------------------------------------------------------


class Installation:
    """A shell with a copy of kvray of its own, which a test may change, and a tier that runs it."""

    def __init__(self, shell: Shell, package: Path) -> None:
        shutil.copytree(Path(kvray.__file__).parent, package)
        shell.environ["PYTHONPATH"] = str(package.parent)
        self.shell = shell
        self._package = package

    def replace(self, module: str, old: str, new: str) -> None:
        """Install another version of a module over the one that is there."""
        path = self._package / module
        text = path.read_text()
        assert text.count(old) == 1
        path.write_text(text.replace(old, new))

    def say(self, *args: str, status: int = 0) -> str:
        """Run a command; return what it said."""
        done = self.shell.run(*args)
        assert done.returncode == status, done.stderr
        return done.stdout + done.stderr

    def shard(self) -> dict[str, Any]:
        (shard,) = json.loads(self.shell.run("status", "--json").stdout)["shards"]
        found: dict[str, Any] = shard
        return found


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    with open_shell("upgrade") as shell:
        made = Installation(shell, tmp_path_factory.mktemp("site") / "kvray")
        assert "It would be started, with a Ray on this machine" in made.say("up", "--plan")
        assert shell.leftovers() == []
        made.say("up")
        yield made
        made.say("down")
        assert shell.leftovers() == []


@pytest.mark.long
def test_up_goes_on_with_the_installed_code_and_the_same_blocks(
    installed: Installation,
) -> None:
    before = installed.shard()
    engine = Engine(installed.shell.node_dir)
    try:
        engine.say(f"store(link.arena, chain({NUM_BLOCKS})) and None")
        assert "Nothing would be done" in installed.say("up", "--plan")
        installed.replace("__init__.py", kvray.__version__, "0.99.0")
        change = f"kvray is 0.99.0 now and was {kvray.__version__}."
        assert installed.say("up", "--plan").count(f"would be restarted: {change}") == 3
        assert installed.shard()["pid"] == before["pid"]

        done = installed.say("up")
        assert done.count(f"was restarted: {change}") == 3
        assert f"{NUM_BLOCKS} blocks in memory as before" in done
        after = installed.shard()
        assert after["arena"]["arena_id"] == before["arena"]["arena_id"]
        assert after["arena"]["shard_epoch"] == before["arena"]["shard_epoch"] + 1
        assert engine.say(FETCHED) == "True"
        assert "was restarted" not in installed.say("up")
    finally:
        engine.close()


@pytest.mark.long
def test_other_code_that_costs_blocks_says_so_and_waits_for_a_word(
    installed: Installation,
) -> None:
    before = installed.shard()["arena"]
    was = f"FORMAT_VERSION = {FORMAT_VERSION}"
    installed.replace("store/arena/layout.py", was, "FORMAT_VERSION = 99")
    refused = installed.say("up", status=2)
    assert f"the arena's format is 99 now and was {FORMAT_VERSION}" in refused
    assert "--recreate" in refused
    assert installed.shard()["arena"]["shard_epoch"] == before["shard_epoch"]
    assert "was restarted" in installed.say("up", "--recreate")
    assert installed.shard()["arena"]["arena_id"] != before["arena_id"]
