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
from kvray.actors.shard.adoption import open_arena
from kvray.errors import CapacityError, ShardUnavailable
from kvray.node import NodeLink, attach
from kvray.store import Arena
from kvray.store.arena.layout import HEADER
from tests.unit.actors.conftest import StartShard
from tests.unit.actors.small_shard import wait_until_serving
from tests.unit.store.small_arena import chain, fetch, spec, store
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
    wait_until_serving(shard)
    made = attach(directory, label="engine", lock_wait_s=0.05, attach_retry_s=0.02)
    assert made.arena is not None
    shard.stop(retire=False, timeout_s=5)
    yield made
    made.detach()


def overwrite(field: str, value: bytes) -> Damage:
    """Return what changes a field of the header, under those who map it."""
    assert HEADER.fields is not None
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


def goes_on(link: NodeLink, *, before: str) -> bool:
    """Return whether the engine has stored and fetched blocks in another arena by now."""
    arena, keys = link.arena, chain(3, seed="after")
    if arena is None or arena.arena_id == before:
        return False
    store(arena, keys)
    leases = arena.lease(keys)
    return bool(leases) and fetch(arena, keys, leases[0]) and arena.release(*leases)


@pytest.mark.parametrize(
    ("damage", "reason", "is_marked"),
    [
        (overwrite("format_version", b"\x63"), "is an arena of format 99", True),
        (overwrite("cluster_name", b"torn"), "has a damaged header", True),
        (overwrite("capacity", os.urandom(8)), "has a damaged header", True),
        (overwrite("state", b"\x07"), "is retired", True),
        (truncate, "bytes instead of", True),
        (remove_lock, "has no lock file", True),
        (overwrite("magic", b"NOARENA!"), "is no arena", False),
        (replace_by_garbage, "is no arena", False),
        (Path.unlink, "", False),
    ],
    ids=[
        "another format",
        "torn header",
        "damaged figures",
        "unknown state",
        "truncated",
        "no lock file",
        "magic gone",
        "foreign file",
        "nothing",
    ],
)
def test_what_cannot_be_adopted_is_replaced_and_engines_go_on(
    link, make_shard, directory, caplog, damage, reason, is_marked
):
    before = link.arena
    assert before is not None
    with (directory / "arena").open("rb") as mapped:
        damage(directory / "arena")
        size = os.fstat(mapped.fileno()).st_size
        shard = make_shard()
        wait_until_serving(shard)
        assert os.fstat(mapped.fileno()).st_size == size, "truncated under those who map it"
    assert before.retired == is_marked
    assert reason in caplog.text
    assert ("replaces the arena" in caplog.text) == bool(reason)
    wait_for(lambda: goes_on(link, before=before.arena_id), "attaching again")
    assert shard.status()["arena"]["shard_epoch"] == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"cluster_name": "other"}, "it is of the cluster 'test', not 'other'."),
        ({"holders_max": 16}, "it has other sizes than configured."),
    ],
)
def test_an_arena_of_another_configuration_is_replaced_and_engines_go_on(
    link, make_shard, caplog, change, reason
):
    before = link.arena
    assert before is not None
    wait_until_serving(make_shard(spec=replace(spec(), **change)))
    assert before.retired
    assert f"a: replaces the arena that is there: {reason}" in caplog.text
    wait_for(lambda: goes_on(link, before=before.arena_id), "attaching again")


def test_an_arena_that_fits_is_adopted_announced_and_its_engines_notice_nothing(
    link, make_shard, line
):
    arena, keys = link.arena, chain(4)
    assert arena is not None
    store(arena, keys)
    (held,) = arena.lease(keys) or []
    shard = make_shard()
    wait_until_serving(shard)
    wait_for(lambda: line.matched(keys) == 4, "announcing")
    assert link.arena is arena
    assert fetch(arena, keys, held)
    assert shard.status()["arena"]["shard_epoch"] == 2


def test_what_a_dead_owner_left_half_made_goes_also_beside_an_arena_that_is_adopted(
    link, make_shard, directory
):
    (directory / "arena.0123.new").write_bytes(b"half")
    (directory / "lock.0123").touch()
    wait_until_serving(make_shard())
    assert link.arena is not None
    assert not list(directory.glob("*.new"))
    assert [path.name for path in directory.glob("lock.*")] == [f"lock.{link.arena.arena_id}"]


def test_a_directory_in_the_arenas_place_is_named(make_shard, directory):
    (directory / "arena" / "precious").mkdir(parents=True)
    shard = make_shard()
    wait_for(lambda: shard.status()["state"] == "failed", "the failure")
    assert "cannot be removed (Is a directory); remove it by hand." in shard.status()["message"]
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


def reopened(directory: Path, progress: Callable[[int, int], None]) -> Arena:
    """Return the arena with which a shard goes on that finds one of another size."""
    directory.mkdir()
    (directory / "arena").write_bytes(b"old")
    return open_arena(directory, spec(), shard="a", progress=progress)


def test_a_new_arena_is_tried_again_until_the_old_one_has_been_let_go(directory, full_once):
    with contextlib.closing(reopened(directory, lambda done, total: None)) as arena:
        assert not arena.retired


def test_a_shard_that_is_to_stop_does_not_wait_for_memory(directory, full_once):
    def stop(done: int, total: int) -> None:
        raise ShardUnavailable("stopped")

    with pytest.raises(ShardUnavailable, match="stopped"):
        reopened(directory, stop)


def test_where_there_was_no_arena_nothing_is_waited_for(directory, full_once):
    directory.mkdir()
    with pytest.raises(CapacityError):
        open_arena(directory, spec(), shard="a", progress=lambda done, total: None)
