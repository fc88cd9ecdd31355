"""Starting, finding and ending a Ray of our own, and every way in which that fails."""

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

from kvray.actors.tier import local_ray
from kvray.actors.tier.local_ray import LocalRay
from kvray.errors import ConfigError
from tests.waiting import HANG_S, wait_for

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parents[2]


@pytest.fixture
def name() -> Iterator[str]:
    """The name of a cluster of which nothing is left after the test."""
    made = f"pytest-{os.getpid()}-own"
    yield made
    local_ray.stop(made)
    assert not local_ray.local_dir(made).exists()


def processes_of(name: str) -> list[psutil.Process]:
    return local_ray._family(local_ray.local_dir(name))


def test_a_port_in_use_is_refused_before_anything_starts(name: str) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        with pytest.raises(ConfigError, match=r"choose another --port"):
            local_ray.start(name, port=taken.getsockname()[1])
    assert not local_ray.local_dir(name).exists()


@pytest.mark.long
def test_a_ray_that_a_busy_machine_was_too_slow_for_is_started_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_second_cluster_of_the_same_name_is_refused(local: LocalRay) -> None:
    name = f"pytest-{os.getpid()}-t"
    with pytest.raises(ConfigError, match="is running already"):
        local_ray.start(name)
    assert local_ray.find(name) == local


def test_a_cluster_that_another_process_is_starting_is_left_alone(name: str) -> None:
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


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_another_users_directory_is_neither_believed_nor_removed(name: str) -> None:
    directory = local_ray.local_dir(name)
    directory.mkdir(mode=0o700)
    me = psutil.Process()
    state = {"address": "10.0.0.66:6379", "token": "t", "pid": me.pid, "started": me.create_time()}
    (directory / "ray.json").write_text(json.dumps(state | {"dashboard_url": None}))
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


def test_a_later_process_of_the_same_pid_is_no_cluster(name: str) -> None:
    directory = local_ray.local_dir(name)
    directory.mkdir(mode=0o700)
    state = {"address": "a:1", "token": "t", "pid": os.getppid(), "started": 1.0}
    (directory / "ray.json").write_text(json.dumps(state | {"dashboard_url": None}))
    assert local_ray.find(name) is None
    assert not local_ray.stop(name)
    assert psutil.pid_exists(os.getppid())


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"pid": 1}', '{"pid": "x"}'])
def test_a_damaged_state_file_is_no_cluster(name: str, text: str) -> None:
    directory = local_ray.local_dir(name)
    directory.mkdir(mode=0o700)
    (directory / "ray.json").write_text(text)
    assert local_ray.find(name) is None


def test_an_address_counts_once_it_is_written(tmp_path: Path) -> None:
    assert local_ray.read_address(tmp_path) == ""
    file = tmp_path / "ray_current_cluster"
    file.touch()  # as Ray makes it, before it writes
    assert local_ray.read_address(tmp_path) == ""
    file.write_text("10.0.0.5:6379")
    assert local_ray.read_address(tmp_path) == "10.0.0.5:6379"


def test_a_long_name_gets_a_short_directory() -> None:
    names = ["x" * 32, "x" * 31 + "y"]
    directories = [local_ray.local_dir(name) for name in names]
    assert len(set(directories)) == 2
    assert all(local_ray._sockets_fit(directory) for directory in directories)


def test_a_long_tmpdir_is_refused_with_the_fix(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    deep = tmp_path / ("d" * 80)
    deep.mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(tempfile, "tempdir", str(deep))
        with pytest.raises(ConfigError, match="set TMPDIR to a shorter one, such as /tmp"):
            local_ray.start(name)
    assert list(deep.iterdir()) == []


def test_a_ray_that_does_not_start_is_told_and_cleared_away(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_ray, "_OBJECT_STORE_BYTES", 1)
    with pytest.raises(ConfigError, match=r"Ray did not start, but ended with status \d"):
        local_ray.start(name)
    assert processes_of(name) == []
    assert not local_ray.local_dir(name).exists()


STARTING = """
import sys
def waiting(elapsed_s):
    print("waiting", flush=True)
local_ray.start(sys.argv[1], waiting=waiting, die_with_parent=len(sys.argv) > 2)
print("started", flush=True)
import time; time.sleep(60)
"""


def starting(name: str, until: str, *args: str) -> "subprocess.Popen[str]":
    """Return a process that starts a cluster and has got as far as saying `until`."""
    code = f"from kvray.actors.tier import local_ray\n{STARTING}"
    process = subprocess.Popen(
        [sys.executable, "-c", code, name, *args], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == until:
            break
    return process


def reap(process: "subprocess.Popen[str]") -> None:
    process.wait(HANG_S)  # what it ends may itself take half a minute
    assert process.stdout is not None
    process.stdout.close()


def test_ctrl_c_while_it_starts_leaves_nothing(name: str) -> None:
    process = starting(name, "waiting")
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    reap(process)
    assert processes_of(name) == []
    assert not local_ray.local_dir(name).exists()


def test_what_a_killed_start_left_is_ended_by_the_next(name: str) -> None:
    process = starting(name, "waiting")
    time.sleep(1.0)
    process.kill()
    reap(process)
    orphans = processes_of(name)
    assert orphans
    assert local_ray.find(name) is None
    local = local_ray.start(name)
    assert local_ray.find(name) == local
    assert not any(orphan.is_running() for orphan in orphans)
    assert local_ray.stop(name)
    assert processes_of(name) == []


@pytest.mark.long
def test_it_dies_with_its_parent_if_asked_to(name: str) -> None:
    process = starting(name, "started", "die")
    assert local_ray.find(name) is not None
    process.kill()
    reap(process)
    wait_for(lambda: local_ray.find(name) is None and processes_of(name) == [], "dying")
