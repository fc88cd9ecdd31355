"""A shard goes on with the arena that it finds, or has had, or makes another that engines follow.

It finds one at its start. While it serves, files may be removed, tables damaged, and a process may
be stopped with the arena's lock.
"""

import contextlib
import itertools
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from kvray.actors.owner.claim import owner_of
from kvray.actors.shard import adoption, serving
from kvray.actors.shard import shard as shard_module
from kvray.actors.shard.adoption import StoppedHolder, open_arena
from kvray.actors.shard.shard import Shard
from kvray.errors import CapacityError, ShardUnavailable
from kvray.node import NodeLink, attach
from kvray.node.stage_calls import ShardSocket
from kvray.store import Arena, ArenaOwner
from kvray.store.arena.layout import HEADER
from kvray.store.machine import lockers
from kvray.store.machine.side_file import ARENA_BYTE, SideFile
from tests.unit.actors.small_shard import failed_with, nvme_for
from tests.unit.store.child import Child
from tests.unit.store.invariants import check_invariants
from tests.unit.store.small_arena import (
    PATIENT_S,
    chain,
    fetch,
    num_here,
    overwrite,
    served,
    spec,
    store,
)
from tests.waiting import wait_for

Damage = Callable[[Path], Any]
KEYS = chain(4)


@pytest.fixture
def link(shard: Shard, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeLink]:
    """An engine's link, attached to the arena of the shard."""
    # A captured record keeps the link's error, its traceback, and so a retired arena mapped.
    monkeypatch.setattr(logging.getLogger("kvray.node"), "disabled", True)
    made = attach(directory, label="engine", lock_wait_s=PATIENT_S, attach_retry_s=0.02)
    yield made
    made.detach()


@pytest.fixture
def left_link(link: NodeLink, shard: Shard) -> NodeLink:
    """The same once the shard has ended."""
    shard.stop(retire=False, timeout_s=5)
    return link


def goes_on(link: NodeLink, *, before: str) -> bool:
    """Return whether the engine has stored and fetched blocks in another arena by now."""
    arena = link.arena
    if arena is None or arena.arena_id == before:
        return False
    store(arena, KEYS)
    return served(arena, KEYS) == 4


def remove_lock(directory: Path) -> None:
    (lock,) = directory.glob("lock.*")
    lock.unlink()


# -- one that it finds ----------------------------------------------------------------------------


def with_field(name: str, value: bytes) -> Damage:
    """Return what changes a field of the header, under those who map it."""

    def damage(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(HEADER.fields[name][1])
            file.write(value)

    return damage


def replace_by_garbage(path: Path) -> None:
    garbage = path.with_name("garbage")
    garbage.write_bytes(os.urandom(5000))
    garbage.rename(path)


def leave_half_made(directory: Path) -> None:
    """Leave what an owner does that dies while it makes an arena."""
    (directory / "arena.0123.new").write_bytes(b"half")
    (directory / "lock.0123").touch()


DAMAGE: dict[str, tuple[Damage, str, bool]] = {
    "another format": (with_field("format_version", b"\x63"), "is an arena of format 99", True),
    "torn header": (with_field("cluster_name", b"torn"), "has a damaged header", True),
    "damaged figures": (with_field("capacity", os.urandom(8)), "has a damaged header", True),
    "unknown state": (with_field("state", b"\x07"), "is retired", True),
    "truncated": (
        lambda path: os.truncate(path, path.stat().st_size - 4096),
        "bytes instead",
        True,
    ),
    "no lock file": (lambda path: remove_lock(path.parent), "has no lock file", True),
    "magic gone": (with_field("magic", b"NOARENA!"), "is no arena", False),
    "foreign file": (replace_by_garbage, "is no arena", False),
    "nothing": (Path.unlink, "", False),
}
CONFIGURED = {
    "another cluster": ({"cluster_name": "other"}, "is of the cluster 'test', not 'other'."),
    "more holders": ({"holders_max": 16}, "has other sizes than configured."),
    "more memory": ({"capacity": 2 * spec().capacity}, "has other sizes than configured."),
}


@pytest.mark.parametrize(
    ("damage", "change", "reason", "is_marked"),
    [
        *(pytest.param(one, {}, *rest, id=name) for name, (one, *rest) in DAMAGE.items()),
        *(pytest.param(None, *rest, True, id=name) for name, rest in CONFIGURED.items()),
    ],
)
def test_what_cannot_be_adopted_is_replaced_and_engines_go_on(
    left_link, make_shard, directory, caplog, damage, change, reason, is_marked
):
    before = left_link.arena
    with (directory / "arena").open("rb") as mapped:
        if damage:
            damage(directory / "arena")
        leave_half_made(directory)
        size = os.fstat(mapped.fileno()).st_size
        shard = make_shard(spec=replace(spec(), **change))
        assert os.fstat(mapped.fileno()).st_size == size, "truncated under those who map it"
    assert before.retired == is_marked
    assert reason in caplog.text
    assert ("a: replaces the arena that is there: " in caplog.text) == bool(reason)
    wait_for(lambda: goes_on(left_link, before=before.arena_id), "attaching again")
    assert shard.status()["arena"]["shard_epoch"] == 1
    assert len(list(directory.glob("lock.*"))) == 1
    assert not list(directory.glob("*.new"))


def test_an_arena_that_fits_is_adopted_unnoticed(left_link, make_shard, line, directory):
    arena = left_link.arena
    store(arena, KEYS)
    (held,) = arena.lease(KEYS)
    line.replace()
    leave_half_made(directory)
    shard = make_shard()
    wait_for(lambda: line.matched(KEYS) == 4, "announcing")
    assert left_link.arena is arena
    assert fetch(arena, KEYS, held)
    assert not arena.retired
    status = shard.status()["arena"]
    assert (status["shard_epoch"], status["arena_id"]) == (2, arena.arena_id)
    assert not list(directory.glob("*.new"))
    assert [path.name for path in directory.glob("lock.*")] == [f"lock.{arena.arena_id}"]


def test_a_directory_in_the_arenas_place_is_named(start_shard, directory):
    (directory / "arena" / "precious").mkdir(parents=True)
    shard = start_shard()
    assert "cannot be removed (Is a directory); remove it by hand." in failed_with(shard)
    shard.stop(retire=True, timeout_s=5)
    assert (directory / "arena" / "precious").exists()


@pytest.mark.parametrize(
    ("was_there", "stops", "error"),
    [
        pytest.param(True, False, None, id="that of one that was there may come free"),
        pytest.param(True, True, ShardUnavailable, id="a shard that is to stop waits for none"),
        pytest.param(False, False, CapacityError, id="where no arena was none comes free"),
    ],
)
def test_memory_is_waited_for_where_it_may_come(directory, monkeypatch, was_there, stops, error):
    create, tries = Arena.create, itertools.count()

    def create_at_second_try(*args: Any, **kwargs: Any) -> Arena:
        if next(tries) == 0:
            raise CapacityError("The arena does not fit.")
        return create(*args, **kwargs)

    def progress(done: int, total: int) -> None:
        if stops:
            raise ShardUnavailable("stopped")

    monkeypatch.setattr(Arena, "create", create_at_second_try)
    monkeypatch.setattr(adoption, "_RETRY_S", 0.01)
    directory.mkdir()
    if was_there:
        (directory / "arena").write_bytes(b"old")
    with pytest.raises(error) if error else contextlib.nullcontext():
        arena = open_arena(directory, spec(), shard="a", progress=progress)
        assert not arena.retired
        arena.close()


# -- one whose files are removed, or whose tables are damaged -------------------------------------


def arena_id(shard: Shard) -> str:
    return str(shard.status().get("arena", {}).get("arena_id", ""))


def replace_arena(directory: Path) -> None:
    shutil.copyfile(directory / "arena", directory / "other")
    (directory / "other").rename(directory / "arena")


@pytest.mark.parametrize(
    "remove",
    [
        shutil.rmtree,
        lambda directory: shutil.rmtree(directory.parent),
        lambda directory: (directory / "arena").unlink(),
        remove_lock,
        replace_arena,
    ],
    ids=["directory", "parent", "arena", "lock", "replaced"],
)
def test_a_lost_arena_is_replaced_and_engines_follow(shard, directory, link, line, remove, caplog):
    store(link.arena, KEYS)
    wait_for(lambda: line.matched(KEYS) == 4)
    before = arena_id(shard)
    remove(directory)
    wait_for(lambda: arena_id(shard) not in ("", before), "the new arena")
    assert "It makes a new arena; engines follow." in caplog.text
    wait_for(lambda: line.matched(KEYS) == 0, "the withdrawal")
    wait_for(lambda: goes_on(link, before=before), "attaching again")
    assert arena_id(shard) == link.arena.arena_id
    wait_for(lambda: line.matched(KEYS) == 4, "the announcement")
    assert shard.status()["state"] == "serving"
    assert "message" not in shard.status()
    assert len(list(directory.glob("lock.*"))) == 1
    shard.stop(retire=True, timeout_s=5)
    assert not directory.exists()


def test_a_socket_that_is_removed_is_made_again_and_costs_no_block(shard, directory):
    before = arena_id(shard)
    with contextlib.closing(ShardSocket(directory)) as connected:
        connected.call("hello", timeout_s=5)
        (directory / "socket").unlink()
        wait_for((directory / "socket").exists)
        connected.call("hello", timeout_s=5)
        with contextlib.closing(ShardSocket(directory)) as new:
            wait_for(lambda: new.call("hello", timeout_s=5)["arena_id"] == before)


def test_a_removed_owner_file_is_made_again_before_another_takes_it(shard, start_shard, directory):
    before = arena_id(shard)
    (directory / "owner").unlink()
    wait_for(lambda: owner_of(directory) is not None)
    assert arena_id(shard) == before
    other = start_shard("b")
    wait_for(lambda: "done" in other.status())
    assert other.status()["state"] == "starting"


def test_a_disk_goes_on_below_the_new_arena(make_shard, directory, tmp_path):
    shard = make_shard(nvme=nvme_for(tmp_path), admission="all")
    before = arena_id(shard)
    shutil.rmtree(directory)
    wait_for(lambda: arena_id(shard) not in ("", before))
    wait_for(lambda: shard.status()["nvme"]["state"] == "open")
    removed = f"{directory / 'arena'} (deleted)"
    assert removed not in Path("/proc/self/maps").read_text(), "the memory of the old one is free"


def test_a_shard_waits_for_the_memory_that_engines_still_have(shard, directory, monkeypatch):
    before = arena_id(shard)
    monkeypatch.setattr(shard_module, "_LOST_RETRY_S", 0.05)
    with monkeypatch.context() as full:
        full.setattr(Arena, "create", Mock(side_effect=CapacityError("It does not fit.")))
        (directory / "arena").unlink()
        wait_for(lambda: "It does not fit." in shard.status().get("message", ""))
    wait_for(lambda: arena_id(shard) not in ("", before))


def test_a_shard_waits_where_no_arena_can_be_made_and_can_be_ended(shard, directory):
    shutil.rmtree(directory.parent)
    directory.parent.touch()
    wait_for(lambda: "cannot be made" in shard.status().get("message", ""))
    assert shard.status()["state"] == "starting"
    shard.stop(retire=False, timeout_s=5)
    directory.parent.unlink()
    directory.parent.mkdir()


@pytest.fixture
def often_audited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks at the tables come at each heartbeat, and not after a thousand times their CPU time."""
    monkeypatch.setattr(serving, "_AUDIT_SHARE", 1.0)


@pytest.mark.usefixtures("often_audited")
def test_a_flipped_bit_is_mended_and_said(shard, arena, caplog):
    arena.tables.slot_parent[int(store(arena, KEYS).slots[2])] ^= 1 << 30
    # Of children, if the flip came between two looks of one search.
    wait_for(lambda: "1 corrupt parents" in caplog.text or "1 corrupt children" in caplog.text)
    wait_for(lambda: arena.stats()["repairs"] == 1)
    check_invariants(arena.tables)
    assert num_here(arena, KEYS) == 4
    assert shard.status()["state"] == "serving"


@pytest.mark.usefixtures("often_audited")
def test_tables_that_are_overwritten_end_no_shard(make_shard, attach):
    shard = make_shard(free_target=0.3)
    arena = attach()
    store(arena, chain(6))
    for seed in range(3):
        repairs = arena.stats()["repairs"]
        overwrite(arena.tables, seed)
        wait_for(lambda before=repairs: arena.stats()["repairs"] > before)
    wait_for(lambda: shard.clear(5) == 0)
    store(arena, keys := chain(4, seed="after"))
    assert num_here(arena, keys) == 4
    assert shard.status()["state"] == "serving"


def test_a_look_at_the_tables_that_waits_puts_off_no_later_one(shard, monkeypatch):
    looks, audit = [], ArenaOwner.audit

    def wait_and_audit(owner: ArenaOwner) -> dict[str, int]:
        looks.append(owner)
        time.sleep(0.7)  # for a core, or the lock
        return audit(owner)

    monkeypatch.setattr(ArenaOwner, "audit", wait_and_audit)
    wait_for(lambda: len(looks) > 2)


# -- a process that is stopped with the arena's lock ----------------------------------------------


@pytest.fixture
def locker(directory: Path, child: Callable[[], Child]) -> Child:
    """A process that has the lock, and has run for as long as it likes."""
    directory.mkdir()
    process = child()
    lock = "small.acquire(ArenaLock((kept := SideFile.at(directory / 'lock.test'))), 0)"
    assert process.say(lock) == "True"
    return process


@pytest.fixture
def look(directory: Path, locker: Child) -> Callable[[float], StoppedHolder]:
    """Looks for who has stopped with the lock; it has found nobody in 40 s."""
    watch = StoppedHolder("s", limit_s=30.0)
    file = SideFile.at(directory / "lock.test")

    def look(now: float) -> StoppedHolder:
        watch.look(file, now=now)
        return watch

    for now in (0.0, 1.0, 2.0, 40.0):
        work(locker)
        assert look(now).found is None, "it runs"
    return look


def work(process: Child) -> None:
    """Have it use CPU time, which the kernel tells in hundredths of a second."""
    used = lockers.cpu_time_of(process.pid)
    wait_for(lambda: process.say("sum(range(10**6))") and lockers.cpu_time_of(process.pid) != used)


def stop(process: Child) -> None:
    work(process)
    process.stop()
    wait_for(lambda: lockers.state_of(process.pid) == "T")


@pytest.mark.parametrize("halt", [stop, work])
def test_a_holder_that_stands_still_is_named_and_ended(directory, locker, look, halt):
    """A frozen container's process looks as if it slept, or waited for a disk."""
    halt(locker)
    look(41.0)
    assert look(42.0).found["pid"] == locker.pid
    look(71.0)
    assert lockers.state_of(locker.pid) in {"T", "S", "R"}, "it is not ended yet"
    look(72.0)
    locker.wait_until_killed()
    assert not SideFile.at(directory / "lock.test").is_locked(ARENA_BYTE)
    assert look(73.0).found is None


def test_holder_that_goes_on_just_before_its_end_is_left_alone(locker, look, monkeypatch):
    end = lockers.end

    def end_late(pid: int, is_meant: Callable[[], bool]) -> bool:
        locker.go_on()
        work(locker)
        return end(pid, is_meant)

    monkeypatch.setattr(lockers, "end", end_late)
    stop(locker)
    for now in (41.0, 42.0, 72.0):
        look(now)
    assert locker.say("1") == "1", "it lives"
