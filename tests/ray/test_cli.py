"""`kvray up`, `status` and `down` on a Ray of their own and on one that is there."""

import io
import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvray.actors.ray_glue.calls import list_actors
from kvray.actors.tier import tier
from kvray.cli.page.asker import Asker
from kvray.cli.page.state import STATUS
from kvray.client import Client
from kvray.errors import ConfigError
from tests.kit.ray.command_line import SHM, Shell, free_port, open_shell
from tests.kit.ray.engine import Engine
from tests.ray.conftest import TIMEOUT_S, config_with
from tests.waiting import wait_for

pytestmark = pytest.mark.ray


@pytest.fixture
def shell() -> Iterator[Shell]:
    with open_shell("cli") as shell:
        yield shell


def test_tier_on_a_ray_of_its_own_goes_up_and_down(shell):
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
        *(
            pytest.param(moment, signum, marks=pytest.mark.long)
            for moment in (RAY_BEGINS, RAY_ANSWERS, ARENA_IS_MADE)
            for signum in (signal.SIGINT, signal.SIGTERM)
            if (moment, signum) != (RAY_BEGINS, signal.SIGTERM)
        ),
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


@pytest.mark.long
def test_two_tiers_share_a_ray_and_neither_sees_the_other(shell, local, running):
    environ = local.environ() | {"KVRAY_RAY__ADDRESS": local.address}
    shell.say("up", **environ)
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


def test_failed_up_on_a_running_ray_ends_its_own_actors_only(shell, local, config):
    done = shell.run(
        "up", "--address", local.address, KVRAY_ARENA__CAPACITY="100TiB", **local.environ()
    )
    assert done.returncode == 2, done.stderr
    assert "lower arena.capacity" in done.stderr
    assert list_actors() == []
    assert shell.leftovers() == []


def test_tier_on_a_running_ray_goes_up_and_down(shell, local, config):
    up = shell.say("up", "--address", local.address, **local.environ())
    assert f"Ray: {local.address} (--address)\n" in up
    shell.say("down", "--address", local.address, **local.environ())
    assert list_actors() == []
    assert shell.leftovers() == []


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
    shell.say("up")
    engine = Engine(own_dir / f"kvray-{shell.cluster_name}")
    engine.say("store(link.arena, chain(5)) and None")
    while found := shell.processes():
        for process in found:
            process.kill()
    yield engine
    engine.close()


def served(shell: Shell) -> dict[str, int]:
    """Bring the tier up again; return its arena's figures."""
    assert "is up: 1 shard" in shell.say("up")
    return dict(shell.shard()["arena"])


def swept(shell: Shell) -> list[str]:
    return [arena["outcome"] for arena in json.loads(shell.say("sweep", "--json"))["arenas"]]


@pytest.mark.long
def test_after_a_crash_of_everything_up_adopts_the_arena_and_engines_go_on(
    shell, own_dir, survivor
):
    assert swept(shell) == ["attached"]
    arena = served(shell)
    assert (arena["shard_epoch"], arena["blocks"]) == (2, 5)
    assert swept(shell) == ["owned"]
    assert survivor.say("fetch(link.arena, chain(5), link.arena.lease(chain(5))[0])") == "True"
    shell.say("down")
    assert shell.leftovers() == []
    assert list(own_dir.iterdir()) == []


@pytest.mark.long
def test_after_a_crash_of_everything_up_replaces_an_arena_of_another_size(shell, own_dir, survivor):
    shell.environ["KVRAY_ARENA__CAPACITY"] = "32MiB"
    arena = served(shell)
    assert (arena["shard_epoch"], arena["blocks"]) == (1, 0)
    wait_for(lambda: survivor.say("link.arena.arena_id") == repr(arena["arena_id"]), "attaching")
    shell.say("down")
    assert list(own_dir.iterdir()) == []


@pytest.mark.long
def test_after_a_crash_of_everything_sweep_removes_the_arena(shell, own_dir, survivor):
    survivor.close()
    assert swept(shell) == ["removed"]
    assert list(own_dir.iterdir()) == []
    shell.run("down")
    assert shell.leftovers() == []


WAIT_S = 120.0
LEFT_SCREEN, SHOWN_CURSOR = b"\x1b[?1049l", b"\x1b[?25h"


class Terminal:
    """A pseudo-terminal; `seen` is what was written to it."""

    def __init__(self) -> None:
        self.ours, self.theirs = pty.openpty()
        self.seen = b""

    def read_until(self, text: bytes, start: int = 0) -> None:
        """Return when `text` was written after the first `start` bytes."""
        deadline = time.monotonic() + WAIT_S
        while text not in self.seen[start:]:
            assert time.monotonic() < deadline, self.seen[-2000:]
            if select.select([self.ours], [], [], 0.2)[0]:
                self.seen += os.read(self.ours, 65_536)

    def close(self) -> None:
        os.close(self.ours)
        os.close(self.theirs)


@pytest.mark.long
def test_it_goes_on_over_a_lost_tier_and_leaves_the_terminal_as_it_was(local, running):
    terminal = Terminal()
    before = termios.tcgetattr(terminal.theirs)
    with open_shell("watch") as shell:
        environ = {
            **shell.environ,
            **local.environ(),
            "KVRAY_CLUSTER_NAME": running.cluster_name,
            "TERM": "xterm",
            "LINES": "40",
        }
        with subprocess.Popen(
            [sys.executable, "-m", "kvray", "status", "--watch", "--address", local.address],
            env=environ,
            cwd=shell.directory,
            stdin=terminal.theirs,
            stdout=terminal.theirs,
            stderr=subprocess.DEVNULL,
        ) as process:
            try:
                terminal.read_until(b"serving")
                at = len(terminal.seen)
                tier.down(timeout_s=TIMEOUT_S, config=running)
                terminal.read_until(b"No answer", at)
                at = len(terminal.seen)
                tier.up(running, timeout_s=TIMEOUT_S)
                terminal.read_until(b"serving", at)
                process.send_signal(signal.SIGINT)
                assert process.wait(timeout=WAIT_S) == 0
                terminal.read_until(LEFT_SCREEN)
            finally:
                process.kill()
    assert SHOWN_CURSOR in terminal.seen
    assert termios.tcgetattr(terminal.theirs) == before
    terminal.close()


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


@pytest.mark.long
def test_who_may_not_end_a_tier_ends_no_ray_and_a_broken_token_keeps_nobody_from_down(shell):
    path = shell.directory / "token.yaml"  # of those that no command has left
    token = {"KVRAY_SECURITY__AUTH_TOKEN_FILE": write_token(path)}
    path.chmod(0o644)
    refused = shell.run("up", **token)
    assert (refused.returncode, "has mode 0644" in refused.stderr) == (2, True)
    assert shell.leftovers() == []
    path.chmod(0o600)
    shell.say("up", **token)
    refused = shell.run("down")
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert "security.auth_token_file" in refused.stderr
    shell.say("status")
    path.chmod(0o644)
    shell.say("down")
    assert shell.leftovers() == []
