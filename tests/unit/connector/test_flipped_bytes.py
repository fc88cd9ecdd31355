"""What becomes of a flipped byte, for each setting, pool and moment: the table in docs/failures.md.

A setting that does not look lets it through; one that looks too late for a shorter promise stops
the engine, which has no way to be told.
"""

import numpy as np
import pytest

from kvray.actors.shard.shard import Shard
from kvray.connector.base import RequestData, SchedulerOutput
from kvray.errors import CorruptBlock
from kvray.store.arena import slabs
from tests.unit.connector.conftest import MakePair, arena_of, leased
from tests.unit.connector.pair import BLOCK, Pair, Request
from tests.unit.connector.test_scheduler import flip_a_byte

PROMPT = list(range(100, 140))
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
    pytest.param(verify, pool, is_late, outcome, id=f"{verify}-{pool}-{moment}")
    for (verify, pool), outcomes in OUTCOMES.items()
    for (is_late, moment), outcome in zip(
        ((False, "before the promise"), (True, "before the load")), outcomes, strict=True
    )
]


@pytest.mark.parametrize(
    ("verify", "make_pair", "is_late", "outcome"), CASES, indirect=["make_pair"]
)
def test_a_flipped_byte_does_what_the_page_says(
    shard: Shard,
    make_pair: MakePair,
    monkeypatch: pytest.MonkeyPatch,
    verify: str,
    is_late: bool,
    outcome: str,
) -> None:
    monkeypatch.setenv("KVRAY_CONNECTOR__VERIFY_ON_LOAD", verify)
    pair = make_pair()
    pair.serve(Request(1, PROMPT))
    pair.flush()
    assert serve(pair, flip=is_late, flip_first=not is_late) == outcome
    assert leased(pair) == 0


@pytest.mark.parametrize("verify", ["always", "auto", "never"])
def test_a_block_that_somebody_has_found_corrupt_is_not_promised(
    shard: Shard, make_pair: MakePair, monkeypatch: pytest.MonkeyPatch, verify: str
) -> None:
    monkeypatch.setenv("KVRAY_CONNECTOR__VERIFY_ON_LOAD", verify)
    pair = make_pair()
    pair.serve(Request(1, PROMPT))
    pair.flush()
    tables = arena_of(pair).tables
    found = ((tables.slot_depth == FLIPPED) & (tables.slot_state == 2)).nonzero()[0]
    arena_of(pair).quarantine(found)
    assert serve(pair, flip=False, flip_first=False) == SHORTER


def change_sizes(pair: Pair, *, is_consistent: bool) -> None:
    """Change the size of every slab that has blocks: one of its two copies, or both."""
    tables = arena_of(pair).tables
    used = tables.slab_block_bytes.nonzero()[0]
    if is_consistent:
        with arena_of(pair).section(1) as entered:
            assert entered
            slabs.serve(tables, used, tables.slab_block_bytes[used] ^ np.uint64(8))
    else:
        tables.slab_block_bytes[used] ^= np.uint64(8)


@pytest.mark.parametrize("verify", ["always", "never"])
@pytest.mark.parametrize("is_late", [False, True])
def test_a_flipped_bit_of_a_slabs_size_ends_no_engine_and_costs_no_block(
    shard: Shard, make_pair: MakePair, monkeypatch: pytest.MonkeyPatch, verify: str, is_late: bool
) -> None:
    monkeypatch.setenv("KVRAY_CONNECTOR__VERIFY_ON_LOAD", verify)
    pair = make_pair()
    pair.serve(Request(1, PROMPT))
    pair.flush()
    request = Request(2, PROMPT)
    if not is_late:
        change_sizes(pair, is_consistent=False)
    pair.query(request)
    assert request.matched == 9 * BLOCK
    if is_late:
        change_sizes(pair, is_consistent=False)
    pair.plan(request)
    pair.worker.start_load_kv(None)
    for index in range(9):
        assert (pair.pool[request.block_ids[index]] == pair.content(request, index)).all()
    pair.compute(request)
    pair.finish(request)


@pytest.mark.parametrize("verify", ["always", "never"])
def test_blocks_of_another_size_than_the_engines_are_not_promised(
    shard: Shard, make_pair: MakePair, monkeypatch: pytest.MonkeyPatch, verify: str
) -> None:
    monkeypatch.setenv("KVRAY_CONNECTOR__VERIFY_ON_LOAD", verify)
    pair = make_pair()
    pair.serve(Request(1, PROMPT))
    pair.flush()
    change_sizes(pair, is_consistent=True)
    request = Request(2, PROMPT)
    pair.query(request)
    assert request.matched == 0
    assert leased(pair) == 0


def serve(pair: Pair, *, flip: bool, flip_first: bool) -> str:
    """Match and load PROMPT, with a byte flipped before the match or right before the load."""
    if flip_first:
        flip_a_byte(arena_of(pair), depth=FLIPPED)
    request = Request(2, PROMPT)
    request.block_ids = list(range(20, 30))
    pair.pool[request.block_ids] = -1.0
    matched, _ = pair.scheduler.get_num_new_matched_tokens(request, 0)
    if matched < 9 * BLOCK:
        assert matched == FLIPPED * BLOCK
        pair.scheduler.request_finished(request, [])
        return SHORTER
    if flip:
        flip_a_byte(arena_of(pair), depth=FLIPPED)
    report = RequestData(
        request.request_id,
        list(PROMPT),
        list(request.block_ids),
        0,
        len(PROMPT) - matched,
    )
    try:
        begin_pass(pair, report)
        pair.end_pass()
    except CorruptBlock:
        return ENDED
    wanted = [pair.content(request, index) for index in range(9)]
    is_right = all(
        (pair.pool[page] == value).all()
        for page, value in zip(request.block_ids, wanted, strict=False)
    )
    return WHOLE if is_right else LET_THROUGH


def begin_pass(pair: Pair, *reports: RequestData) -> None:
    meta = pair.scheduler.build_connector_meta(SchedulerOutput(new_requests=list(reports)))
    pair.worker.bind_connector_meta(meta)
    pair.worker.start_load_kv(None)
