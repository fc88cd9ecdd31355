"""A load whose lease was not kept is never used; and what becomes of a flipped byte."""

from collections.abc import Callable
from typing import Any

import pytest

from kvray.engine.device.pool import Pieces
from kvray.engine.meta import ConnectorMeta
from kvray.errors import CorruptBlock, LeaseExpired
from kvray.store import Arena
from kvray.store.arena import lease
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


def break_lease(arena: Arena) -> None:
    """End all leases of the process, as somebody who takes it for dead."""
    with arena.section(1) as entered:
        assert entered
        assert lease.release_holder(arena.tables, arena.holder)


def change_generation(arena: Arena) -> None:
    """Give the process's place to another one, and leave the records as they are."""
    arena.tables.holder_generation[arena.holder] += 1


def mark_gone(arena: Arena) -> None:
    """Take the process off the list of holders, and leave the records as they are."""
    arena.tables.holder_live[arena.holder] = 0


def lose_locks(arena: Arena) -> None:
    """Have another process find the place free, bury its holder and take it."""
    row = arena.holder
    arena.side_file.unlock(HOLDER_BYTES + row)
    other = Arena(arena.directory, lock_wait_s=1)
    assert other.join("other") == row
    other.close()


on_a_device = pytest.mark.parametrize("make_pair", ["device"], indirect=True)

by_fault = pytest.mark.parametrize("fault", [break_lease, change_generation, mark_gone, lose_locks])


def lose(arena: Arena, fault: Fault) -> None:
    """Have a fault end the lease, and other bytes in every slot, as if they had been evicted."""
    fault(arena)
    arena.tables.data[:] = 0xEE


def run_pass(pair: Pair, fault: Fault) -> None:
    """Do a pass in which the fault happens when copies have been asked for and not been made."""
    read = Arena.read_slots

    def fail_before(arena: Arena, *where: Any, **options: Any) -> None:
        lose(arena, fault)
        read(arena, *where, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Arena, "read_slots", fail_before)
        pair.worker.start_load_kv(None)
        if not pair.worker._rank.pool.is_host:
            lose(pair.arena, fault)
    pair.end_pass()


def load(pair: Pair, tokens: list[int] = PROMPT, computed: int = 0) -> Request:
    """Return a request for which the next pass loads the prompt."""
    request = Request(2, tokens)
    assert pair.query(request, computed) >= HIT - computed
    pair.plan(request, computed)
    return request


@pytest.fixture
def loading(warm: Pair) -> Pair:
    load(warm)
    warm.worker.start_load_kv(None)
    return warm


@pytest.mark.parametrize("computed", [0, HIT - 1], ids=["of all", "over a part"])
@by_fault
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


@by_fault
def test_a_load_whose_lease_was_lost_before_it_stops_the_engine(warm, fault):
    request = load(warm)
    lose(warm.arena, fault)
    with pytest.raises(LeaseExpired):
        warm.worker.start_load_kv(None)
    assert (warm.pool[request.block_ids] == -1.0).all()


def test_a_load_that_lands_late_is_right_and_its_lease_ends_behind_it(warm):
    request = load(warm)
    warm.worker.start_load_kv(None)
    assert warm.leased == (0 if warm.worker._rank.pool.is_host else 9)
    warm.end_pass()
    warm.check(request)
    assert warm.leased == 0
    assert warm.worker.get_finished([], []) == ([], [])


@on_a_device
def test_a_load_of_a_pass_that_is_dropped_is_checked_too(loading):
    break_lease(loading.arena)
    with pytest.raises(LeaseExpired):
        loading.worker.get_finished([], [])


@on_a_device
def test_a_block_that_somebody_found_corrupt_during_its_copy_stops_the_engine(loading):
    arena = loading.arena
    arena.quarantine(arena.leased_slots(loading.worker._metadata.loads[0].leased[0][1])[2:3])
    with pytest.raises(CorruptBlock):
        loading.end_pass()


@on_a_device
def test_leases_of_loads_that_nobody_waits_for_end_with_the_worker(loading):
    assert loading.leased == 9
    loading.worker._rank.close_pool()
    assert loading.leased == 0


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
SHORTER, ENDED, LET_THROUGH = "shorter", "ended", "let through"


@pytest.mark.parametrize(
    ("verified", "make_pair", "if_early", "if_late"),
    [
        ("always", "host", SHORTER, ENDED),
        ("auto", "host", SHORTER, ENDED),
        ("never", "host", LET_THROUGH, LET_THROUGH),
        ("always", "device", SHORTER, LET_THROUGH),
        ("auto", "device", LET_THROUGH, LET_THROUGH),
        ("never", "device", LET_THROUGH, LET_THROUGH),
    ],
    indirect=["verified", "make_pair"],
)
@pytest.mark.parametrize("is_late", [False, True], ids=["before promise", "before load"])
def test_a_flipped_byte_does_what_the_page_says(verified, is_late, if_early, if_late):
    assert serve_flipped(verified, is_late=is_late) == (if_late if is_late else if_early)
    assert verified.leased == 0


def serve_flipped(pair: Pair, *, is_late: bool) -> str:
    """Match and load PROMPT, of which a byte is flipped before the match, or before the load."""
    request = Request(2, PROMPT)
    if not is_late:
        flip_a_byte(pair.arena, depth=FLIPPED)
    if (matched := pair.query(request)) < HIT:
        assert matched == FLIPPED * BLOCK
        pair.scheduler.request_finished(request, [])
        return SHORTER
    if is_late:
        flip_a_byte(pair.arena, depth=FLIPPED)
    pair.plan(request)
    try:
        pair.worker.start_load_kv(None)
        pair.end_pass()
    except CorruptBlock:
        return ENDED
    with pytest.raises(AssertionError):
        pair.check(request)
    return LET_THROUGH
