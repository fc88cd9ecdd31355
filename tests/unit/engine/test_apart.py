"""A leader without a pool of its own: what it knows of the ranks' comes with their facts."""

from kvray.actors.shard.shard import Shard
from kvray.engine.meta import RankLeases
from kvray.engine.request.identity import AskedRequest, Identity
from kvray.errors import LeaseExpired
from kvray.store.arena.layout import READY
from tests.unit.engine.apart import BLOCK, Apart
from tests.unit.engine.conftest import MakeEngine

PROMPT = list(range(100, 140))
HIT = (len(PROMPT) - 1) // BLOCK * BLOCK


def test_what_one_engine_has_computed_another_loads(shard: Shard, make_engine: MakeEngine) -> None:
    assert make_engine().serve(PROMPT) == 0
    assert make_engine().serve(PROMPT) == HIT


def test_the_shard_knows_the_leader_as_one_rank_more(shard: Shard, make_engine: MakeEngine) -> None:
    engine = make_engine()
    name = engine.leader.shared.pool.replica
    known = [(one["replica"], one["rank"]) for one in shard.status()["replicas"]]
    assert known.count((name, 0)) == known.count((name, 1)) == 1


def test_an_answer_counts_once_however_often_it_is_asked_for(
    shard: Shard, make_engine: MakeEngine
) -> None:
    make_engine().serve(PROMPT)
    engine = make_engine()
    for _ in range(3):
        assert engine.ask(7, PROMPT) == HIT
    totals = engine.leader.shared.figures.totals
    assert totals["requests"] == 0
    engine.leader.count(7)
    engine.leader.count(7)
    assert (totals["requests"], totals["hit_tokens"]) == (1, HIT)


def holding(make_engine: MakeEngine) -> Apart:
    """Return an engine whose ranks hold blocks before they are promised; the prompt is stored."""
    make_engine().serve(PROMPT)
    return make_engine(holds_loads=True, takes_offers_later=True)


def test_an_offer_that_was_not_taken_is_renewed_as_far_as_its_blocks_are_sound(
    shard: Shard, make_engine: MakeEngine
) -> None:
    engine = holding(make_engine)
    leader, totals = engine.leader, engine.leader.shared.figures.totals
    assert engine.ask(7, PROMPT) == HIT
    engine.plan()  # passes may go by until it is taken
    assert leader.offer_again(7, BLOCK, end=5) == 4 * BLOCK
    assert leader.states[7].num_saved == 5
    leader.count(7)
    assert (totals["local_tokens"], totals["hit_tokens"]) == (BLOCK, 4 * BLOCK)
    assert totals["miss_tokens_corrupt"] == HIT - 5 * BLOCK
    assert leader.offer_again(7, HIT, end=5) == 0
    leader.decline(7)
    assert leader.offer_again(7, 0, end=5) == 0


def test_what_is_declined_was_missed_for_the_reason_that_is_given(
    shard: Shard, make_engine: MakeEngine
) -> None:
    engine = holding(make_engine)
    assert engine.ask(7, PROMPT) == HIT
    engine.leader.decline(7, "too_slow")
    engine.leader.count(7)
    assert engine.leader.shared.figures.totals["miss_tokens_too_slow"] == HIT
    arena = engine.leader.shared.link.arena
    assert arena is not None
    assert arena.stats()["leased_blocks"] == 0


def test_a_request_that_reads_no_cache_is_promised_nothing_and_saved(
    shard: Shard, make_engine: MakeEngine
) -> None:
    engine = holding(make_engine)
    tokens = [*PROMPT[:-1], 5, 6]
    asked = AskedRequest(7, tokens, len(tokens), 0, Identity(), is_unread=True)
    assert engine.leader.ask(7, lambda _: asked) == 0
    (save,) = engine.plan((7, tokens, engine.new_blocks(tokens), 0)).saves
    assert save.pages[0].num_blocks == len(tokens) // BLOCK
    assert (
        engine.leader.shared.figures.totals["miss_tokens_skipped"] == len(tokens) // BLOCK * BLOCK
    )


def test_a_leader_whose_ranks_hold_blocks_leaves_it_to_them_to_check(
    shard: Shard, make_engine: MakeEngine
) -> None:
    engine = holding(make_engine)
    arena = engine.leader.shared.link.arena
    assert arena is not None
    for slot in arena.tables.slots_in(READY).tolist():
        arena.slot_bytes(slot)[1] ^= 1
    assert engine.ask(7, PROMPT) == HIT
    engine.leader.finish(7)


def test_a_load_that_fails_leaves_the_others_of_its_pass(
    shard: Shard, make_engine: MakeEngine
) -> None:
    other = PROMPT[:20] + [1] * 20
    warm = make_engine()
    for prompt in (PROMPT, other):
        warm.serve(prompt)
    engine = make_engine()
    hits = [engine.ask(number, prompt) for number, prompt in enumerate((PROMPT, other))]
    assert hits == [HIT, HIT]
    blocks = [engine.new_blocks(prompt) for prompt in (PROMPT, other)]
    meta = engine.plan((0, PROMPT, blocks[0], HIT), (1, other, blocks[1], HIT))
    first, second = meta.loads
    lost = RankLeases(("nowhere",), first.leased.leases)
    meta = meta._replace(loads=(first._replace(leased=lost), second))

    engine.rank.begin(meta, None)

    (error,) = engine.rank.failed
    assert isinstance(error, LeaseExpired)
    engine.check(other, blocks[1], HIT)
    engine.rank.end(None)
    dropped = engine.rank.shared.figures.totals["dropped_blocks_void"]
    assert dropped == sum(plan.pages[0].num_blocks for plan in meta.saves)
    engine.leader.shared.release_leases(first_arena(engine), *first.leased.leases)


def first_arena(engine: object) -> object:
    return engine.leader.shared.link.arena  # type: ignore[attr-defined]
