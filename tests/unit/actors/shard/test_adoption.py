"""A shard finds an arena in its directory, and goes on with it or makes another."""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvray.actors.shard import adoption
from kvray.actors.shard.adoption import StoppedHolder, open_arena
from kvray.errors import CapacityError, ShardUnavailable
from kvray.node import NodeLink, attach
from kvray.store import Arena
from kvray.store.arena.layout import HEADER
from kvray.store.machine import lockers
from kvray.store.machine.side_file import ARENA_BYTE, SideFile
from tests.unit.actors.conftest import StartShard
from tests.unit.actors.small_shard import failed_with
from tests.unit.store.child import Child
from tests.unit.store.small_arena import chain, fetch, served, spec, store
from tests.waiting import wait_for

Damage = Callable[[Path], None]


@pytest.fixture
def link(
    make_shard: StartShard, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[NodeLink]:
    """An engine's link, attached to the arena of a shard that has ended."""
    # A captured record keeps the link's error, its traceback, and so a retired arena mapped.
    monkeypatch.setattr(logging.getLogger("kvray.node"), "disabled", True)
    shard = make_shard()
    made = attach(directory, label="engine", lock_wait_s=0.05, attach_retry_s=0.02)
    shard.stop(retire=False, timeout_s=5)
    yield made
    made.detach()


def overwrite(field: str, value: bytes) -> Damage:
    """Return what changes a field of the header, under those who map it."""
    at = HEADER.fields[field][1]

    def damage(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(at)
            file.write(value)

    return damage


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4096)


def replace_by_garbage(path: Path) -> None:
    garbage = path.with_name("garbage")
    garbage.write_bytes(os.urandom(5000))
    garbage.rename(path)


def remove_lock(path: Path) -> None:
    for lock in path.parent.glob("lock.*"):
        lock.unlink()


def leave_half_made(directory: Path) -> None:
    """Leave what an owner does that dies while it makes an arena."""
    (directory / "arena.0123.new").write_bytes(b"half")
    (directory / "lock.0123").touch()


def goes_on(link: NodeLink, *, before: str) -> bool:
    """Return whether the engine has stored and fetched blocks in another arena by now."""
    arena, keys = link.arena, chain(3, seed="after")
    if arena is None or arena.arena_id == before:
        return False
    store(arena, keys)
    return served(arena, keys) == 3


DAMAGE: dict[str, tuple[Damage, str, bool]] = {
    "another format": (overwrite("format_version", b"\x63"), "is an arena of format 99", True),
    "torn header": (overwrite("cluster_name", b"torn"), "has a damaged header", True),
    "damaged figures": (overwrite("capacity", os.urandom(8)), "has a damaged header", True),
    "unknown state": (overwrite("state", b"\x07"), "is retired", True),
    "truncated": (truncate, "bytes instead of", True),
    "no lock file": (remove_lock, "has no lock file", True),
    "magic gone": (overwrite("magic", b"NOARENA!"), "is no arena", False),
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
    link, make_shard, directory, caplog, damage, change, reason, is_marked
):
    before = link.arena
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
    wait_for(lambda: goes_on(link, before=before.arena_id), "attaching again")
    assert shard.status()["arena"]["shard_epoch"] == 1
    assert len(list(directory.glob("lock.*"))) == 1
    assert not list(directory.glob("*.new"))


def test_an_arena_that_fits_is_adopted_announced_and_engines_notice_nothing(link, make_shard, line):
    arena, keys = link.arena, chain(4)
    store(arena, keys)
    (held,) = arena.lease(keys)
    line.replace()
    shard = make_shard()
    wait_for(lambda: line.matched(keys) == 4, "announcing")
    assert link.arena is arena
    assert fetch(arena, keys, held)
    assert not arena.retired
    status = shard.status()["arena"]
    assert (status["shard_epoch"], status["arena_id"]) == (2, arena.arena_id)


def test_what_a_dead_owner_left_half_made_goes_beside_an_adopted_arena(link, make_shard, directory):
    leave_half_made(directory)
    make_shard()
    assert not list(directory.glob("*.new"))
    assert [path.name for path in directory.glob("lock.*")] == [f"lock.{link.arena.arena_id}"]


def test_a_directory_in_the_arenas_place_is_named(start_shard, directory):
    (directory / "arena" / "precious").mkdir(parents=True)
    shard = start_shard()
    assert "cannot be removed (Is a directory); remove it by hand." in failed_with(shard)
    shard.stop(retire=True, timeout_s=5)
    assert (directory / "arena" / "precious").exists()


# -- memory that a retired arena has not given back yet -------------------------------------------


@pytest.fixture
def full_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first new arena does not fit."""
    create, asked = Arena.create.__func__, []  # type: ignore[attr-defined]

    def create_at_second_try(*args: Any, **kwargs: Any) -> Arena:
        asked.append(args)
        if len(asked) == 1:
            raise CapacityError("The arena does not fit.")
        return create(Arena, *args, **kwargs)

    monkeypatch.setattr(Arena, "create", create_at_second_try)
    monkeypatch.setattr(adoption, "_RETRY_S", 0.01)


def test_a_new_arena_is_tried_again_until_the_old_one_has_been_let_go(directory, full_once):
    directory.mkdir()
    (directory / "arena").write_bytes(b"old")
    with contextlib.closing(
        open_arena(directory, spec(), shard="a", progress=lambda done, total: None)
    ) as arena:
        assert not arena.retired


@pytest.mark.parametrize(("old", "error"), [(b"old", ShardUnavailable), (None, CapacityError)])
def test_no_memory_is_waited_for_by_a_shard_that_is_to_stop_or_where_no_arena_was(
    directory, full_once, old, error
):
    def stop(done: int, total: int) -> None:
        raise ShardUnavailable("stopped")

    directory.mkdir()
    if old is not None:
        (directory / "arena").write_bytes(old)
    with pytest.raises(error):
        open_arena(directory, spec(), shard="a", progress=stop)


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
def test_a_holder_that_stands_still_is_named_and_ended_after_the_limit(
    directory, locker, look, halt
):
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
    look(41.0)
    look(42.0)
    look(72.0)
    assert locker.say("1") == "1", "it lives"
