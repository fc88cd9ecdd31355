"""Who owns a node's directory, whatever became of processes, and what is removed from it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvray.actors.owner import claim
from kvray.actors.owner.claim import Claim, Owner, owner_of
from kvray.actors.owner.inventory import find_arenas, look_at
from kvray.actors.owner.ownership import NOTE_FILE, sweep
from kvray.actors.shard import shard as shard_module
from kvray.errors import ConfigError, ShardUnavailable
from kvray.node.stage_calls import ShardSocket
from kvray.store.arena.layout import LIMBO
from kvray.store.machine.side_file import OWNER_BYTE
from tests.far import ROOT, Far
from tests.unit.actors.shard_process import STORED, shard_process
from tests.unit.actors.small_shard import failed_with, open_arena, wait_until_serving
from tests.unit.store.small_arena import served
from tests.waiting import HANG_S, wait_for


@pytest.fixture
def stranger(directory: Path) -> Iterator[Far]:
    """A process whose shard is named `b`."""
    with shard_process(directory, "b") as process:
        yield process


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Newcomers wait for tenths of seconds."""
    monkeypatch.setattr(claim, "_GRACE_S", 0.1)
    monkeypatch.setattr(claim, "_WAIT_S", 0.5)


# -- an earlier self ------------------------------------------------------------------------------


@pytest.mark.parametrize("signum", [signal.SIGSTOP, signal.SIGCONT], ids=["frozen", "alive"])
def test_an_earlier_self_is_ended_and_its_arena_adopted(
    older, make_shard, attach, directory, monkeypatch, caplog, signum
):
    monkeypatch.setattr(claim, "_GRACE_S", 0.1)
    older.process.send_signal(signum)
    shard = make_shard(limbo_s=1.0)
    state = attach().tables.slot_state
    wait_for(lambda: (state == LIMBO).sum() == 2, "burying slots that it had reserved")
    wait_for(lambda: not (state == LIMBO).any(), "the end of limbo")
    assert older.process.wait(HANG_S) == -signal.SIGKILL
    assert f"a: ended process {older.process.pid}, an earlier self" in caplog.text
    assert served(attach(), STORED) == 4
    wait_for(lambda: shard.status()["arena"]["leased_blocks"] == 0, "ending its leases")
    assert shard.status()["arena"]["shard_epoch"] == 2
    assert owner_of(directory) == Owner(
        shard="a", pid=os.getpid(), since=json.loads((directory / NOTE_FILE).read_text())["since"]
    )


def test_an_earlier_self_that_was_ended_is_given_time_to_let_go(older, directory, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(claim.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(claim, "_end_earlier_self", lambda *_: True)  # and it still has its locks
    newcomer = Claim(directory, "a")
    for now[0] in (19.0, 38.0):
        assert not newcomer.attempt()
    now[0] = 40.0
    with pytest.raises(ShardUnavailable, match="owns"):
        newcomer.attempt()


def test_an_earlier_self_that_is_ending_is_given_time(older, start_shard):
    shard = start_shard()
    time.sleep(0.2)
    older.call("stop", timeout_s=HANG_S)
    wait_until_serving(shard)
    assert older.process.poll() is None, "it has ended in order"


# -- another shard --------------------------------------------------------------------------------


@pytest.mark.parametrize("signum", [signal.SIGSTOP, signal.SIGCONT], ids=["frozen", "alive"])
def test_another_owner_is_named_and_never_harmed(stranger, start_shard, directory, hasty, signum):
    stranger.process.send_signal(signum)
    shard = start_shard()
    message = failed_with(shard)
    assert message.startswith(f"Shard b (process {stranger.process.pid}, since 20")
    assert "that it was started with, or choose another cluster_name or arena.dir." in message
    assert message.endswith(f"end process {stranger.process.pid} on this machine.")
    shard.stop(retire=True, timeout_s=5)
    stranger.process.send_signal(signal.SIGCONT)
    with contextlib.closing(ShardSocket(directory)) as engine:
        assert engine.call("hello", timeout_s=5)["shard_epoch"] == 1


def test_a_shard_that_was_refused_serves_once_the_other_owner_is_gone(
    stranger, start_shard, attach, hasty, monkeypatch
):
    monkeypatch.setattr(shard_module, "_FAILED_RETRY_S", 0.1)
    crashes: list[str] = []
    shard = start_shard(crashed=lambda: crashes.append("it"))
    failed_with(shard)
    stranger.kill()
    wait_for(lambda: shard.status()["state"] == "serving", "the next try")
    assert (served(attach(), STORED), crashes) == (4, [])


def test_neither_a_note_nor_a_name_alone_makes_an_owner(start_shard, directory, child, hasty):
    directory.mkdir(mode=0o700)
    named, owner = child(), child()
    for process, byte in ((named, Claim(directory, "a")._name_byte), (owner, OWNER_BYTE)):
        process.say(f"(kept := SideFile.at(directory / 'owner')).try_lock({byte})")
    assert f"Process {owner.pid} owns" in failed_with(start_shard())
    note = {"shard": "a", "pid": owner.pid, "since": time.time()}
    (directory / NOTE_FILE).write_text(json.dumps(note))
    assert f"Shard a (process {owner.pid}, since" in failed_with(start_shard())
    assert (named.say("1 + 1"), owner.say("1 + 1")) == ("2", "2")


@pytest.mark.parametrize("note", ["[]", '{"shard": "x", "pid": 1, "since": 2}'])
def test_an_owner_is_known_by_its_lock_whatever_the_note_says(shard, directory, note):
    (directory / NOTE_FILE).write_text(note)
    assert owner_of(directory) == Owner(shard=None, pid=os.getpid(), since=None)
    assert str(owner_of(directory)) == f"Process {os.getpid()}"


def test_nobody_owns_what_is_not_there_or_was_left_and_it_is_taken(older, make_shard, directory):
    assert owner_of(directory) is not None
    older.kill()
    nowhere = directory / "nowhere"
    assert owner_of(directory) is owner_of(nowhere) is None
    assert not nowhere.exists()
    began = time.monotonic()
    make_shard()
    assert time.monotonic() - began < claim._GRACE_S


@pytest.mark.parametrize("retire", [False, True])
def test_a_second_shard_waits_and_then_takes_over(shard, start_shard, child, retire):
    second = start_shard("b")
    time.sleep(0.2)
    assert second.status()["state"] == "starting"
    shard.stop(retire=retire, timeout_s=5)
    wait_until_serving(second)
    lock = f"SideFile.at(directory / 'owner').try_lock({OWNER_BYTE})"
    assert child().say(lock) == "False", "its lock is on a file without a name"


def test_sweep_removes_what_a_dead_shard_left_and_leaves_files_of_others(older, directory):
    assert not sweep(directory)
    older.kill()
    with contextlib.closing(open_arena(directory)) as arena:
        assert sweep(directory)
        assert arena.retired
    assert list(directory.parent.iterdir()) == []
    assert sweep(directory), "there is nothing left"
    directory.mkdir()
    (directory / "precious").touch()
    assert not sweep(directory)
    assert [path.name for path in directory.iterdir()] == ["precious"]


SWEEPER = """
import sys
from pathlib import Path
from kvray.actors.owner.inventory import find_arenas, remove_unused
print("started", flush=True)
while True:
    for finding in find_arenas(Path(sys.argv[1])):
        if finding.use == "unused":
            remove_unused(finding.path)
"""


@pytest.fixture
def sweeper(directory: Path) -> Iterator["subprocess.Popen[str]"]:
    """A process that removes whatever nobody uses, without a pause."""
    command = [sys.executable, "-c", SWEEPER, str(directory.parent)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "started\n"
    yield process
    process.kill()
    process.communicate()


def test_shards_start_and_serve_while_everything_unused_is_removed(sweeper, make_shard, directory):
    for n in range(20):
        shard = make_shard()
        assert look_at(directory).use == "owned"
        shard.stop(retire=n % 2 == 0, timeout_s=10)
    assert sweeper.poll() is None, "it has met an error"


def test_looking_makes_nothing_and_a_file_cannot_be_looked_into(directory):
    assert look_at(directory).use == "unused"
    assert not directory.exists()
    directory.touch()
    with pytest.raises(ConfigError, match="no directory that can be listed"):
        find_arenas(directory)
