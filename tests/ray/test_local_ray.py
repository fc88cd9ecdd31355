"""A Ray of our own or somebody else's: starting, finding, reaching, ending, and every failure."""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from kvray.actors.tier import connection, local_ray
from kvray.errors import ConfigError, ShardUnavailable
from tests.kit.ray.command_line import ROOT
from tests.waiting import HANG_S, wait_for

pytestmark = pytest.mark.ray


@pytest.fixture
def name() -> Iterator[str]:
    """The name of a cluster of which nothing is left after the test."""
    made = f"pytest-{os.getpid()}-own"
    yield made
    local_ray.stop(made)
    assert not local_ray.local_dir(made).exists()


def processes_of(name: str) -> list[psutil.Process]:
    return local_ray._family(local_ray.local_dir(name))


def test_a_port_in_use_is_refused_before_anything_starts(name):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        with pytest.raises(ConfigError, match=r"choose another --port"):
            local_ray.start(name, port=taken.getsockname()[1])
    assert not local_ray.local_dir(name).exists()


@pytest.mark.long
def test_a_ray_that_a_busy_machine_was_too_slow_for_is_started_again(name, tmp_path, monkeypatch):
    command = local_ray._command
    script = f"""\
if [ ! -e {tmp_path}/tried ]; then
    touch {tmp_path}/tried; echo 'Exception: The current node timed out during startup.'; exit 1
fi
exec "$@"
"""
    monkeypatch.setattr(
        local_ray,
        "_command",
        lambda *args, **kwargs: ["sh", "-c", script, "sh", *command(*args, **kwargs)],
    )
    local_ray.start(name, die_with_parent=True)
    assert (tmp_path / "tried").exists()
    assert local_ray.find(name) is not None


def test_a_second_cluster_of_the_same_name_is_refused(local):
    name = f"pytest-{os.getpid()}-t"
    with pytest.raises(ConfigError, match="is running already"):
        local_ray.start(name)
    assert local_ray.find(name) == local


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
    me = psutil.Process()
    directory = write_state(name, pid=me.pid, started=me.create_time())
    assert local_ray.find(name) is not None
    os.chown(directory, 12345, 12345)
    try:
        assert local_ray.find(name) is None
        with pytest.raises(ConfigError, match="is another user's"):
            local_ray.start(name)
        local_ray.stop(name)
        assert (directory / "ray.json").exists()
    finally:
        os.chown(directory, 0, 0)


def test_a_later_process_of_the_same_pid_is_no_cluster(name):
    write_state(name, pid=os.getppid(), started=1.0)
    assert local_ray.find(name) is None
    assert not local_ray.stop(name)
    assert psutil.pid_exists(os.getppid())


def test_an_address_counts_once_it_is_written(tmp_path):
    assert local_ray.read_address(tmp_path) == ""
    file = tmp_path / "ray_current_cluster"
    file.touch()  # as Ray makes it, before it writes
    assert local_ray.read_address(tmp_path) == ""
    file.write_text("10.0.0.5:6379")
    assert local_ray.read_address(tmp_path) == "10.0.0.5:6379"


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


def test_a_ray_that_does_not_start_is_told_and_cleared_away(name, monkeypatch):
    monkeypatch.setattr(local_ray, "OBJECT_STORE_BYTES", 1)
    with pytest.raises(ConfigError, match=r"Ray did not start, but ended with status \d"):
        local_ray.start(name)
    assert processes_of(name) == []
    assert not local_ray.local_dir(name).exists()


STARTING = """
import sys, time
from kvray.actors.tier import local_ray
def waiting(elapsed_s):
    print("waiting", flush=True)
local_ray.start(sys.argv[1], waiting=waiting, die_with_parent=len(sys.argv) > 2)
print("started", flush=True)
time.sleep(60)
"""


def end_while_it_says(until: str, signum: signal.Signals, name: str, *args: str) -> None:
    """Have a process start a cluster, and end it with a signal a moment after it says `until`."""
    command = [sys.executable, "-c", STARTING, name, *args]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert any(line.strip() == until for line in process.stdout)
        assert until != "started" or local_ray.find(name) is not None
        time.sleep(1.0)
        process.send_signal(signum)
        process.wait(HANG_S)  # what it ends may itself take half a minute


def test_ctrl_c_while_it_starts_leaves_nothing(name):
    end_while_it_says("waiting", signal.SIGINT, name)
    assert processes_of(name) == []
    assert not local_ray.local_dir(name).exists()


def test_what_a_killed_start_left_is_ended_by_the_next(name):
    end_while_it_says("waiting", signal.SIGKILL, name)
    orphans = processes_of(name)
    assert orphans
    assert local_ray.find(name) is None
    local = local_ray.start(name)
    assert local_ray.find(name) == local
    assert not any(orphan.is_running() for orphan in orphans)
    assert local_ray.stop(name)
    assert processes_of(name) == []


@pytest.mark.long
def test_it_dies_with_its_parent_if_asked_to(name):
    end_while_it_says("started", signal.SIGKILL, name, "die")
    wait_for(lambda: local_ray.find(name) is None and processes_of(name) == [], "dying")


CONNECT = f"""
from kvray.config import load_config
config = load_config(overrides={{'cluster_name': 'pytest-{os.getpid()}-t'}})
connection.connect_configured(config)
"""
"""Connects to the session's Ray by the name of its tier."""


def run(code: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    """Run `code` in a process that has no connection to Ray yet."""
    return subprocess.run(
        [sys.executable, "-c", f"from kvray.actors.tier import connection\n{code}"],
        cwd=ROOT,
        env=os.environ | environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1", ":6379", "host:", "ray://a:10001"])
def test_what_is_no_address_is_refused(address):
    with pytest.raises(ConfigError, match="write host:port"):
        connection.connect(address, "t")


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:99999", "no-such-host.invalid:1"])
def test_an_address_where_nobody_listens_is_told_at_once(address):
    began = time.monotonic()
    with pytest.raises(ShardUnavailable, match="Nobody answers at the Ray address"):
        connection.connect(address, "t")
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", None])
def test_a_port_of_something_else_is_told_within_seconds(answer, monkeypatch):
    monkeypatch.setattr(connection, "_PROBE_S", 1.0)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        peer = _answering(listener, answer)
        began = time.monotonic()
        with pytest.raises(ShardUnavailable, match=r"is no Ray head; correct ray\.address"):
            connection.connect(f"127.0.0.1:{listener.getsockname()[1]}", "t")
        assert time.monotonic() - began < 10
        os.kill(peer, signal.SIGKILL)
        os.waitpid(peer, 0)


def _answering(listener: socket.socket, answer: bytes | None) -> int:
    """Fork a process that answers the first connection; None: it never does."""
    child = os.fork()
    if child:
        return child
    client, _ = listener.accept()
    if answer is None:
        time.sleep(60)
    client.sendall(answer or b"")
    client.close()
    os._exit(0)


def test_without_a_local_tier_its_name_is_told():
    done = run(CONNECT.replace(f"pytest-{os.getpid()}-t", "nobodys"))
    assert "No local tier named 'nobodys' is running; start it with `kvray up`" in done.stderr


@pytest.mark.parametrize("token", ["", "0" * 64])
def test_a_wrong_token_is_told_within_seconds(local, token):
    began = time.monotonic()
    done = run(
        f"connection.connect({local.address!r}, 't')", RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token
    )
    assert "RAY_AUTH_MODE and RAY_AUTH_TOKEN if it wants a token." in done.stderr
    assert "ShardUnavailable" in done.stderr
    assert time.monotonic() - began < 30


def test_the_right_token_is_adopted_from_the_local_cluster(local):
    alive = "import ray\nprint(sum(node['Alive'] for node in ray.nodes()))"
    done = run(f"{CONNECT}\n{alive}", RAY_AUTH_MODE="disabled")
    assert int(done.stdout) >= 1, done.stderr


def test_signal_handlers_outlive_the_connection(local):
    done = run(
        "import os, signal\nsignal.signal(signal.SIGTERM, lambda *_: print('ours'))\n"
        f"{CONNECT}\nos.kill(os.getpid(), signal.SIGTERM)\n"
        "connection.disconnect()\nos.kill(os.getpid(), signal.SIGTERM)"
    )
    assert (done.returncode, done.stdout.split()) == (0, ["ours", "ours"]), done.stderr
