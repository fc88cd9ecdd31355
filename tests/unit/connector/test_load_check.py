"""A load whose lease was not kept is never used; and what becomes of a flipped byte."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from kvray.engine.device.pool import Pieces
from kvray.engine.meta import ConnectorMeta
from kvray.errors import CorruptBlock, LeaseExpired
from kvray.store import Arena
from kvray.store.arena import lease, slabs
from kvray.store.machine.side_file import HOLDER_BYTES
from tests.kit.connector import BLOCK, HIT, PROMPT, Pair, Request, flip_a_byte
from tests.kit.devices import HostDevice
from tests.unit.connector.conftest import MakePair

Fault = Callable[[Arena], None]


class LateDevice(HostDevice):
    """A device whose loads are copied when somebody waits for them."""

    def __init__(self) -> None:
        self.late: list[Pieces] = []

    def copy(self, pieces: Pieces, stream: Any, *, is_load: bool, is_registered: bool) -> str:
        if is_load:
            self.late.append(pieces)
            return "late"
        return super().copy(pieces, stream, is_load=False, is_registered=is_registered)

    def query(self) -> bool:
        return not self.late

    def synchronize(self) -> None:
        while self.late:
            super().copy(self.late.pop(0), None, is_load=True, is_registered=True)


@pytest.fixture(params=["always", "never"])
def verified(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Pair:
    """A pair whose tier has PROMPT, and that checks what it loads always or never."""
    monkeypatch.setenv("KVRAY_CONNECTOR__VERIFY_ON_LOAD", request.param)
    pair = make_pair()
    pair.store(PROMPT)
    return pair


@pytest.fixture
def late_copies(make_pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvray.engine.device.gpu.CudaDevice", lambda _: LateDevice())


@pytest.fixture
def warm(late_copies: None, verified: Pair) -> Pair:
    """One whose device, if it has one, copies late."""
    return verified


def overwrite(arena: Arena) -> None:
    """Have other bytes in every slot, as if they had been evicted and given to others."""
    arena.tables.data[:] = 0xEE


def break_lease(arena: Arena) -> None:
    """End all leases of the process, as somebody who takes it for dead."""
    with arena.section(1) as entered:
        assert entered
        assert lease.release_holder(arena.tables, arena.holder)
    overwrite(arena)


def change_generation(arena: Arena) -> None:
    """Give the process's place to another one, and leave the records as they are."""
    arena.tables.holder_generation[arena.holder] += 1
    overwrite(arena)


def mark_gone(arena: Arena) -> None:
    """Take the process off the list of holders, and leave the records as they are."""
    arena.tables.holder_live[arena.holder] = 0
    overwrite(arena)


def lose_locks(arena: Arena) -> None:
    """Have another process find the place free, bury its holder and take it, and the slots too."""
    row = arena.holder
    arena.side_file.unlock(HOLDER_BYTES + row)
    other = Arena(arena.directory, lock_wait_s=1)
    assert other.join("other") == row
    overwrite(other)
    other.close()


on_a_device = pytest.mark.parametrize("make_pair", ["device"], indirect=True)

FAULTS = [break_lease, change_generation, mark_gone, lose_locks]


@contextmanager
def fault_during_copies(pair: Pair, fault: Fault) -> Iterator[None]:
    """Have `fault` happen when the copies have been asked for and not been made."""
    read = Arena.read_slots

    def fail_before(arena: Arena, *where: Any, **options: Any) -> None:
        fault(arena)
        read(arena, *where, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Arena, "read_slots", fail_before)
        yield
        if not pair.worker._rank.pool.is_host:
            fault(pair.arena)


def run_pass(pair: Pair, fault: Fault) -> None:
    with fault_during_copies(pair, fault):
        pair.worker.start_load_kv(None)
    pair.end_pass()


def load(
    pair: Pair, tokens: list[int] = PROMPT, *, begun: bool = False, computed: int = 0
) -> Request:
    """Return a request for which the next pass loads the prompt, or the one that has begun."""
    request = Request(2, tokens)
    assert pair.query(request, computed) >= HIT - computed
    pair.plan(request, computed)
    if begun:
        pair.worker.start_load_kv(None)
    return request


@pytest.mark.parametrize("computed", [0, HIT - 1], ids=["of all", "over a part"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_load_whose_lease_is_lost_during_its_copies_stops_the_engine(warm, fault, computed):
    load(warm, [*PROMPT, *range(20)], computed=computed)
    before = warm.totals["stored_blocks"]
    with pytest.raises(LeaseExpired):
        run_pass(warm, fault)
    with pytest.raises(LeaseExpired):
        warm.worker.get_finished([], [])
    warm.worker.bind_connector_meta(ConnectorMeta(namespace=warm.engine.identity.digest))
    with pytest.raises(LeaseExpired):
        warm.worker.start_load_kv(None)
    warm.flush()
    assert warm.totals["stored_blocks"] == before, "what was computed from it may be wrong"
    if not warm.engine.identity.is_host:
        assert warm.totals["dropped_blocks"] == warm.totals["dropped_blocks_void"] == 5


@pytest.mark.parametrize("fault", FAULTS)
def test_a_load_whose_lease_was_lost_before_it_stops_the_engine(warm, fault):
    request = load(warm)
    fault(warm.arena)
    with pytest.raises(LeaseExpired):
        warm.worker.start_load_kv(None)
    assert (warm.pool[request.block_ids] == -1.0).all()


def test_a_load_that_lands_late_is_right_and_its_lease_ends_behind_it(warm):
    request = load(warm, begun=True)
    assert warm.leased == (0 if warm.worker._rank.pool.is_host else 9)
    warm.end_pass()
    warm.check(request)
    assert warm.leased == 0
    assert warm.worker.get_finished([], []) == ([], [])


@on_a_device
def test_a_load_of_a_pass_that_is_dropped_is_checked_too(warm):
    load(warm, begun=True)
    break_lease(warm.arena)
    with pytest.raises(LeaseExpired):
        warm.worker.get_finished([], [])


@on_a_device
def test_a_block_that_somebody_found_corrupt_during_its_copy_stops_the_engine(warm):
    load(warm, begun=True)
    arena = warm.arena
    arena.quarantine(arena.leased_slots(warm.worker._metadata.loads[0].leased[0][1])[2:3])
    with pytest.raises(CorruptBlock):
        warm.end_pass()


@on_a_device
def test_leases_of_loads_that_nobody_waits_for_end_with_the_worker(warm):
    load(warm, begun=True)
    assert warm.leased == 9
    warm.worker._rank.close_pool()
    assert warm.leased == 0


@pytest.mark.parametrize("fault", [change_generation, mark_gone])
def test_what_is_read_by_a_lease_of_a_lost_holder_is_void(warm, fault):
    arena = warm.arena
    load(warm)
    held = warm.worker._metadata.loads[0].leased[0][1]
    fault(arena)
    with pytest.raises(LeaseExpired):
        arena.check(held, arena.leased_slots(held), verify=False)


@on_a_device
def test_a_load_by_a_lease_of_its_leaders_process_fails_when_that_has_lost_its_place(warm):
    load(warm)
    meta = warm.worker._metadata
    (plan,) = meta.loads
    arena = warm.arena
    leader = Arena(arena.directory, lock_wait_s=1)
    leader.join("leader")
    try:
        taken = leader.lease_slots(arena.leased_slots(plan.leased[0][1]))
        assert taken is not None
        told = plan._replace(leased=((arena.arena_id, taken),))
        warm.worker.bind_connector_meta(meta._replace(loads=(told,)))
        warm.worker.start_load_kv(None)
        arena.tables.holder_generation[leader.holder] += 1
        with pytest.raises(LeaseExpired, match="changed while its blocks were copied"):
            warm.end_pass()
    finally:
        leader.close()


FLIPPED = 3
WHOLE, SHORTER, ENDED, LET_THROUGH = "all of it", "shorter", "ended", "let through"

OUTCOMES = {
    # (verify_on_load, pool) -> (flipped before the promise, flipped before the load)
    ("always", "host"): (SHORTER, ENDED),
    ("auto", "host"): (SHORTER, ENDED),
    ("never", "host"): (LET_THROUGH, LET_THROUGH),
    ("always", "device"): (SHORTER, LET_THROUGH),
    ("auto", "device"): (LET_THROUGH, LET_THROUGH),
    ("never", "device"): (LET_THROUGH, LET_THROUGH),
}
CASES = [
    pytest.param(pool, verify, is_late, outcome, id=f"{verify}-{pool}-{moment}")
    for (verify, pool), outcomes in OUTCOMES.items()
    for (is_late, moment), outcome in zip(
        ((False, "before the promise"), (True, "before the load")), outcomes, strict=True
    )
]


@pytest.mark.parametrize(
    ("make_pair", "verified", "is_late", "outcome"), CASES, indirect=["make_pair", "verified"]
)
def test_a_flipped_byte_does_what_the_page_says(verified, is_late, outcome):
    def flip() -> None:
        flip_a_byte(verified.arena, depth=FLIPPED)

    assert serve(verified, flip, is_late=is_late) == outcome
    assert verified.leased == 0


def change_sizes(pair: Pair, *, is_consistent: bool) -> None:
    """Change the size of every slab that has blocks: one of its two copies, or both."""
    tables = pair.arena.tables
    used = tables.slab_block_bytes.nonzero()[0]
    sizes = tables.slab_block_bytes[used] ^ np.uint64(8)
    if not is_consistent:
        tables.slab_block_bytes[used] = sizes
        return
    with pair.arena.section(1) as entered:
        assert entered
        slabs.serve(tables, used, sizes)


@pytest.mark.parametrize("is_late", [False, True])
def test_a_flipped_bit_of_a_slabs_size_ends_no_engine_and_costs_no_block(verified, is_late):
    def change() -> None:
        change_sizes(verified, is_consistent=False)

    assert serve(verified, change, is_late=is_late) == WHOLE


def test_blocks_of_another_size_than_the_engines_are_not_promised(verified):
    change_sizes(verified, is_consistent=True)
    assert verified.query(Request(2, PROMPT)) == 0
    assert verified.leased == 0


def serve(pair: Pair, damage: Callable[[], None], *, is_late: bool) -> str:
    """Match and load PROMPT, with damage done before the match or right before the load."""
    request = Request(2, PROMPT)
    if not is_late:
        damage()
    if (matched := pair.query(request)) < HIT:
        assert matched == FLIPPED * BLOCK
        pair.scheduler.request_finished(request, [])
        return SHORTER
    if is_late:
        damage()
    pair.plan(request)
    try:
        pair.worker.start_load_kv(None)
        pair.end_pass()
    except CorruptBlock:
        return ENDED
    try:
        pair.check(request)
    except AssertionError:
        return LET_THROUGH
    return WHOLE
