"""What a leader promises, by what the ranks' facts tell it, and how it asks again and measures."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvray.engine.leader import Promises
from kvray.engine.meta import PageIds, Promise
from kvray.engine.prefix_finder import PrefillRate
from kvray.engine.request import Identity, Prompt
from kvray.engine.shared_state import TimeHistogram
from kvray.errors import LeaseExpired
from kvray.store.arena.layout import READY
from tests.kit.apart import BLOCK, Apart
from tests.kit.connector import HIT, NUM_WANTED, PROMPT
from tests.kit.shard_socket import StageServer
from tests.unit.engine.conftest import MakeEngine
from tests.waiting import HANG_S, wait_for


def test_an_answer_counts_once_however_often_it_is_asked_for(stored, engine):
    for _ in range(3):
        assert engine.ask(7, PROMPT) == HIT
    totals = engine.totals
    assert totals["requests"] == 0
    engine.leader.count(7)
    engine.leader.count(7)
    assert (totals["requests"], totals["hit_tokens"]) == (1, HIT)


@pytest.fixture
def holding(stored: Apart, make_engine: MakeEngine) -> Apart:
    """An engine whose ranks hold blocks before they are promised; the prompt is stored."""
    return make_engine(holds_loads=True, takes_offers_later=True)


def test_a_request_that_reads_no_cache_is_promised_nothing_and_saved(holding):
    tokens = [*PROMPT[:-1], 5, 6]
    asked = Prompt(7, tokens, len(tokens), 0, Identity(), is_unread=True)
    assert holding.leader.match(7, lambda: asked) == 0
    (save,) = holding.plan((7, tokens, holding.new_blocks(tokens), 0)).saves
    assert save.pages[0].num_blocks == len(tokens) // BLOCK
    assert holding.totals["miss_tokens_skipped"] == len(tokens) // BLOCK * BLOCK


def test_a_leader_whose_ranks_hold_blocks_leaves_it_to_them_to_check(holding):
    for slot in holding.arena.tables.slots_in(READY).tolist():
        holding.arena.slot_bytes(slot)[1] ^= 1
    assert holding.ask(7, PROMPT) == HIT
    holding.leader.finish(7)


def test_a_load_that_fails_leaves_the_others_of_its_pass(make_engine):
    prompts = (PROMPT, [*PROMPT[:20], *[1] * 20])
    warm, engine = make_engine(), make_engine()
    for prompt in prompts:
        warm.serve(prompt)
    assert [engine.ask(number, prompt) for number, prompt in enumerate(prompts)] == [HIT, HIT]
    first, second = (engine.new_blocks(prompt) for prompt in prompts)
    meta = engine.plan((0, prompts[0], first, HIT), (1, prompts[1], second, HIT))
    broken = meta.loads[0]._replace(pages=(PageIds(b"no number"),))
    meta = meta._replace(loads=(broken, meta.loads[1]))

    engine.rank.begin(meta, None)

    assert [type(error) for error in engine.rank.failed] == [ValueError]
    engine.check(prompts[1], second, HIT)
    engine.rank.end(None)
    dropped = engine.rank.shared.figures.totals["dropped_blocks_void"]
    assert dropped == sum(plan.pages[0].num_blocks for plan in meta.saves)
    assert engine.leased == 0


# -- asking again

SOON_S = 1.0


@pytest.fixture
def peered(server: StageServer, make_engine: MakeEngine) -> Apart:
    made = make_engine()
    wait_for(lambda: made.leader.shared.may_stage, "hearing of other nodes")
    return made


def answer_to(engine: Apart) -> int:
    """Ask until there is an answer, which no call waits for."""
    answers: list[int | None] = []

    def has_answered() -> bool:
        began = time.monotonic()
        answers.append(engine.ask(7, PROMPT))
        assert time.monotonic() - began < SOON_S
        return answers[-1] is not None

    wait_for(has_answered, "an answer")
    assert answers[-1] is not None
    return answers[-1]


def test_it_is_promised_what_was_staged_meanwhile(peered, server, make_engine):
    go_on = threading.Event()
    other = make_engine(block_reuse=False)  # it asks for nothing: another node

    def stage(request: dict[str, Any]) -> dict[str, Any]:
        assert go_on.wait(HANG_S)
        other.serve(PROMPT)
        return {"num_blocks": NUM_WANTED, "reason": "none"}

    server.answer = stage
    assert [peered.ask(7, PROMPT) for _ in range(3)] == [None] * 3
    go_on.set()
    assert answer_to(peered) == NUM_WANTED * BLOCK
    (request,) = server.asked
    assert (request["replica"], request["rank"]) == (peered.leader.shared.replica, 1)
    assert peered.totals["stage_calls"] == 1
    assert peered.totals["staged_tokens"] == NUM_WANTED * BLOCK


def test_a_silent_shard_is_waited_for_no_longer_than_said(server, make_engine, monkeypatch):
    monkeypatch.setenv("KVRAY_CONNECTOR__STAGE_WAIT_S", "0.3")
    silence = threading.Event()
    server.answer = lambda _: {"late": silence.wait(10)}
    engine = make_engine()
    wait_for(lambda: engine.leader.shared.may_stage, "hearing of other nodes")
    began = time.monotonic()
    assert answer_to(engine) == 0
    assert time.monotonic() - began < 5
    silence.set()


def test_a_request_that_ends_meanwhile_is_forgotten(peered, server):
    go_on = threading.Event()
    server.answer = lambda _: {"num_blocks": 0, "reason": "not_stored", "_": go_on.wait(10)}
    assert peered.ask(7, PROMPT) is None
    peered.leader.finish(7)
    assert not peered.leader.finder.is_pending(7)
    assert 7 not in peered.leader.states
    go_on.set()


TAIL = [({1}, 1, 0.01)] * 2
LARGE = [({1}, 4000, 0.5), *TAIL]
RATES = {
    "nothing is known at first": ([], 0),
    "nor while the first pass runs": ([({1}, 4000, 0.5)], 0),
    "a large pass is measured until the next is planned": (LARGE, 8000),
    "of an engine that overlaps the time shows one pass later": (
        [({1}, 4000, 0.001), ({1}, 1, 0.5), *TAIL],
        8000,
    ),
    "chunks of one prompt are measured each": ([({1}, 1000, 0.1)] * 5, 10_000),
    "time in which the engine had nothing to do does not count": (
        [*LARGE[:2], ({1}, 1, 60.0), ({2}, 4000, 30.0), ({3}, 4000, 0.5), *[({3}, 1, 0.01)] * 2],
        8000,
    ),
    "small passes say nothing": ([({1}, 1, 0.02)] * 9, 0),
    "a change of speed is noticed": ([({1}, 1000, 0.1)] * 20 + [({1}, 1000, 1.0)] * 20, 1000),
    "a clock that stands still breaks nothing": ([({1}, 1000, 0.0)] * 4, 0),
}


@pytest.mark.parametrize(("passes", "tokens_per_s"), RATES.values(), ids=RATES)
def test_the_speed_of_prefill_is_measured(passes, tokens_per_s):
    """Each pass is (requests, tokens, seconds until the next is planned)."""
    rate, at = PrefillRate(), 100.0
    for requests, tokens, seconds in passes:
        rate.note_pass(requests, tokens, at)
        at += seconds
    allowed = 0.1 if len(passes) == 40 else 1e-6
    assert rate.tokens_per_s == pytest.approx(tokens_per_s, rel=allowed)


# -- promises, and what calls took


def promise_of(*, first: int = 2, blocks: int = 5, **fields: Any) -> Promise:
    own = {"tokens_per_block": BLOCK, "num_computed": first * BLOCK}
    return Promise(lease=None, end=first + blocks, **own | fields)


TAKEN = {
    "without layer groups an engine takes all": (None, 2 * BLOCK, True, (5, True)),
    "or nothing": (None, -3 * BLOCK, True, (0, True)),
    "without a note all may have been taken": (None, 2 * BLOCK, False, (5, False)),
    "a note of nothing": (0, 2 * BLOCK, False, (0, True)),
    "of whole blocks": (12, 2 * BLOCK, False, (3, True)),
    "of a part of a block": (13, 2 * BLOCK, False, (4, False)),
    "of more than was promised": (99, 2 * BLOCK, False, (5, False)),
    "a block that the engine has in part": (2, 2 * BLOCK + 3, False, (2, False)),
    "the rest of a block": (5, 2 * BLOCK + 3, False, (2, True)),
}


@pytest.mark.parametrize(("noted", "position", "is_exact", "taken"), TAKEN.values(), ids=TAKEN)
def test_an_engine_that_may_take_less_notes_it_at_the_request(noted, position, is_exact, taken):
    promise = promise_of() if noted is None else promise_of(honoured=lambda: noted)
    assert promise.taken(position, is_exact=is_exact) == taken


def test_an_engine_that_counts_on_more_is_stopped():
    with pytest.raises(LeaseExpired, match="never promised"):
        promise_of().taken(12, is_exact=True)


def test_a_lost_promise_stops_only_the_engine_that_counts_on_it_up_to_a_bound(monkeypatch):
    monkeypatch.setattr("kvray.engine.leader._LOST_MAX", 3)
    args = SimpleNamespace(takes_offers_later=False)
    shared: Any = SimpleNamespace(args=args, release_prefix=lambda _: None)
    promises = Promises()
    for request_id in range(5):
        state: Any = SimpleNamespace(request_id=request_id, promise=None)
        promises.keep(state, promise_of(first=0))
    promises.settle(shared)
    promises.check(1, 40)  # so long ago that it is forgotten
    promises.check(2, 0)
    promises.forget(3)
    promises.check(3, 40)
    with pytest.raises(LeaseExpired, match="earlier pass"):
        promises.check(4, 1)


@given(st.lists(st.integers(0, 2**50), min_size=1, max_size=50))
def test_each_call_is_in_one_bucket_and_no_count_or_bound_is_lost(calls):
    timing = TimeHistogram()
    assert timing.counters("stage") == {}
    for nanoseconds in calls:
        timing.observe(nanoseconds)

    counters = timing.counters("stage")

    named = ((name.rpartition("_")[2], n) for name, n in counters.items() if "below" in name)
    buckets = {float(bound): n for bound, n in named}
    assert sum(buckets.values()) == len(calls)
    assert len(buckets) <= 19
    for bound in buckets:
        below = sum(count for other, count in buckets.items() if other <= bound)
        assert below == sum(nanoseconds < bound for nanoseconds in calls)
    assert counters["stage_us_sum"] == round(sum(calls) / 1000)
