"""`kvray verify` over real arenas: what it says, what it exits with, what it leaves."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvray.store import Arena
from tests.forks import RunKvray
from tests.unit.store.small_arena import SLOT, chain, make_arena, overwrite, spec, store

KEYS = chain(20)
WAIT_S = 20.0

MakeArena = Callable[..., Arena]


@pytest.fixture
def parent() -> Iterator[Path]:
    """A directory that takes /dev/shm's place."""
    path = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="kvray-test-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def make(parent: Path) -> Iterator[MakeArena]:
    """Makes arenas of clusters named as told, of which this process is a holder."""
    made: list[Arena] = []

    def make_one(cluster_name: str = "kvray", **figures: int) -> Arena:
        directory = parent / f"kvray-{cluster_name}"
        directory.mkdir()
        made.append(make_arena(directory, asked=spec(**figures)))
        made[-1].join("test")
        return made[-1]

    yield make_one
    for arena in made:
        arena.close()


def spoil(arena: Arena, slot: int) -> str:
    """Change one byte of a block; return the name of its key."""
    slab, row = arena.tables.geometry.place_of(slot)
    arena.tables.rows(slab)[row, 17] ^= 1
    return arena.tables.slot_key[slot].tobytes().hex()[:8]


def test_a_sound_arena_exits_with_0(run_kvray: RunKvray, parent: Path, make: MakeArena) -> None:
    store(make(), KEYS)
    done = run_kvray("verify", KVRAY_ARENA__DIR=str(parent))
    assert (done.returncode, done.stderr) == (0, "")
    row = next(line for line in done.stdout.splitlines() if "kvray-kvray" in line).split()
    assert row[1:3] == ["20", "80KiB"]
    assert row[4:] == ["0", "0"]


def test_a_wrong_block_is_named_and_exits_with_1(
    run_kvray: RunKvray, parent: Path, make: MakeArena
) -> None:
    arena = make()
    name = spoil(arena, int(store(arena, KEYS).slots[7]))
    done = run_kvray("verify", KVRAY_ARENA__DIR=str(parent))
    assert done.returncode == 1
    assert f"corrupt, now quarantined: {name}" in done.stdout
    assert arena.match(KEYS) == 7
    assert run_kvray("verify", KVRAY_ARENA__DIR=str(parent)).returncode == 0


def test_damaged_tables_are_said_and_exit_with_1(
    run_kvray: RunKvray, parent: Path, make: MakeArena
) -> None:
    arena = make()
    arena.tables.slot_parent[int(store(arena, KEYS).slots[7])] = 2**20
    done = run_kvray("verify", KVRAY_ARENA__DIR=str(parent))
    assert done.returncode == 1
    assert "tables damaged: 1 parents, 1 children." in done.stdout
    damage = {"parents": 1, "children": 1}
    assert (
        json.loads(run_kvray("verify", "--json", KVRAY_ARENA__DIR=str(parent)).stdout)["arenas"][0][
            "damage"
        ]
        == damage
    )


def test_overwritten_tables_are_said_in_a_sentence(
    run_kvray: RunKvray, parent: Path, make: MakeArena
) -> None:
    arena = make()
    store(arena, KEYS)
    overwrite(arena.tables)
    done = run_kvray("verify", KVRAY_ARENA__DIR=str(parent))
    assert done.returncode == 1
    assert "tables damaged" in done.stdout
    assert done.stderr == ""


def test_json_has_every_figure(run_kvray: RunKvray, parent: Path, make: MakeArena) -> None:
    arena = make()
    name = spoil(arena, int(store(arena, KEYS).slots[7]))
    done = run_kvray("verify", "--json", KVRAY_ARENA__DIR=str(parent))
    found = json.loads(done.stdout)
    assert found["errors"] == []
    assert found["arenas"][0].pop("seconds") >= 0
    assert found["arenas"] == [
        {
            "cluster_name": "test",
            "directory": str(parent / "kvray-kvray"),
            "blocks": 20,
            "bytes": 20 * SLOT,
            "corrupt": [name],
            "damage": {},
            "skipped": 0,
        }
    ]


def test_all_checks_every_arena_of_this_user_and_names_those_that_cannot_be(
    run_kvray: RunKvray, parent: Path, make: MakeArena
) -> None:
    for name in ("a", "b"):
        store(make(name), KEYS)
    (parent / "kvray-c").mkdir()
    (parent / "kvray-d").mkdir()
    (parent / "kvray-d" / "arena").write_bytes(b"no arena")
    done = run_kvray("verify", "--all", KVRAY_ARENA__DIR=str(parent))
    assert done.returncode == 2
    assert "kvray-a" in done.stdout
    assert "kvray-b" in done.stdout
    assert "kvray-c" not in done.stdout
    assert "kvray-d/arena is too short to be an arena" in done.stderr
    assert done.stderr.count("\n") == 1, "one sentence"


def test_all_without_an_arena_is_sound(run_kvray: RunKvray, parent: Path) -> None:
    done = run_kvray("verify", "--all", KVRAY_ARENA__DIR=str(parent))
    assert done.returncode == 0
    assert done.stdout == f"This user has no arena under {parent}.\n"


def test_no_arena_is_an_error_that_says_how_to_get_one(run_kvray: RunKvray, parent: Path) -> None:
    done = run_kvray("verify", KVRAY_ARENA__DIR=str(parent))
    assert (done.returncode, done.stdout) == (2, "")
    assert "start the tier with `kvray up`" in done.stderr
    assert list(parent.iterdir()) == []


def test_a_terminal_sees_how_far_it_is(parent: Path, make: MakeArena) -> None:
    store(make(), KEYS)
    ours, theirs = os.openpty()
    done = subprocess.run(
        [sys.executable, "-m", "kvray", "verify"],
        env={**os.environ, "KVRAY_ARENA__DIR": str(parent), "TERM": "xterm", "COLUMNS": "120"},
        stdout=subprocess.PIPE,
        stderr=theirs,
        check=True,
    )
    os.close(theirs)
    shown = os.read(ours, 2**16).decode()
    os.close(ours)
    assert "Checking kvray-kvray" in shown
    assert b"Checking" not in done.stdout


def test_ctrl_c_leaves_no_lease_and_no_holder(parent: Path, make: MakeArena) -> None:
    arena = make(num_slabs=64, slots_per_slab=256)
    store(arena, chain(64 * 256))
    command = subprocess.Popen(
        [sys.executable, "-m", "kvray", "verify"],
        env={**os.environ, "KVRAY_ARENA__DIR": str(parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + WAIT_S
    while arena.stats()["holders"] < 2:
        assert time.monotonic() < deadline, "it never joined"
    # Nothing new can be leased while the lock is kept, so it does not end before the signal.
    assert arena._lock.acquire(WAIT_S)
    command.send_signal(signal.SIGINT)
    time.sleep(0.1)
    arena._lock.release()
    stdout, stderr = command.communicate(timeout=WAIT_S)
    assert (command.returncode, stdout, stderr) == (130, "", "kvray: interrupted.\n")
    assert not arena.tables.slot_leases.any()
    assert arena.stats()["holders"] == 1


def test_verify_needs_no_ray(parent: Path, make: MakeArena) -> None:
    store(make(), KEYS)
    code = (
        "import sys, kvray.cli.app as cli\n"
        "sys.argv = ['kvray', 'verify']\n"
        "try:\n"
        "    cli.main()\n"
        "finally:\n"
        "    print({'ray', 'torch'} & set(sys.modules), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "KVRAY_ARENA__DIR": str(parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == "set()\n"
