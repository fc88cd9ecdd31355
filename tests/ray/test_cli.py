"""`kvray up`, `status` and `down` on a Ray of their own and on one that is there."""

import contextlib
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

import pytest

from kvray.actors.tier import tier
from kvray.cli.page.asker import Asker
from kvray.cli.page.state import STATUS
from kvray.client import Client
from kvray.errors import ConfigError
from tests.kit.ray.command_line import SHM, free_port
from tests.kit.ray.engine import Engine
from tests.ray.conftest import TIMEOUT_S, config_with

pytestmark = pytest.mark.ray


def test_tier_on_a_ray_of_its_own_goes_up_and_down(shell):
    assert "It would be started, with a Ray on this machine" in shell.say("up", "--plan")
    assert shell.leftovers() == []
    port = free_port()
    up = shell.say("up", "--port", str(port))
    assert "is up: 1 shard, 64MiB" in up
    assert f":{port} (local)" in up

    assert "was up already" in shell.say("up")

    probe = shell.run("probe")
    assert (probe.returncode, probe.stderr) == (0, "")
    assert probe.stdout.endswith(" serves, epoch 1.\n")
    found = json.loads(shell.run("status", "--json").stdout)
    assert found["cluster_name"] == shell.cluster_name
    assert [shard["state"] for shard in found["shards"]] == ["serving"]

    assert shell.run("clear", "--yes").stdout == "0 blocks were evicted.\n"
    found = {one["check"]: one for one in json.loads(shell.say("doctor", "--json"))["findings"]}
    assert found["arena"]["verdict"] == found["socket"]["verdict"] == "ok"
    assert found["replicas"]["verdict"] == "hint", "no engine uses it yet"

    assert shell.say("down") == f"The tier {shell.cluster_name} is down.\n"
    assert shell.leftovers() == []


RAY_BEGINS, RAY_ANSWERS, ARENA_IS_MADE = "kvray-*/ray-start.log", "kvray-*/ray.json", "arena"


@pytest.mark.parametrize(
    ("moment", "signum"),
    [
        (RAY_BEGINS, signal.SIGTERM),
        pytest.param(RAY_ANSWERS, signal.SIGINT, marks=pytest.mark.long),
        pytest.param(ARENA_IS_MADE, signal.SIGTERM, marks=pytest.mark.long),
    ],
)
def test_interrupted_up_leaves_nothing(shell, moment, signum):
    shell.environ["KVRAY_ARENA__CAPACITY"] = "1GiB"
    done = shell.interrupt(
        "up",
        when=lambda: (
            shell.node_dir.exists()
            if moment == ARENA_IS_MADE
            else any(shell.directory.glob(moment))
        ),
        signum=signum,
    )
    assert done.returncode == 130, done.stderr
    assert done.stderr.splitlines()[-1] == "kvray: interrupted."
    assert shell.leftovers() == []


def test_two_tiers_share_a_running_ray_and_neither_sees_the_other(shell, local, running):
    environ = local.environ() | {"KVRAY_RAY__ADDRESS": local.address}
    up = shell.say("up", "--address", local.address, **environ)
    assert f"Ray: {local.address} (--address)\n" in up
    shard = shell.shard(**environ)
    (other,) = tier.status(timeout_s=10)["shards"]
    assert shard["arena"]["arena_id"] != other["arena"]["arena_id"]
    shell.say("down", **environ)
    assert shell.leftovers() == []
    (after,) = tier.status(timeout_s=10)["shards"]
    assert (after["pid"], after["state"]) == (other["pid"], "serving")
    done = shell.run("status", **environ)
    assert done.returncode == 2
    assert f"a tier that runs ({running.cluster_name})" in done.stderr


@pytest.mark.long
def test_after_a_crash_of_everything_up_adopts_the_arena_and_engines_go_on(shell):
    def swept() -> list[str]:
        return [arena["outcome"] for arena in json.loads(shell.say("sweep", "--json"))["arenas"]]

    with tempfile.TemporaryDirectory(dir=SHM, prefix="kvray-test-") as own:  # `sweep` sees no other
        shell.environ["KVRAY_ARENA__DIR"] = own
        shell.say("up")
        with contextlib.closing(Engine(Path(own) / f"kvray-{shell.cluster_name}")) as engine:
            engine.say("store(link.arena, chain(5)) and None")
            while found := shell.processes():
                for process in found:
                    process.kill()
            assert swept() == ["attached"]
            assert "is up: 1 shard" in shell.say("up")
            arena = shell.shard()["arena"]
            assert (arena["shard_epoch"], arena["blocks"]) == (2, 5)
            assert swept() == ["owned"]
            fetched = "fetch(link.arena, chain(5), link.arena.lease(chain(5))[0])"
            assert engine.say(fetched) == "True"
            shell.say("down")
            assert shell.leftovers() == []
            assert os.listdir(own) == []


WAIT_S = 120.0
LEFT_SCREEN, SHOWN_CURSOR = b"\x1b[?1049l", b"\x1b[?25h"


@pytest.mark.long
def test_watching_goes_on_over_a_lost_tier_and_leaves_the_terminal_as_it_was(shell, local, running):
    ours, theirs = pty.openpty()
    before, seen = termios.tcgetattr(theirs), b""

    def read_until(text: bytes, start: int = 0) -> int:
        """Return how much was written when `text` was, after the first `start` bytes."""
        nonlocal seen
        deadline = time.monotonic() + WAIT_S
        while text not in seen[start:]:
            assert time.monotonic() < deadline, seen[-2000:]
            if select.select([ours], [], [], 0.2)[0]:
                seen += os.read(ours, 65_536)
        return len(seen)

    environ = {**shell.environ, **local.environ(), "KVRAY_CLUSTER_NAME": running.cluster_name}
    with subprocess.Popen(
        [sys.executable, "-m", "kvray", "status", "--watch", "--address", local.address],
        env={**environ, "TERM": "xterm", "LINES": "40"},
        cwd=shell.directory,
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            at = read_until(b"serving")
            tier.down(timeout_s=TIMEOUT_S, config=running)
            at = read_until(b"No answer", at)
            tier.up(running, timeout_s=TIMEOUT_S)
            read_until(b"serving", at)
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=WAIT_S) == 0
            read_until(LEFT_SCREEN)
        finally:
            process.kill()
    assert SHOWN_CURSOR in seen
    assert termios.tcgetattr(theirs) == before
    os.close(ours)
    os.close(theirs)


REFUSED = r"with a token only; name a file that has it in security\.auth_token_file"


def write_token(path: Path, token: str = "of this very test") -> str:
    path.write_text(token)
    path.chmod(0o600)
    return str(path)


def test_a_tier_with_a_token_refuses_who_has_none_and_so_does_its_page(
    config, tmp_path, monkeypatch
):
    monkeypatch.setenv("KVRAY_CLUSTER_NAME", config.cluster_name)
    output = io.StringIO()
    asker = Asker(None, None, output)
    named = {"security__auth_token_file": write_token(tmp_path / "token")}
    guarded = config_with(**named)
    other = config_with(security__auth_token_file=write_token(tmp_path / "other", "x" * 20))
    tier.up(guarded, timeout_s=TIMEOUT_S)
    try:
        for without in (config, other):
            with pytest.raises(ConfigError, match=REFUSED):
                tier.down(timeout_s=TIMEOUT_S, config=without)
            with pytest.raises(ConfigError, match=REFUSED), Client(without) as client:
                client.clear()
            given = without.security.auth_token_file
            changed = config_with(arena__limbo_s=7.0, security__auth_token_file=given)
            with pytest.raises(ConfigError, match=REFUSED):
                tier.up(changed, timeout_s=TIMEOUT_S)
            with Client(without) as client:
                assert client.status()["shards"][0]["state"] == "serving"
        assert not asker._attempt(STATUS, asker._status)
        assert "security.auth_token_file" in json.loads(output.getvalue())["trouble"]
        monkeypatch.setenv("KVRAY_SECURITY__AUTH_TOKEN_FILE", str(tmp_path / "token"))
        assert asker._attempt(STATUS, asker._status)
        with Client(guarded) as client:
            assert client.clear() == 0
        tier.up(config_with(arena__limbo_s=7.0, **named), timeout_s=TIMEOUT_S)
    finally:
        assert tier.down(timeout_s=TIMEOUT_S, config=guarded)
