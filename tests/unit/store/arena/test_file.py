"""The file of an arena: made whole or not at all, refused if it is wrong, populated, retired."""

import ctypes
import errno
import mmap
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock, call

import numpy as np
import pytest

from kvray.config import load_config
from kvray.errors import CapacityError, ConfigError, ShardUnavailable
from kvray.store import Arena, ArenaOwner, ArenaSpec
from kvray.store.arena import file as arena_file
from kvray.store.arena import prefault
from kvray.store.arena.file import ARENA_FILE, require_room
from kvray.store.arena.layout import FORMAT_VERSION, HEADER, RETIRED
from kvray.store.arena.owner import retire_file
from kvray.store.arena.prefault import Populator, mapping_of, populate
from kvray.store.arena.tables import Array
from kvray.store.machine.capacity import Mount
from tests.unit.store.mounted import huge_pages, run_mounted
from tests.unit.store.small_arena import chain, make_arena, spec, store
from tests.waiting import HANG_S, Gate, wait_for

MOUNTS = {None: True, "memory": True, "any": False}
UNKNOWN_ADVICE = 4242
"""What `madvise` answers with EINVAL, as an older kernel does where this one populates."""


@pytest.mark.parametrize("is_older_kernel", [False, True])
def test_new_arena_says_what_was_asked_and_is_allocated(directory, monkeypatch, is_older_kernel):
    if is_older_kernel:
        monkeypatch.setattr(prefault, "_POPULATE_WRITE", UNKNOWN_ADVICE)
    told = Mock()
    arena = Arena.create(directory, spec(), lock_wait_s=1, progress=told)
    stat = (directory / ARENA_FILE).stat()
    assert stat.st_blocks * 512 >= stat.st_size, "it is not allocated"
    assert told.call_args.args == (stat.st_size, stat.st_size)
    assert not is_older_kernel or told.call_count == 1
    assert (arena.cluster_name, len(arena.arena_id)) == ("test", 16)
    assert arena.tables.geometry == spec().geometry()
    assert sorted(path.name for path in directory.iterdir()) == ["arena", f"lock.{arena.arena_id}"]
    arena.close()


def test_missing_arena_and_one_without_its_lock_file_are_one_sentence(directory):
    with pytest.raises(ShardUnavailable, match=r"no arena at .*kvray up"):
        Arena(directory, lock_wait_s=1)
    arena = make_arena(directory)
    (directory / f"lock.{arena.arena_id}").unlink()
    arena.close()
    with pytest.raises(ShardUnavailable, match="no lock file"):
        Arena(directory, lock_wait_s=1)
    assert [path.name for path in directory.iterdir()] == [ARENA_FILE]


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("format_version", FORMAT_VERSION + 1, f"format {FORMAT_VERSION + 1}, not"),
        ("holders_max", 9, "damaged header"),
        ("magic", b"x", "no arena, or was never finished"),
    ],
)
def test_file_that_is_not_what_it_should_be_is_refused(directory, field, value, said):
    make_arena(directory).close()
    header = np.memmap(directory / ARENA_FILE, HEADER, "r+", shape=(1,))
    header[field] = value
    header.flush()
    with pytest.raises(ShardUnavailable, match=said):
        Arena(directory, lock_wait_s=1)


def test_refusal_that_is_kept_does_not_keep_the_arena_mapped(directory):
    arena = make_arena(directory)
    arena.tables.state[0] = RETIRED
    arena.close()
    with pytest.raises(ShardUnavailable) as kept:
        Arena(directory, lock_wait_s=1)
    assert kept.tb is not None
    assert str(directory / ARENA_FILE) not in Path("/proc/self/maps").read_text()


def test_retired_arena_is_refused_and_its_lock_file_does_not_come_back(directory):
    arena = make_arena(directory)
    kept = directory / "kept"
    os.link(directory / ARENA_FILE, kept)
    ArenaOwner(arena).retire()
    assert [path.name for path in directory.iterdir()] == ["kept"]
    kept.rename(directory / ARENA_FILE)
    with pytest.raises(ShardUnavailable):
        Arena(directory, lock_wait_s=1)
    assert [path.name for path in directory.iterdir()] == [ARENA_FILE]
    arena.close()


def test_retiring_spares_the_successor(directory):
    old, new = make_arena(directory), make_arena(directory)
    ArenaOwner(old).retire()
    opened = Arena.attach(directory, label="x", lock_wait_s=1)
    assert opened.arena_id == new.arena_id
    store(opened, chain(3))
    for arena in (old, new, opened):
        arena.close()


def test_an_arena_that_is_to_be_in_memory_is_refused_on_anything_else(directory, monkeypatch):
    asked, found = replace(spec(), in_memory=True), Mock(return_value=None)
    monkeypatch.setattr(arena_file, "mount_of", found)
    require_room(directory, asked)
    for kind in ("tmpfs", "hugetlbfs", "ramfs", "ext4"):
        found.return_value = Mount(point=directory, kind=kind, device="", root="", options=())
        require_room(directory, replace(asked, in_memory=kind != "ext4"))
    with pytest.raises(ConfigError, match=r"is on ext4, which is no memory; set arena\.dir"):
        require_room(directory, asked)


def test_only_a_setting_lets_an_arena_be_on_a_disk():
    found = {mount: load_config(environ={}, overrides={"arena.mount": mount}) for mount in MOUNTS}
    assert {mount: ArenaSpec.of(one).in_memory for mount, one in found.items()} == MOUNTS


def test_a_full_mount_has_no_hint_at_permissions(directory, monkeypatch):
    monkeypatch.setattr(os, "rename", Mock(side_effect=OSError(errno.ENOSPC, "No space left")))
    with pytest.raises(ConfigError, match=r"\(No space left\); free space there: `kvray sweep` re"):
        make_arena(directory)


@pytest.mark.parametrize("is_older_kernel", [False, True])
def test_a_mount_that_fills_meanwhile_is_one_sentence_and_leaves_no_file(
    directory, monkeypatch, is_older_kernel
):
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    if is_older_kernel:
        monkeypatch.setattr(prefault, "_POPULATE_WRITE", UNKNOWN_ADVICE)
        monkeypatch.setattr(os, "posix_fallocate", full)
    else:
        monkeypatch.setattr(prefault, "_populate", full)
    said = r"could not be had in .*No space left on device\); lower arena\.capacity"
    with pytest.raises(CapacityError, match=said):
        make_arena(directory)
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError, ShardUnavailable])
def test_a_making_that_is_interrupted_leaves_no_file(directory, monkeypatch, error):
    interrupt = Mock(side_effect=error)
    with pytest.raises(error):
        Arena.create(directory, spec(), lock_wait_s=1, progress=interrupt)
    monkeypatch.setattr(os, "rename", interrupt)
    with pytest.raises(error):
        make_arena(directory)
    assert list(directory.iterdir()) == []


def test_half_made_file_of_a_dead_owner_is_removed(directory):
    (directory / "arena.0123456789abcdef.new").write_bytes(b"x")
    make_arena(directory).close()
    assert not list(directory.glob("*.new"))


@pytest.mark.root
def test_arena_on_hugetlbfs_is_used_like_any_other():
    with huge_pages(40):
        said = run_mounted(ON_HUGETLBFS, kind="hugetlbfs", options="pagesize=2M")
    assert said == "8 read, locked, listening, all in huge pages"


ON_HUGETLBFS = """
import socket
from kvray.store import Arena, ArenaOwner, ArenaSpec
from kvray.store.arena.file import holds_arena
from kvray.store.machine.pages import ArenaPages
from kvray.store.arena.prefault import mapping_of, populate
from tests.unit.store.small_arena import chain, fetch, store
KiB = 1024
spec = ArenaSpec(
    cluster_name="x", capacity=65000 * KiB, slab=1000 * KiB, slot_min=4096, holders_max=4
)
arena = Arena.create(mounted, spec, lock_wait_s=1)
arena.join("test")
keys = chain(8)
store(arena, keys)
held = arena.lease(keys)[0]
assert holds_arena(mounted / "arena", arena.arena_id)
second = Arena(mounted, lock_wait_s=1)
assert fetch(second, keys, held)
with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as engine:
    server.bind(str(mounted / "socket"))
    server.listen()
    engine.connect(str(mounted / "socket"))
populate(mapping_of(arena.tables))
figures = ArenaPages(mounted / "arena").figures()
assert figures["huge_bytes"] == figures["mapped_bytes"] >= spec.geometry().file_bytes, figures
assert figures["command"] is None
print(held.num_slots, "read, locked, listening, all in huge pages")
second.close()
ArenaOwner(arena).retire()
arena.close()
"""


def test_largest_capacity_is_the_last_that_fits():
    asked, room = replace(spec(), slab=2**20, slot_min=2**16), 2**30
    largest = asked.largest_capacity(room)
    assert replace(asked, capacity=largest).geometry().file_bytes <= room
    assert replace(asked, capacity=largest + 2**20).geometry().file_bytes > room
    assert spec().largest_capacity(0) == spec().largest_capacity(-(2**30)) == 0
    assert replace(spec(), slot_min=2**30).largest_capacity(2**29) == 0


def test_arena_that_cannot_fit_or_has_no_directory_is_refused_in_a_sentence(directory):
    with pytest.raises(CapacityError, match=r"needs 1048576.* but"):
        make_arena(directory, asked=replace(spec(), capacity=2**50, slab=2**40, slot_min=2**30))
    with pytest.raises(ConfigError, match="No arena can be made in"):
        make_arena(directory / "missing")
    assert list(directory.iterdir()) == []


# -- memory behind it, at once --------------------------------------------------------------------

MIB = 2**20


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefault, "CHUNK_BYTES", MIB)
    monkeypatch.setattr(prefault, "_QUIET_CHUNK_BYTES", 2**14)


def map_new(directory: Path, size: int = 11 * MIB // 2) -> Array:
    """Return a new file in shared memory, by itself of five and a half chunks."""
    with (directory / "file").open("w+b") as file:
        file.truncate(size)
        return np.frombuffer(mmap.mmap(file.fileno(), size), dtype=np.uint8)


def mapped_share(memory: Array) -> float:
    """Return how much of `memory` this process has mapped, as /proc/self/pagemap says."""
    page = mmap.PAGESIZE
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(memory.ctypes.data // page * 8)
        entries = np.frombuffer(pagemap.read(-(-memory.nbytes // page) * 8), dtype=np.uint64)
    return float((entries >> np.uint64(63)).mean())


@pytest.mark.parametrize("threads", [None, 1, 3])
def test_all_is_allocated_and_mapped_and_what_pages_hold_stays(directory, threads):
    memory, told = map_new(directory), Mock()
    memory[::4099] = 7
    assert populate(memory, threads=threads, progress=told)
    assert mapped_share(memory) == 1
    assert (directory / "file").stat().st_blocks * 512 == memory.nbytes
    steps = [*range(MIB, 6 * MIB, MIB), memory.nbytes]
    assert told.call_args_list == [call(done, memory.nbytes) for done in steps]
    assert (memory[::4099] == 7).all()
    assert int(memory.sum()) == 7 * len(memory[::4099])


def test_what_progress_raises_ends_it_soon(directory):
    memory = map_new(directory, 64 * MIB)
    with pytest.raises(ZeroDivisionError):
        populate(memory, threads=1, progress=Mock(side_effect=ZeroDivisionError))
    assert mapped_share(memory) < 0.5


def test_pages_that_cannot_be_had_are_no_signal(directory):
    memory = map_new(directory)
    os.truncate(directory / "file", MIB)
    with pytest.raises(OSError, match="No space left") as caught:
        populate(memory)
    assert caught.value.errno == errno.ENOSPC


def test_other_threads_of_python_go_on_meanwhile(directory):
    work = threading.Thread(target=prefault._populate, args=[map_new(directory, 256 * MIB)])
    work.start()
    num_turns = 0
    while work.is_alive():
        num_turns += 1
        time.sleep(0)
    assert num_turns > 10


@pytest.mark.root
def test_a_mount_that_gives_huge_pages_is_asked_for_them():
    said = run_mounted(IN_HUGE_PAGES, kind="tmpfs", options="huge=advise,size=64m")
    assert said == "True True"


IN_HUGE_PAGES = """
from kvray.store import Arena, ArenaSpec
from kvray.store.machine.pages import ArenaPages
from kvray.store.arena.prefault import mapping_of, populate
MiB = 2**20
spec = ArenaSpec(cluster_name="x", capacity=16 * MiB, slab=MiB, slot_min=65536, holders_max=4)
arena = Arena.create(mounted, spec, lock_wait_s=1)
populate(mapping_of(arena.tables))
figures = ArenaPages(mounted / "arena").figures()
print(figures["huge_bytes"] >= 16 * MiB, figures["command"] is None)
"""


# -- in the background ----------------------------------------------------------------------------


def populating() -> bool:
    return any(thread.name == "kvray-populate" for thread in threading.enumerate())


def test_the_background_maps_all_and_ends(directory):
    make_arena(directory).close()
    arena = Arena(directory, lock_wait_s=1)
    memory = mapping_of(arena.tables)
    assert memory.nbytes == (directory / "arena").stat().st_size, "all of the file"
    assert ctypes.string_at(memory.ctypes.data, 8) == b"KVRAYARN"
    assert mapped_share(memory) < 0.5
    populator = Populator(arena.tables)
    wait_for(lambda: not populating())
    assert mapped_share(memory) == 1
    populator.stop()
    arena.close()


@pytest.mark.parametrize("how", ["it is stopped", "the arena is retired", "memory is missing"])
def test_background_work_ends_quietly_if(how, arena, monkeypatch):
    if how == "memory is missing":
        monkeypatch.setattr(prefault, "_populate", Mock(side_effect=OSError(errno.EIO, "broken")))
    gate = Gate(monkeypatch, prefault, "_populate")
    populator = Populator(arena.tables)
    assert gate.reached.wait(HANG_S)
    if how == "it is stopped":
        populator._stopping.set()
    elif how == "the arena is retired":
        arena.tables.header["state"] = RETIRED
    gate.open.set()
    populator.stop()
    assert not populating()


# -- retired without a mapping --------------------------------------------------------------------


@pytest.mark.parametrize("is_of_another_format", [False, True])
def test_who_maps_a_retired_arena_sees_it_and_keeps_bytes(arena, directory, is_of_another_format):
    arena.tables.holder_label[7] = b"kept"
    if is_of_another_format:
        memory = np.memmap(directory / "arena", np.uint8, "r+")
        memory[8:12], memory[32:1032] = (99, 0, 0, 0), 255
    retire_file(directory / "arena")
    assert int(arena.tables.header["state"]) == RETIRED
    assert arena.tables.holder_label[7] == b"kept"
    assert not (directory / "arena").exists()


def test_a_fifo_or_a_link_is_unlinked_its_target_stays_and_a_directory_is_refused(arena, directory):
    os.mkfifo(directory / "fifo")
    (directory / "link").symlink_to("arena")
    for name in ("fifo", "link", "nothing"):
        retire_file(directory / name)
        assert not os.path.lexists(directory / name)
    assert not arena.retired
    with pytest.raises(OSError, match="directory"):
        retire_file(directory)
