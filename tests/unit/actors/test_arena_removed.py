"""A shard whose files are removed, or whose tables are damaged, under it notices and goes on."""

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from kvray.actors.owner.claim import owner_of
from kvray.actors.shard import serving
from kvray.actors.shard import shard as shard_module
from kvray.actors.shard.shard import Shard
from kvray.errors import CapacityError
from kvray.node.link import NodeLink, attach
from kvray.node.stage_calls import ShardSocket
from kvray.store import Arena
from kvray.store.arena.file import ARENA_FILE
from kvray.store.arena.owner import ArenaOwner
from tests.unit.actors.small_shard import nvme_for
from tests.unit.store.invariants import check_invariants
from tests.unit.store.small_arena import PATIENT_S, chain, num_here, overwrite, served, store
from tests.waiting import wait_for

KEYS = chain(4)


@pytest.fixture
def link(shard: Shard, directory: Path) -> Iterator[NodeLink]:
    made = attach(directory, label="engine", lock_wait_s=PATIENT_S, attach_retry_s=0.05)
    yield made
    made.detach()


def arena_id(shard: Shard) -> str:
    return str(shard.status().get("arena", {}).get("arena_id", ""))


def remove_lock(directory: Path) -> None:
    (lock,) = directory.glob("lock.*")
    lock.unlink()


def replace_arena(directory: Path) -> None:
    path = directory / ARENA_FILE
    path.rename(directory / "other")
    shutil.copyfile(directory / "other", path)
    (directory / "other").unlink()


@pytest.mark.parametrize(
    "remove",
    [
        shutil.rmtree,
        lambda directory: shutil.rmtree(directory.parent),
        lambda directory: (directory / ARENA_FILE).unlink(),
        remove_lock,
        replace_arena,
    ],
    ids=["directory", "parent", "arena", "lock", "replaced"],
)
def test_a_new_arena_takes_the_place_of_one_whose_files_are_removed_and_engines_follow(
    shard, directory, link, line, remove, caplog
):
    store(link.arena, KEYS)
    wait_for(lambda: line.matched(KEYS) == 4)
    before = arena_id(shard)
    remove(directory)
    wait_for(lambda: arena_id(shard) not in ("", before), "the new arena")
    assert "It makes a new arena; engines follow." in caplog.text
    wait_for(lambda: link.arena and link.arena.arena_id == arena_id(shard))
    wait_for(lambda: line.matched(KEYS) == 0, "the withdrawal")
    store(link.arena, KEYS)
    assert served(link.arena, KEYS) == 4
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
    removed = f"{directory / ARENA_FILE} (deleted)"
    assert removed not in Path("/proc/self/maps").read_text(), "the memory of the old one is free"


def test_a_shard_waits_for_the_memory_that_engines_still_have(shard, directory, monkeypatch):
    before = arena_id(shard)
    monkeypatch.setattr(shard_module, "_LOST_RETRY_S", 0.05)
    with monkeypatch.context() as full:
        full.setattr(Arena, "create", Mock(side_effect=CapacityError("It does not fit.")))
        (directory / ARENA_FILE).unlink()
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
    keys = chain(6)
    arena.tables.slot_parent[int(store(arena, keys).slots[2])] ^= 1 << 30
    # Of children, if the flip came between two looks of one search.
    wait_for(lambda: "1 corrupt parents" in caplog.text or "1 corrupt children" in caplog.text)
    wait_for(lambda: arena.stats()["repairs"] == 1)
    check_invariants(arena.tables)
    assert num_here(arena, keys) == 6
    assert shard.status()["state"] == "serving"


def test_a_look_at_the_tables_that_waits_puts_off_no_later_one(shard, monkeypatch):
    looks, audit = [], ArenaOwner.audit

    def wait_and_audit(owner: ArenaOwner) -> dict[str, int]:
        looks.append(owner)
        time.sleep(0.7)  # for a core, or the lock
        return audit(owner)

    monkeypatch.setattr(ArenaOwner, "audit", wait_and_audit)
    wait_for(lambda: len(looks) > 2)


@pytest.mark.usefixtures("often_audited")
def test_tables_that_are_overwritten_end_no_shard(make_shard, attach):
    shard = make_shard(free_target=0.3)
    arena = attach()
    store(arena, chain(6))
    for seed in range(3):
        repairs = arena.stats()["repairs"]
        overwrite(arena.tables, seed)
        wait_for(lambda before=repairs: arena.stats()["repairs"] > before)
    keys = chain(4, seed="after")
    wait_for(lambda: shard.clear(5) == 0)
    store(arena, keys)
    assert num_here(arena, keys) == 4
    assert shard.status()["state"] == "serving"
