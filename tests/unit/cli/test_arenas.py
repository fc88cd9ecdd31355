"""`kvray sweep` and `kvray verify` on real arenas: what they say, exit with, and leave."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvray.actors.owner.inventory import naming_unused
from kvray.cli.explain import age_text
from kvray.errors import CapacityError
from kvray.store import Arena
from kvray.store.arena.payload import slot_bytes
from tests.far import ROOT
from tests.forks import RunKvray, assert_refused, run
from tests.unit.actors.shard_process import shard_process
from tests.unit.conftest import StartChild
from tests.unit.store import small_arena
from tests.unit.store.child import Child
from tests.waiting import HANG_S


@pytest.fixture
def sweep(run_kvray: RunKvray, parent: Path) -> Callable[..., dict[str, Any]]:
    """Runs the command; returns arenas by their directories' names."""

    def run_sweep(*args: str, status: int = 0) -> dict[str, Any]:
        done = run_kvray("sweep", "--json", "--dir", parent, *args)
        assert (done.returncode, done.stderr) == (status, "")
        found = json.loads(done.stdout)
        assert found["directory"] == str(parent)
        return {Path(arena["path"]).name: arena for arena in found["arenas"]}

    return run_sweep


@pytest.fixture
def dead(parent: Path) -> Path:
    directory = parent / "kvray-dead"
    with shard_process(directory, "a") as shard:
        shard.kill()
    return directory


@pytest.fixture
def attached(parent: Path, child_in: StartChild) -> Child:
    """An engine that has outlived its shard."""
    directory = parent / "kvray-attached"
    directory.mkdir()
    small_arena.make_arena(directory).close()
    engine = child_in(directory)
    engine.say("arena.join('engine-1')")
    return engine


def outcomes(found: dict[str, Any]) -> dict[str, str]:
    return {name: arena["outcome"] for name, arena in found.items()}


def test_an_arena_that_nobody_uses_is_shown_and_removed_but_not_by_a_dry_run(dead, parent, sweep):
    (parent / "kvray-half").mkdir()
    before = sorted(parent.rglob("*"))
    assert outcomes(sweep("--dry-run")) == {"kvray-dead": "unused", "kvray-half": "unused"}
    assert sorted(parent.rglob("*")) == before
    arena = sweep()["kvray-dead"]
    assert (arena["cluster_name"], arena["outcome"]) == ("test", "removed")
    assert arena["num_bytes"] > 64 * 4096
    assert 0 <= arena["age_s"] < 600
    assert (arena["owner"], arena["holders"], arena["defect"]) == (None, [], None)
    assert not dead.exists()
    assert sweep() == {}


def test_an_arena_without_room_names_the_unused_ones_and_no_other(dead, attached, parent):
    def said() -> str:
        with pytest.raises(CapacityError) as caught, naming_unused(parent):
            raise CapacityError("It needs 2GiB; lower arena.capacity.")
        return str(caught.value)

    assert said().startswith("It needs 2GiB; lower arena.capacity, or run `kvray sweep`, which ")
    assert said().endswith(f" of {dead}.")
    shutil.rmtree(dead)
    assert said() == "It needs 2GiB; lower arena.capacity."


def test_an_arena_with_an_owner_is_kept_also_while_that_is_frozen(parent, sweep):
    with shard_process(parent / "kvray-owned", "kvray-shard-0") as shard:
        arena = sweep()["kvray-owned"]
        assert arena["outcome"] == "owned"
        assert arena["owner"].pop("since") > 1e9
        assert arena["owner"] == {"shard": "kvray-shard-0", "pid": shard.process.pid}
        assert arena["holders"] == [{"label": "test", "pid": shard.process.pid}]
        shard.freeze()
        assert outcomes(sweep()) == {"kvray-owned": "owned"}


def test_an_arena_with_an_engine_and_no_owner_is_kept_until_the_engine_ends(
    attached, parent, sweep
):
    arena = sweep()["kvray-attached"]
    assert arena["outcome"] == "attached"
    assert arena["holders"] == [{"label": "engine-1", "pid": attached.pid}]
    assert attached.say("arena.retired") == "False"
    attached.kill()
    assert outcomes(sweep()) == {"kvray-attached": "removed"}


@pytest.mark.parametrize(
    ("files", "defect"),
    [
        ({}, "There is no arena"),
        ({"arena.0123.new": b"half", "lock.0123": b"", "owner": b""}, "There is no arena"),
        ({"arena": b"garbage"}, "too short"),
        ({"arena": b"garbage" * 1000}, "is no arena"),
        ({"arena": b"KVRAYARN\x63" + bytes(5000)}, "is an arena of format 99"),
        ({"owner": b"", "owner.json": b"{", "socket": b""}, "There is no arena"),
    ],
    ids=["empty", "half-made", "short", "foreign", "another format", "no arena"],
)
def test_what_is_no_whole_arena_is_removed(parent, sweep, files, defect):
    directory = parent / "kvray-broken"
    directory.mkdir()
    for name, content in files.items():
        (directory / name).write_bytes(content)
    arena = sweep()["kvray-broken"]
    assert arena["cluster_name"] == "broken"
    assert defect in arena["defect"]
    assert (arena["outcome"], arena["age_s"]) == ("removed", None)
    assert not directory.exists()


def test_directories_that_are_no_shards_are_left_alone(parent, sweep):
    for name, file in (("kvray-other", "precious"), ("somebody", "arena")):
        (parent / name).mkdir()
        (parent / name / file).touch()
    (parent / "kvray-file").touch()
    (parent / "kvray-link").symlink_to(parent / "somebody")
    before = sorted(parent.rglob("*"))
    assert sweep() == {}
    assert sorted(parent.rglob("*")) == before


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_another_users_arenas_are_not_touched(dead, sweep):
    os.chown(dead, 12345, 12345)
    assert sweep() == {}
    assert (dead / "arena").exists()


def test_what_cannot_be_removed_and_files_of_others_are_left_and_told(dead, run_kvray, sweep):
    (dead / "lock.d" / "precious").mkdir(parents=True)
    assert outcomes(sweep(status=1)) == {"kvray-dead": "left"}
    done = run_kvray("sweep", "--dir", dead.parent)
    assert done.returncode == 1
    assert f"{dead} could not be removed: {dead}/lock.d (Is a directory); remove" in done.stdout
    (dead / "lock.d" / "precious").rename(dead / "precious")
    (dead / "lock.d").rmdir()
    arena = sweep(status=1)["kvray-dead"]
    assert (arena["outcome"], arena["problem"]) == ("left", "it has files of others.")
    assert [path.name for path in dead.iterdir()] == ["precious"]
    assert sweep() == {}


def test_the_table_tells_who_has_what(dead, attached, parent, run_kvray):
    with shard_process(parent / "kvray-owned", "kvray-shard-0") as shard:
        done = run_kvray("sweep", "--dry-run", "--dir", parent)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.strip()]
    lines = {row[0]: " ".join(row) for row in rows}
    assert f"engine-1 ({attached.pid}) kept: a shard may" in lines["kvray-attached"]
    assert "none none would be removed" in lines["kvray-dead"]
    pid = shard.process.pid
    assert f"kvray-shard-0 ({pid}) test ({pid}) kept: its" in lines["kvray-owned"]


def test_an_age_is_told_in_its_largest_unit():
    texts = {-1: "0 s", 0.5: "0 s", 59: "59 s", 60: "1 min", 7300: "2 h", 86400 * 3: "3 d"}
    assert {age_s: age_text(age_s) for age_s in texts} == texts


KEYS = small_arena.chain(20)


@pytest.fixture
def verify(run_kvray: RunKvray, parent: Path) -> RunKvray:
    return lambda *args: run_kvray("verify", *args, KVRAY_ARENA__DIR=str(parent))


@pytest.fixture
def make(parent: Path) -> Iterator[Callable[..., Arena]]:
    """Makes arenas of clusters named as told, of which this process is a holder."""
    made: list[Arena] = []

    def make_one(cluster_name: str = "kvray", **figures: int) -> Arena:
        directory = parent / f"kvray-{cluster_name}"
        directory.mkdir()
        made.append(small_arena.make_arena(directory, asked=small_arena.spec(**figures)))
        made[-1].join("test")
        return made[-1]

    yield make_one
    for arena in made:
        arena.close()


@pytest.mark.parametrize("as_json", [False, True])
def test_a_valid_arena_exits_with_0_and_a_wrong_block_is_named_and_exits_with_1(
    verify, make, parent, as_json
):
    arena = make()
    slots = small_arena.store(arena, KEYS).slots
    done = verify()
    assert (done.returncode, done.stderr) == (0, "")
    row = next(line for line in done.stdout.splitlines() if "kvray-kvray" in line).split()
    assert (row[1:3], row[4:]) == (["20", "80KiB"], ["0", "0"])
    slot_bytes(arena.tables, int(slots[7]))[17] ^= 1
    name = arena.tables.slot_key[int(slots[7])].tobytes().hex()[:8]
    done = verify(*["--json"] * as_json)
    assert done.returncode == 1
    if as_json:
        found = json.loads(done.stdout)
        assert found["errors"] == []
        (one,) = found["arenas"]
        assert one.pop("seconds") >= 0
        blocks = {
            "blocks": 20,
            "bytes": 20 * small_arena.SLOT,
            "corrupt": [name],
            "damage": {},
            "skipped": 0,
        }
        assert one == {"cluster_name": "test", "directory": str(parent / "kvray-kvray"), **blocks}
    else:
        assert f"corrupt, now quarantined: {name}" in done.stdout
    assert small_arena.num_here(arena, KEYS) == 7
    assert verify().returncode == 0


def test_damaged_tables_are_said_and_exit_with_1(verify, make):
    arena = make()
    arena.tables.slot_parent[int(small_arena.store(arena, KEYS).slots[7])] = 2**20
    done = verify()
    assert done.returncode == 1
    assert "tables damaged: 1 parents, 1 children." in done.stdout
    (arena_found,) = json.loads(verify("--json").stdout)["arenas"]
    assert arena_found["damage"] == {"parents": 1, "children": 1}
    small_arena.overwrite(arena.tables)
    done = verify()
    assert (done.returncode, done.stderr) == (1, "")
    assert "tables damaged" in done.stdout


def test_all_checks_every_arena_of_this_user_and_names_those_that_cannot_be(verify, parent, make):
    for name in ("a", "b"):
        small_arena.store(make(name), KEYS)
    (parent / "kvray-c").mkdir()
    (parent / "kvray-d").mkdir()
    (parent / "kvray-d" / "arena").write_bytes(b"no arena")
    done = verify("--all")
    assert done.returncode == 2
    assert re.findall(r"kvray-\w\b", done.stdout) == ["kvray-a", "kvray-b"]
    assert "kvray-d/arena is too short to be an arena" in done.stderr
    assert done.stderr.count("\n") == 1, "one sentence"


def test_no_arena_is_an_error_that_says_how_to_get_one_but_no_arenas_are_valid(
    run_kvray, verify, parent, tmp_path
):
    assert_refused(verify(), "start the tier with `kvray up`")
    assert list(parent.iterdir()) == []
    done = verify("--all")
    assert (done.returncode, done.stdout) == (0, f"This user has no arena under {parent}.\n")
    (tmp_path / "kvray.yaml").write_text(f"arena: {{dir: {parent}}}\n")
    done = run_kvray("sweep", "-c", "kvray.yaml")
    assert done.stdout == f"There are no arenas of this user in {parent}.\n"


def verifying(parent: Path, stderr: int = subprocess.PIPE) -> "subprocess.Popen[str]":
    environ = {**os.environ, "KVRAY_ARENA__DIR": str(parent), "TERM": "xterm", "COLUMNS": "120"}
    command = [sys.executable, "-m", "kvray", "verify"]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=stderr, text=True)


def test_a_terminal_sees_how_far_it_is(parent, make):
    small_arena.store(make(), KEYS)
    ours, theirs = os.openpty()
    command = verifying(parent, stderr=theirs)
    stdout, _ = command.communicate(timeout=HANG_S)
    os.close(theirs)
    shown = os.read(ours, 2**16).decode()
    os.close(ours)
    assert "Checking kvray-kvray" in shown
    assert (command.returncode, "Checking" in stdout) == (0, False)


def verify_until_it_has_joined(arena: Arena, parent: Path) -> "subprocess.Popen[str]":
    """Start `kvray verify`, again if it was over in no time; the arena's lock is kept."""
    while True:
        command = verifying(parent)
        while command.poll() is None:
            assert small_arena.acquire(arena._lock, HANG_S)
            if arena.stats()["holders"] == 2:
                return command
            small_arena.release(arena._lock)
            time.sleep(0.001)
        assert command.communicate()[1] == ""


def test_ctrl_c_leaves_no_lease_and_no_holder(parent, make):
    arena = make(num_slabs=64, slots_per_slab=256)
    small_arena.store(arena, small_arena.chain(64 * 256))
    command = verify_until_it_has_joined(arena, parent)
    # Nothing new can be leased while the lock is kept, so it does not end before the signal.
    command.send_signal(signal.SIGINT)
    time.sleep(0.1)
    small_arena.release(arena._lock)
    stdout, stderr = command.communicate(timeout=HANG_S)
    assert (command.returncode, stdout, stderr) == (130, "", "kvray: interrupted.\n")
    assert not arena.tables.slot_leases.any()
    assert arena.stats()["holders"] == 1


@pytest.mark.parametrize("command", ["sweep", "verify"])
def test_no_ray_is_imported(parent, make, command):
    small_arena.store(make(), KEYS)
    code = "from kvray.cli.app import app; import sys; app(sys.argv[1:], standalone_mode=False);"
    code += "sys.exit('ray' in sys.modules or 'torch' in sys.modules)"
    environ = {**os.environ, "KVRAY_ARENA__DIR": str(parent)}
    assert run(sys.executable, "-c", code, command, cwd=ROOT, env=environ).returncode == 0
