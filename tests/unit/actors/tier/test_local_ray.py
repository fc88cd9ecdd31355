"""A Ray of kvray's own: its start, its end, and every failure; a script stands for `ray start`."""

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from kvray.actors.owner import ownership
from kvray.actors.tier import launch, local_ray, ray_node, tier
from kvray.actors.tier.rollout import Observer
from kvray.config import KVRayConfig, load_config
from kvray.errors import CapacityError, ConfigError, ShardUnavailable
from kvray.store.machine.side_file import OWNER_BYTE
from tests.waiting import HANG_S, wait_for

STAYS = "trap 'kill $!; exit' TERM; sleep 600 & wait"
STARTS = f"""\
for one in "$@"; do case $one in --temp-dir=*) dir=${{one#*=}};; esac; done
mkdir -p $dir
touch $dir/ray_current_cluster
sleep 0.3
echo Ray runtime started.
echo 10.0.0.5:6379 >$dir/ray_current_cluster
{STAYS}
"""


@pytest.fixture
def name() -> Iterator[str]:
    """The name of a cluster of which nothing is left after the test."""
    made = f"pytest-{os.getpid()}-own"
    yield made
    local_ray.stop(made)
    assert not local_ray.local_dir(made).exists()


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that stands in the place of `ray start`."""
    path = tmp_path / "start"
    monkeypatch.setattr(ray_node, "_START", ("sh", str(path), "start"))
    return path


@pytest.fixture
def config(name: str, tmp_path: Path) -> KVRayConfig:
    """Of a tier on a Ray of its own."""
    overrides = {"cluster_name": name, "arena.dir": str(tmp_path)}
    return load_config(None, environ={}, overrides=overrides)


def processes_of(name: str) -> list[psutil.Process]:
    return local_ray._family(local_ray.local_dir(name))


def test_a_cluster_is_found_until_it_is_stopped_and_there_is_one(name, script, monkeypatch):
    script.write_text(STARTS)
    started = local_ray.start(name)
    assert started.address == "10.0.0.5:6379"
    assert started.token not in repr(started)
    assert local_ray.find(name) == started
    with pytest.raises(ConfigError, match="is running already"):
        local_ray.start(name)
    assert local_ray.find(name) == started
    booted_at = psutil.boot_time()
    with monkeypatch.context() as later:  # somebody has set the clock
        # The kernel has the present time less the uptime for it.
        later.setattr(psutil._pslinux, "boot_time", lambda: booted_at + 3600)
        assert local_ray.find(name) == started
    assert local_ray.stop(name)
    assert local_ray.find(name) is None
    assert processes_of(name) == []


def test_a_worker_without_its_environment_is_known_by_its_log(name, tmp_path):
    log = local_ray.local_dir(name) / "logs" / "worker"
    log.parent.mkdir(parents=True)
    code = f"log = open({str(log)!r}, 'w'); import time; time.sleep(600)"
    asked = {"args": ["ray::ShardActor", "-c", code], "executable": sys.executable}
    with subprocess.Popen(**asked) as worker:
        with subprocess.Popen(**{**asked, "args": ["a reader", "-c", code]}) as reader:
            wait_for(lambda: [one.pid for one in processes_of(name)] == [worker.pid])
            reader.kill()
        worker.kill()
    shutil.rmtree(local_ray.local_dir(name))


@pytest.mark.parametrize(
    "end", [launch._end_local_ray, lambda config: tier._sweep_nodes(config, set(), 1.0)]
)
def test_files_of_a_shard_that_is_long_in_dying_are_removed(config, child_in, monkeypatch, end):
    config.node_dir.mkdir(mode=0o700)
    monkeypatch.setattr(local_ray, "stop", lambda _: True)
    monkeypatch.setattr(tier.ray, "nodes", list)
    shard = child_in(config.node_dir)
    lock = f"(kept := SideFile.at(directory / 'owner')).try_lock({OWNER_BYTE})"
    assert shard.say(lock) == "True"
    # It is gone once somebody waits for it.
    monkeypatch.setattr(ownership.time, "sleep", lambda _: shard.kill())
    end(config)
    assert not config.node_dir.exists()


@pytest.mark.parametrize("answer", [True, False, ShardUnavailable("It did not answer in time.")])
def test_the_end_of_a_tier_names_the_nodes_that_may_still_have_its_files(
    config, monkeypatch, answer
):
    host = {"NodeManagerHostname": "gpu-7", "NodeManagerAddress": "10.0.0.7"}
    node = {"NodeID": "a" * 56, "Alive": True, "Resources": {}, **host}
    silent = ShardUnavailable("It does not answer.")
    monkeypatch.setattr(tier.ray, "nodes", lambda: [node])
    monkeypatch.setattr(tier.calls, "list_actors", lambda *_: [])
    monkeypatch.setattr(tier.calls, "kill_actor", Mock())
    monkeypatch.setattr(tier.calls, "ask", lambda names, *_, **__: dict.fromkeys(names, silent))
    monkeypatch.setattr(tier.calls, "on_node", Mock())
    monkeypatch.setattr(tier.calls, "ask_all", lambda asked, *_: dict.fromkeys(asked, answer))
    told = Mock()
    tier.down(timeout_s=1.0, config=config, observer=Observer(told=told))
    if answer is True:
        told.assert_not_called()
    else:
        assert f"{config.node_dir} may still be on gpu-7 (10.0.0.7): " in told.call_args.args[0]


def test_an_up_that_fails_takes_back_no_arena_that_was_there(monkeypatch):
    config = load_config(None, environ={}, overrides={"ray.address": "10.0.0.5:6379"})
    monkeypatch.setattr(launch.connection, "connect_configured", lambda _: None)
    monkeypatch.setattr(launch.connection, "disconnect", lambda: None)
    monkeypatch.setattr(launch, "list_actors", list)
    monkeypatch.setattr(tier, "up", Mock(side_effect=CapacityError("One node has no room.")))
    monkeypatch.setattr(tier, "down", down := Mock())
    with pytest.raises(CapacityError):
        launch.bring_up(config)
    assert down.call_args.kwargs["only_new"]
    monkeypatch.setattr(tier, "up", Mock(return_value=[]))
    launch.bring_up(config).undo.close()
    assert not down.call_args.kwargs["only_new"]


def test_a_local_up_that_fails_takes_back_no_arena_that_was_there(config, monkeypatch):
    config.node_dir.mkdir(mode=0o700)
    (config.node_dir / "arena").touch()
    monkeypatch.setattr(launch.local_ray, "start", Mock())
    fails = Mock(side_effect=ShardUnavailable("Nobody answers."))
    monkeypatch.setattr(launch.connection, "connect_configured", fails)
    monkeypatch.setattr(launch.connection, "disconnect", lambda: None)
    with pytest.raises(ShardUnavailable):
        launch.bring_up(config)
    assert (config.node_dir / "arena").exists()


def test_a_dashboard_has_a_port_of_its_own_beside_another(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        monkeypatch.setattr(local_ray, "_DASHBOARD_PORT", other.getsockname()[1])
        assert local_ray._dashboard_port() != local_ray._DASHBOARD_PORT
    assert local_ray._dashboard_port() == local_ray._DASHBOARD_PORT


def test_a_ray_that_a_busy_machine_was_too_slow_for_is_started_again(name, script, tmp_path):
    script.write_text(f"""\
if [ ! -e {tmp_path}/tried ]; then
    touch {tmp_path}/tried; echo 'Exception: The current node timed out during startup.'; exit 1
fi
{STARTS}""")
    local_ray.start(name)
    assert (tmp_path / "tried").exists()
    assert local_ray.find(name) is not None


TRACEBACK = (
    r"printf 'Traceback:\n  File x, line 1, in start\n    bind()\n  ^^^^\nValueError: no room\n'"
)


@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        ("echo out of luck; exit 3", 3, "out of luck"),
        (f"{TRACEBACK}; exit 1", 1, "ValueError: no room"),
        (r"printf 'No:\n  it is full\n'; exit 1", 1, "No: it is full"),
        ("kill -9 $$", -signal.SIGKILL, ""),
    ],
)
def test_a_ray_that_does_not_start_is_told_and_cleared_away(name, script, text, status, said):
    script.write_text(text)
    with pytest.raises(ConfigError) as caught:
        local_ray.start(name)
    told = f"Ray did not start, but ended with status {status}; it said: {said}"
    assert str(caught.value) == told
    assert processes_of(name) == []
    assert not local_ray.local_dir(name).exists()


def test_a_ray_that_makes_no_progress_is_given_up(name, script, monkeypatch):
    monkeypatch.setattr(ray_node, "_STILL_S", 0.3)
    script.write_text(f"echo thinking; {STAYS}")
    with pytest.raises(ConfigError, match=r"made no progress within \d s; it said: thinking"):
        local_ray.start(name)
    assert processes_of(name) == []


def test_a_start_that_somebody_ends_says_so(name, script):
    script.write_text(STARTS)
    with pytest.raises(ConfigError, match="was removed while Ray started, as by `kvray down`"):
        local_ray.start(name, waiting=lambda _: local_ray.stop(name))


def test_a_cluster_that_another_process_is_starting_is_left_alone(name):
    directory = local_ray.local_dir(name)
    directory.mkdir(mode=0o700)
    (directory / "ray-start.log").write_text("under way")
    starter = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(starter, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="Another process is starting"):
            local_ray.start(name)
    finally:
        os.close(starter)
    assert (directory / "ray-start.log").read_text() == "under way"
    assert sorted(directory.parent.glob(f"{directory.name}*")) == [directory]


def write_state(name: str, **state: object) -> Path:
    """Write what a Ray of that name would have written down; return its directory."""
    directory = local_ray.local_dir(name)
    directory.mkdir(mode=0o700)
    told = {"address": "10.0.0.66:6379", "token": "t", "dashboard_url": None, **state}
    (directory / "ray.json").write_text(json.dumps(told))
    return directory


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_another_users_directory_is_neither_believed_nor_removed(name):
    mark = {local_ray._MARK: str(local_ray.local_dir(name))}
    with subprocess.Popen(["sleep", "600"], env=mark) as main:
        directory = write_state(name, pid=main.pid)
        wait_for(lambda: local_ray.find(name) is not None)
        os.chown(directory, 12345, 12345)
        assert local_ray.find(name) is None
        main.kill()
    try:
        assert local_ray.find(name) is None
        with pytest.raises(ConfigError, match="is another user's"):
            local_ray.start(name)
        local_ray.stop(name)
        assert (directory / "ray.json").exists()
    finally:
        os.chown(directory, 0, 0)


def test_a_later_process_of_the_same_pid_is_no_cluster(name):
    write_state(name, pid=os.getppid())
    assert local_ray.find(name) is None
    assert not local_ray.stop(name)
    assert psutil.pid_exists(os.getppid())


def test_a_long_name_gets_a_short_directory():
    names = ["x" * 32, "x" * 31 + "y"]
    directories = [local_ray.local_dir(name) for name in names]
    assert len(set(directories)) == 2
    assert all(local_ray._sockets_fit(directory) for directory in directories)


def test_a_long_tmpdir_is_refused_with_the_fix(name, monkeypatch, tmp_path):
    deep = tmp_path / ("d" * 80)
    deep.mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(tempfile, "tempdir", str(deep))
        with pytest.raises(ConfigError, match="set TMPDIR to a shorter one, such as /tmp"):
            local_ray.start(name)
    assert list(deep.iterdir()) == []


STARTING = """
import sys, time
from kvray.actors.tier import local_ray, ray_node
ray_node._START = ("sh", sys.argv[1], "start")
local_ray.start(sys.argv[2], waiting=lambda _: print("waiting", flush=True), die_with_parent=True)
print("started", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("text", "until", "signum"),
    [(STAYS, "waiting", signal.SIGINT), (STARTS, "started", signal.SIGKILL)],
)
def test_it_ends_with_an_interrupted_start_and_with_its_parent(name, script, text, until, signum):
    script.write_text(text)
    command = [sys.executable, "-c", STARTING, script, name]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert any(line.strip() == until for line in process.stdout)
        wait_for(lambda: processes_of(name) != [], "a start")
        process.send_signal(signum)
        process.communicate(timeout=HANG_S)
    wait_for(lambda: local_ray.find(name) is None and processes_of(name) == [], "dying")
    assert until == "started" or not local_ray.local_dir(name).exists()
