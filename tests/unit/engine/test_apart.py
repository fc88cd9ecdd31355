"""A leader without a pool of its own: what it knows of the ranks' comes with their facts."""

from kvray.actors.shard.shard import Shard
from kvray.engine.meta import RankLeases
from kvray.errors import LeaseExpired
from tests.unit.engine.apart import BLOCK
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
