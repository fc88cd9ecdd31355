"""`kvray up`, `status` and `down` on a Ray of their own and on one that is there."""

import json
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvray.actors.ray_glue.calls import list_actors
from kvray.actors.tier import tier
from kvray.actors.tier.local_ray import LocalRay
from kvray.config import KVRayConfig
from tests.ray.command_line import SHM, Shell, open_shell
from tests.ray.conftest import Engine
from tests.waiting import wait_for

pytestmark = pytest.mark.ray


@pytest.fixture
def shell() -> Iterator[Shell]:
    with open_shell("cli") as shell:
        yield shell


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def test_tier_on_a_ray_of_its_own_goes_up_and_down(shell: Shell) -> None:
    port = free_port()
    up = shell.run("up", "--port", str(port))
    assert up.returncode == 0, up.stderr
    assert "is up: 1 shard, 64MiB" in up.stdout
    assert f":{port} (local)" in up.stdout

    again = shell.run("up")
    assert again.returncode == 0, again.stderr
    assert "was up already" in again.stdout

    probe = shell.run("probe")
    assert (probe.returncode, probe.stderr) == (0, "")
    assert probe.stdout.endswith(" serves, epoch 1.\n")
    shown = shell.run("status")
    assert shown.returncode == 0, shown.stderr
    assert "0B/64MiB" in shown.stdout
    found = json.loads(shell.run("status", "--json").stdout)
    assert found["cluster_name"] == shell.cluster_name
    assert [shard["state"] for shard in found["shards"]] == ["serving"]

    assert "Aborted" in shell.run("clear").stderr
    assert shell.run("clear", "--yes").stdout == "0 blocks were evicted.\n"
    healthy = shell.run("doctor", "--json")
    found = {one["check"]: one for one in json.loads(healthy.stdout)["findings"]}
    assert found["arena"]["verdict"] == found["socket"]["verdict"] == "ok"
    assert found["replicas"]["verdict"] == "hint", "no engine uses it yet"
    assert healthy.returncode == 0

    down = shell.run("down")
    assert down.returncode == 0, down.stderr
    assert down.stdout == f"The tier {shell.cluster_name} is down.\n"
    assert shell.run("probe").returncode == 1
    assert shell.leftovers() == []


def test_arena_that_does_not_fit_leaves_nothing(shell: Shell) -> None:
    done = shell.run("up", KVRAY_ARENA__CAPACITY="100TiB")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("kvray: The arena needs ")
    assert "lower arena.capacity" in done.stderr
    assert done.stderr.count("\n") == 1
    assert shell.leftovers() == []


def ray_begins(shell: Shell) -> bool:
    return any(shell.directory.glob("kvray-*/ray-start.log"))


def ray_answers(shell: Shell) -> bool:
    return any(shell.directory.glob("kvray-*/ray.json"))


def arena_is_made(shell: Shell) -> bool:
    return shell.node_dir.exists()


@pytest.mark.parametrize(
    ("moment", "signum"),
    [
        (ray_begins, signal.SIGTERM),
        pytest.param(arena_is_made, signal.SIGTERM, marks=pytest.mark.long),
        pytest.param(ray_answers, signal.SIGINT, marks=pytest.mark.long),
        pytest.param(ray_begins, signal.SIGINT, marks=pytest.mark.long),
        pytest.param(ray_answers, signal.SIGTERM, marks=pytest.mark.long),
        pytest.param(arena_is_made, signal.SIGINT, marks=pytest.mark.long),
    ],
)
def test_interrupted_up_leaves_nothing(
    shell: Shell, moment: Callable[[Shell], bool], signum: signal.Signals
) -> None:
    shell.environ["KVRAY_ARENA__CAPACITY"] = "1GiB"
    done = shell.interrupt("up", when=lambda: moment(shell), signum=signum)
    assert done.returncode == 130, done.stderr
    assert done.stderr.splitlines()[-1] == "kvray: interrupted."
    assert shell.leftovers() == []


@pytest.mark.long
def test_two_tiers_share_a_ray_and_neither_sees_the_other(
    shell: Shell, local: LocalRay, running: KVRayConfig
) -> None:
    environ = local.environ() | {"KVRAY_RAY__ADDRESS": local.address}
    assert shell.run("up", **environ).returncode == 0
    (shard,) = json.loads(shell.run("status", "--json", **environ).stdout)["shards"]
    (other,) = tier.status(timeout_s=10)["shards"]
    assert shard["arena"]["arena_id"] != other["arena"]["arena_id"]
    assert shell.run("down", **environ).returncode == 0
    assert shell.leftovers() == []
    (after,) = tier.status(timeout_s=10)["shards"]
    assert (after["pid"], after["state"]) == (other["pid"], "serving")
    done = shell.run("status", **environ)
    assert done.returncode == 2
    assert f"a tier that runs ({running.cluster_name})" in done.stderr


def test_another_arena_is_refused_and_the_tier_left_alone(
    shell: Shell, local: LocalRay, running: KVRayConfig
) -> None:
    name = running.cluster_name
    done = shell.run("up", "--address", local.address, KVRAY_CLUSTER_NAME=name, **local.environ())
    assert done.returncode == 2
    assert "arena.capacity is 64MiB now and was 16MiB" in done.stderr
    assert "--recreate" in done.stderr
    assert done.stderr.count("\n") == 1
    assert [shard["state"] for shard in tier.status(timeout_s=10)["shards"]] == ["serving"]


def test_failed_up_on_a_running_ray_ends_its_own_actors_only(
    shell: Shell, local: LocalRay, config: KVRayConfig
) -> None:
    done = shell.run(
        "up", "--address", local.address, KVRAY_ARENA__CAPACITY="100TiB", **local.environ()
    )
    assert done.returncode == 2, done.stderr
    assert "lower arena.capacity" in done.stderr
    assert list_actors() == []
    assert shell.leftovers() == []


def test_tier_on_a_running_ray_goes_up_and_down(
    shell: Shell, local: LocalRay, config: KVRayConfig
) -> None:
    up = shell.run("up", "--address", local.address, **local.environ())
    assert up.returncode == 0, up.stderr
    assert f"Ray: {local.address}\n" in up.stdout
    down = shell.run("down", "--address", local.address, **local.environ())
    assert down.returncode == 0, down.stderr
    assert list_actors() == []
    assert shell.leftovers() == []
    again = shell.run("down", "--address", local.address, **local.environ())
    assert again.stdout == f"No tier {shell.cluster_name} was running.\n"


def test_wrong_token_is_refused(shell: Shell, local: LocalRay) -> None:
    environ = {**local.environ(), "RAY_AUTH_TOKEN": "0" * 64}
    done = shell.run("status", "--address", local.address, **environ)
    assert done.returncode == 2, done.stderr
    *_, last = done.stderr.splitlines()  # Ray has logged something of its own before
    assert last.startswith("kvray: ")
    assert "token is missing or incorrect); check" in last


# -- after a crash of everything ------------------------------------------------------------------


@pytest.fixture
def own_dir(shell: Shell) -> Iterator[Path]:
    """An arena.dir of the shell's own: `kvray sweep` must see no arena but this tier's."""
    path = Path(tempfile.mkdtemp(dir=SHM, prefix="kvray-test-"))
    shell.environ["KVRAY_ARENA__DIR"] = str(path)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def survivor(shell: Shell, own_dir: Path) -> Iterator[Engine]:
    """An engine that has stored 5 blocks in a tier of which every process was killed since."""
    done = shell.run("up")
    assert done.returncode == 0, done.stderr
    engine = Engine(own_dir / f"kvray-{shell.cluster_name}")
    engine.say("store(link.arena, chain(5)) and None")
    kill_everything(shell)
    yield engine
    engine.close()


def kill_everything(shell: Shell) -> None:
    while found := shell.processes():
        for process in found:
            process.kill()


def served(shell: Shell) -> dict[str, int]:
    """Bring the tier up again; return its arena's figures."""
    up = shell.run("up")
    assert up.returncode == 0, up.stderr
    assert "is up: 1 shard" in up.stdout
    (shard,) = json.loads(shell.run("status", "--json").stdout)["shards"]
    return dict(shard["arena"])


def swept(shell: Shell) -> list[str]:
    done = shell.run("sweep", "--json")
    assert done.returncode == 0, done.stderr
    return [arena["outcome"] for arena in json.loads(done.stdout)["arenas"]]


@pytest.mark.long
def test_after_a_crash_of_everything_up_adopts_the_arena_and_engines_go_on(
    shell: Shell, own_dir: Path, survivor: Engine
) -> None:
    assert swept(shell) == ["attached"]
    arena = served(shell)
    assert (arena["shard_epoch"], arena["blocks"]) == (2, 5)
    assert swept(shell) == ["owned"]
    assert survivor.say("fetch(link.arena, chain(5), link.arena.lease(chain(5))[0])") == "True"
    assert shell.run("down").returncode == 0
    assert shell.leftovers() == []
    assert list(own_dir.iterdir()) == []


@pytest.mark.long
def test_after_a_crash_of_everything_up_replaces_an_arena_of_another_size(
    shell: Shell, own_dir: Path, survivor: Engine
) -> None:
    shell.environ["KVRAY_ARENA__CAPACITY"] = "32MiB"
    arena = served(shell)
    assert (arena["shard_epoch"], arena["blocks"]) == (1, 0)
    wait_for(lambda: survivor.say("link.arena.arena_id") == repr(arena["arena_id"]), "attaching")
    assert shell.run("down").returncode == 0
    assert list(own_dir.iterdir()) == []


@pytest.mark.long
def test_after_a_crash_of_everything_sweep_removes_the_arena(
    shell: Shell, own_dir: Path, survivor: Engine
) -> None:
    survivor.close()
    assert swept(shell) == ["removed"]
    assert list(own_dir.iterdir()) == []
    shell.run("down")
    assert shell.leftovers() == []
