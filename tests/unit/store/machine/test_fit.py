"""Sharing a node's memory out: what is printed, when followed, always fits."""

import re
from dataclasses import replace
from pathlib import Path

from hypothesis import assume, given
from hypothesis import strategies as st

from kvray.store.machine.capacity import (
    Cgroup,
    HugePool,
    MemoryClaims,
    MountRoom,
    NodeMemory,
    rooms,
)
from kvray.store.machine.fit import (
    OBJECT_STORE_MIN,
    RAY_BYTES,
    Fit,
    MemoryRequest,
    commands,
    largest_arena,
    left,
    plan,
)

MIB = 2**20
GIB = 2**30
RAY_REFUSES_BELOW = 75 * MIB
SHM = Path("/dev/shm")


def mebibytes(least: int, most: int) -> st.SearchStrategy[int]:
    """Sizes of any number of bytes, small ones not seldom."""
    return st.integers(least * MIB, most * MIB)


@st.composite
def mount(draw: st.DrawFn, *, point: str, is_shm: bool) -> MountRoom:
    size = draw(mebibytes(0, 2_000_000))
    used = draw(st.integers(0, size))
    return MountRoom(point=Path(point), size=size, free=size - used, is_shm=is_shm)


@st.composite
def cgroup(draw: st.DrawFn) -> Cgroup:
    limit = draw(mebibytes(1, 2_000_000))
    usage = draw(st.integers(0, limit // 2))
    idle = draw(st.integers(0, usage))
    return Cgroup(
        path=Path("/sys/fs/cgroup"),
        is_root=draw(st.booleans()),
        limit=limit,
        usage=usage,
        idle_cache=idle,
        active_cache=draw(st.integers(0, usage - idle)),
    )


@st.composite
def node(draw: st.DrawFn) -> tuple[NodeMemory, MountRoom | None]:
    """A node, and its /dev/shm: the arena's mount, another one, or one without a limit."""
    total = draw(mebibytes(2_000, 2_000_000))
    shm = draw(st.none() | mount(point="/dev/shm", is_shm=True))
    place = draw(st.sampled_from(["shm", "tmpfs", "unlimited", "huge pages"]))
    own, pool = None, None
    if place == "shm":
        own = shm
    elif place == "tmpfs":
        own = draw(mount(point="/mnt/arena", is_shm=False))
    elif place == "huge pages":
        own = draw(st.none() | mount(point="/mnt/huge", is_shm=False))
        pages = draw(st.integers(0, 500_000))
        pool = HugePool(
            path=Path("/sys/kernel/mm/hugepages/hugepages-2048kB"),
            page_bytes=2 * MIB,
            total=pages,
            left=draw(st.integers(0, pages)),
        )
    memory = NodeMemory(
        total=total,
        available=draw(st.integers(total // 2, total)),
        cgroups=tuple(draw(st.lists(cgroup(), max_size=3))),
        mount=own,
        pool=pool,
    )
    return memory, shm


request = st.builds(
    MemoryRequest,
    arena_bytes=mebibytes(1, 1_500_000),
    heap_bytes=mebibytes(0, 5_000),
    object_store_bytes=st.none() | mebibytes(80, 5_000),
    threshold=st.sampled_from([0.5, 0.8, 0.95, 0.98, 0.99, 1.0]),
)


def ray_start(options: str) -> str:
    return f"ray start --head {options}"


def followed(
    memory: NodeMemory, shm: MountRoom | None, lines: list[str]
) -> tuple[NodeMemory, MountRoom | None, int, int]:
    """Do what the lines say; return the node after it, its /dev/shm, object store and heap."""
    for line in lines[:-1]:
        if remount := re.fullmatch(r"mount -o remount,size=(\d+)m (\S+)", line):
            size, point = int(remount[1]) * MIB, Path(remount[2])
            if shm is not None and point == shm.point:
                shm = replace(shm, size=size, free=size - (shm.size - shm.free))
                if memory.mount is not None and memory.mount.is_shm:
                    memory = replace(memory, mount=shm)
            else:
                assert memory.mount is not None
                assert memory.mount.point == point
                used = memory.mount.size - memory.mount.free
                memory = replace(memory, mount=replace(memory.mount, size=size, free=size - used))
        else:
            pages = re.fullmatch(r"echo (\d+) > /sys\S+/nr_hugepages", line)
            assert pages is not None
            assert memory.pool is not None
            more = int(pages[1]) - memory.pool.total
            pool = replace(memory.pool, total=int(pages[1]), left=memory.pool.left + more)
            taken = memory.available - more * memory.pool.page_bytes
            memory = replace(memory, pool=pool, available=taken)
    told = re.fullmatch(r"ray start --head --object-store-memory=(\d+) --memory=(\d+)", lines[-1])
    assert told is not None
    return memory, shm, int(told[1]), int(told[2])


def assert_it_fits(
    memory: NodeMemory, shm: MountRoom | None, made: Fit, asked: MemoryRequest
) -> None:
    after, shm_after, store, heap = followed(memory, shm, commands(made, ray_start))
    assert store >= RAY_REFUSES_BELOW, "Ray refuses less"
    assert heap >= asked.heap_bytes
    claims = MemoryClaims(object_store_bytes=store, threshold=made.threshold)
    # As `check_room` asks when the arena is made, with workers and Ray itself in memory by then.
    for room in rooms(after, asked.arena_bytes, claims):
        assert asked.arena_bytes <= room.left, room.name
    in_memory = 0 if after.pool is not None else asked.arena_bytes
    assert in_memory + store + heap + RAY_BYTES <= left(after, made.threshold) + RAY_BYTES
    if shm_after is not None:
        in_shm = asked.arena_bytes if after.mount is shm_after else 0
        assert store + in_shm <= shm_after.free, "Ray would put its object store on a disk"


def no_larger_than_fits(memory: NodeMemory, asked: MemoryRequest) -> MemoryRequest:
    """Bring an arena that is too large to a size that still asks for all there is to do."""
    largest = largest_arena(memory, asked)
    return replace(asked, arena_bytes=max(1, min(asked.arena_bytes, largest)))


@given(node(), request)
def test_what_is_printed_fits_when_it_is_followed(
    found: tuple[NodeMemory, MountRoom | None], asked: MemoryRequest
) -> None:
    memory, shm = found
    asked = no_larger_than_fits(memory, asked)
    made = plan(memory, shm, asked)
    assume(made.fits)
    assert_it_fits(memory, shm, made, asked)


@given(node(), request)
def test_the_largest_arena_that_is_named_fits_and_a_larger_one_does_not(
    found: tuple[NodeMemory, MountRoom | None], asked: MemoryRequest
) -> None:
    memory, shm = found
    largest = largest_arena(memory, asked)
    assume(largest > 0)
    asked = replace(asked, arena_bytes=largest)
    made = plan(memory, shm, asked)
    assert made.fits
    assert_it_fits(memory, shm, made, asked)
    assert not plan(memory, shm, replace(asked, arena_bytes=largest + 1)).fits


@given(node(), request)
def test_what_does_not_fit_has_no_room_at_the_least_that_could_be_given(
    found: tuple[NodeMemory, MountRoom | None], asked: MemoryRequest
) -> None:
    memory, shm = found
    made = plan(memory, shm, asked)
    assume(not made.fits)
    assume(memory.pool is None)
    store = asked.object_store_bytes or OBJECT_STORE_MIN
    most = left(memory, max(asked.threshold, 0.98))
    assert made.short_by == asked.arena_bytes + store + asked.heap_bytes - most


@given(node(), request)
def test_the_shares_of_every_bound_add_up(
    found: tuple[NodeMemory, MountRoom | None], asked: MemoryRequest
) -> None:
    memory, shm = found
    made = plan(memory, shm, no_larger_than_fits(memory, asked))
    assume(made.fits)
    small = {one.point for one in made.remounts}
    for share in made.shares:
        if Path(share.name) not in small and not (made.pool and share.name == "huge pages"):
            assert share.left >= 0, share.name


BIG = NodeMemory(total=512 * GIB, available=508 * GIB)
BIG_SHM = MountRoom(point=SHM, size=256 * GIB, free=256 * GIB, is_shm=True)


def fit_of(arena: int, *, heap: int = GIB, store: int | None = None, **changes: object) -> Fit:
    memory = replace(BIG, mount=BIG_SHM, **changes)
    asked = MemoryRequest(arena_bytes=arena, heap_bytes=heap, object_store_bytes=store)
    return plan(memory, memory.mount, asked)


def test_a_mount_is_enlarged_only_where_a_smaller_object_store_does_not_help() -> None:
    assert fit_of(250 * GIB).remounts == ()
    assert fit_of(250 * GIB).object_store_bytes == 6 * GIB
    (enlarged,) = fit_of(300 * GIB).remounts
    assert enlarged.size >= 300 * GIB


def test_an_object_store_that_was_asked_for_stays_as_it_is() -> None:
    made = fit_of(250 * GIB, store=20 * GIB)
    assert made.object_store_bytes == 20 * GIB
    assert [one.size for one in made.remounts] == [270 * GIB]


def test_the_threshold_is_raised_only_where_nothing_else_helps() -> None:
    assert fit_of(400 * GIB).threshold == 0.95
    assert fit_of(484 * GIB).threshold == 0.96
    assert not fit_of(508 * GIB).fits


def test_workers_get_all_that_is_left_under_the_threshold() -> None:
    made = fit_of(100 * GIB, store=10 * GIB)
    under = int(0.95 * 512 * GIB) - 4 * GIB
    expected = under - RAY_BYTES - 110 * GIB
    assert 0 <= expected - made.heap_bytes < MIB
