"""Connections to a Ray of our own or somebody else's; how ours starts is in tests/unit."""

import os
import signal
import socket
import subprocess
import sys
import time
from unittest.mock import Mock

import pytest

from kvray.actors.tier import connection, launch, local_ray
from kvray.config import load_config
from kvray.errors import ConfigError, ShardUnavailable
from tests import forks
from tests.kit.ray.command_line import ROOT
from tests.waiting import HANG_S

pytestmark = pytest.mark.ray


@pytest.mark.long
def test_what_a_killed_start_left_is_ended_by_the_next():
    name = f"pytest-{os.getpid()}-own"
    code = f"from kvray.actors.tier import local_ray; local_ray.start({name!r}, waiting=print)"
    command = [sys.executable, "-u", "-c", code]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        time.sleep(1.0)
        process.kill()
        process.wait(HANG_S)
    try:
        orphans = local_ray._family(local_ray.local_dir(name))
        assert orphans
        local = local_ray.start(name)
        assert local_ray.find(name) == local
        assert not any(orphan.is_running() for orphan in orphans)
    finally:
        assert local_ray.stop(name)
    assert not local_ray.local_dir(name).exists()


def test_who_may_not_end_a_tier_does_not_end_its_ray_either(monkeypatch):
    for name in ("local_ray", "connection", "_end_local_ray"):
        monkeypatch.setattr(launch, name, Mock())
    refuse = Mock(side_effect=ConfigError("This tier is ended with a token only."))
    monkeypatch.setattr(launch, "ask_to_be_admitted", refuse)
    with pytest.raises(ConfigError, match="with a token only"):
        launch.take_down(load_config(environ={}))
    launch._end_local_ray.assert_not_called()


CONNECT = f"""
from kvray.config import load_config
config = load_config(overrides={{'cluster_name': 'pytest-{os.getpid()}-t'}})
connection.connect_configured(config)
"""
"""Connects to the session's Ray by the name of its tier."""


def run(code: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    """Run `code` in a process that has no connection to Ray yet."""
    code = f"from kvray.actors.tier import connection\n{code}"
    options = {"cwd": ROOT, "env": os.environ | environ, "timeout": 60}
    return forks.run(sys.executable, "-c", code, **options)


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


OTHER = r"Ray head, or one with TLS; correct ray\.address"


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"", OTHER),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", OTHER),
        (None, r"^Nobody answers .* \(timed out\)"),
    ],
    ids=["closes", "HTTP", "hangs"],
)
def test_a_port_of_something_else_or_of_a_head_that_hangs_is_told_in_seconds(
    answer, says, monkeypatch
):
    monkeypatch.setattr(connection, "_PROBE_S", 1.0)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        peer = _answering(listener, answer)
        began = time.monotonic()
        with pytest.raises(ShardUnavailable, match=says):
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


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("os.access = lambda *_: False", "raylet belongs; run this as that user."),
        ("private.Path = lambda _: PosixPath('/none')", "it has no /none; run this on a node"),
    ],
    ids=["another user", "no node"],
)
def test_a_ray_that_is_not_of_here_is_told_and_does_not_end_the_process(local, place, says):
    imports = "import os; from pathlib import PosixPath; from kvray.actors.ray_glue import private"
    done = run(f"{imports}\n{place}\n{CONNECT}")
    assert says in done.stderr.splitlines()[-1]
    assert (done.returncode, "ShardUnavailable" in done.stderr) == (1, True)


def test_signal_handlers_outlive_the_connection(local):
    done = run(
        "import os, signal\nsignal.signal(signal.SIGTERM, lambda *_: print('ours'))\n"
        f"{CONNECT}\nos.kill(os.getpid(), signal.SIGTERM)\n"
        "connection.disconnect()\nos.kill(os.getpid(), signal.SIGTERM)"
    )
    assert (done.returncode, done.stdout.split()) == (0, ["ours", "ours"]), done.stderr
