"""A replica whose ranks are on two nodes: what is promised is leased for every one of them."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from kvray.actors.staging.replica_stager import ReplicaStager
from kvray.actors.staging.replicas import Reader, prefix_for
from kvray.actors.staging.stager import Staged
from kvray.errors import ConfigError, ShardUnavailable
from kvray.store import Arena, Lease, PartRequest
from tests.unit.actors.nodes import Nodes, until
from tests.unit.actors.small_shard import NAMESPACE
from tests.unit.store.small_arena import PATIENT_S, SLOT, chain, fetch, store
from tests.waiting import HANG_S

pytestmark = pytest.mark.anyio

KEYS = chain(20)
PACKED = b"".join(KEYS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Nodes `a` with the leader and rank 0, `b` with rank 1, and `c` that has blocks."""

    nodes: Nodes
    leader: ReplicaStager
    other: ReplicaStager
    ranks: tuple[Arena, ...]
    """The arena as each rank's process has it."""

    async def stage(self, wait_s: float = 2.0, **more: Any) -> tuple[int, str, dict[int, Any]]:
        """Have the leader stage KEYS; return how many came, why no more, and leases elsewhere."""
        answer = await self.leader.stage("r", 0, PACKED, wait_s=wait_s, **more)
        return answer["num_blocks"], answer["reason"], answer["leases"]

    def leased(self, rank: int) -> int:
        """Return how many slots are leased in the name of a rank."""
        tables, row = self.ranks[rank].tables, self.ranks[rank].holder
        pages = tables.page_holder == row + 1
        return int(tables.page_count[pages].sum())


@pytest.fixture
async def pair(nodes: Nodes) -> AsyncIterator[Pair]:
    ranks = tuple(Arena(nodes[name].arena.directory, lock_wait_s=PATIENT_S) for name in "ab")
    for number, arena in enumerate(ranks):
        arena.join(f"rank {number}")
    leader, other = (
        nodes.replica_stager(name, {rank: reader_of(rank, ranks[rank])})
        for rank, name in enumerate("ab")
    )
    yield Pair(nodes=nodes, leader=leader, other=other, ranks=ranks)
    nodes.may_move.set()
    await leader.close()
    await other.close()
    for arena in ranks:
        arena.close()


def reader_of(rank: int, arena: Arena, *more: PartRequest) -> Reader:
    return Reader(
        namespace=replace(NAMESPACE, part_bytes=4096, num_parts=2),
        part_requests=(PartRequest(rank), *more),
        num_ranks=2,
        arena_id=arena.arena_id,
        member=arena.membership,
    )


def store_both(pair: Pair, num_blocks: int = 20) -> None:
    for part in (0, 1):
        store(pair.nodes["c"].arena, KEYS[:num_blocks], part=part)


async def test_both_nodes_stage_and_the_other_ranks_lease_is_in_its_own_name(pair):
    store_both(pair, 12)
    *found, leases = await pair.stage()
    assert found == [12, "not_stored"]
    ((rank, (arena_id, *numbers)),) = leases.items()
    lease_id, page, num_slots, check = numbers
    lease = Lease(lease_id=lease_id, page=page, num_slots=num_slots, check=check)
    assert (rank, arena_id) == (1, pair.ranks[1].arena_id)
    assert fetch(pair.ranks[1], KEYS[:12], lease, part=1)
    assert pair.leased(1) == 12
    pair.ranks[1].leave()
    assert not pair.ranks[1].tables.page_holder[lease.page]
    held = pair.ranks[0].lease_for(KEYS[:12], [[PartRequest(0)]])
    assert held.num_blocks == 12


async def test_a_frozen_shard_of_another_rank_answers_in_time_and_is_left_alone(pair):
    store_both(pair)
    pair.nodes.frozen.add("kvray-shard-b")
    assert await pair.stage(0.1) == (0, "too_slow", {})
    await until(lambda: any(peer["error"] for peer in pair.leader.status()["peers"]))
    calls = len(pair.nodes.calls)
    assert await pair.stage(0.1) == (0, "store_down", {})
    assert ("kvray-shard-b", "stage_ranks") not in pair.nodes.calls[calls:]


async def test_blocks_of_ranks_elsewhere_count_once_they_are_checked_there(pair):
    store(pair.nodes["a"].arena, KEYS, part=0)
    stored = store(pair.nodes["b"].arena, KEYS, part=1)
    pair.ranks[1].slot_bytes(int(stored.slots[12]))[7] ^= 1  # as broken memory does
    for verify_from, expected in (
        (None, (20, "none")),
        (13, (20, "none")),
        (3, (12, "corrupt")),
        (3, (12, "not_stored")),
    ):
        *found, leases = await pair.stage(verify_from=verify_from)
        assert (*found, leases[1][3]) == (*expected, expected[0])


async def test_the_windows_of_the_shortest_prefix_are_checked(pair):
    for rank, (name, num_blocks) in enumerate((("a", 10), ("b", 20))):
        reader = reader_of(rank, pair.ranks[rank], PartRequest(2, window=4))
        pair.nodes.replicas[f"kvray-shard-{name}"].register(1, "r", rank, reader)
        for part in (rank, 2):
            stored = store(pair.nodes[name].arena, KEYS[:num_blocks], part=part)
    pair.ranks[1].slot_bytes(int(stored.slots[8]))[7] ^= 1  # far before the windows of all 20
    assert await pair.stage(verify_from=0) == (0, "corrupt", {})
    assert pair.leased(1) == 0
    valid = await pair.leader.stage("r", 0, PACKED[: 8 * 32], wait_s=2.0, verify_from=0)
    assert valid["num_blocks"] == 8
    assert valid["leases"][1][3] == 8 + 4


def sums_wait(monkeypatch: pytest.MonkeyPatch, piece: int, wait: Callable[[int], object]) -> None:
    """Check `piece` blocks at a time, each piece after `wait` of its first block's place."""
    valid = Arena.valid

    def slowly(arena: Arena, *args: Any) -> Any:
        wait(args[1].start)
        return valid(arena, *args)

    monkeypatch.setattr("kvray.actors.staging.spread._PIECE_BYTES", piece * SLOT)
    monkeypatch.setattr(Arena, "valid", slowly)


async def test_what_was_checked_in_time_counts(pair, monkeypatch):
    store(pair.nodes["b"].arena, KEYS, part=1)
    sums_wait(monkeypatch, 1, lambda _: time.sleep(0.05))
    answer = await pair.other.stage_here("r", [1], 1.0, 0.0, 0, PACKED)
    assert 0 < answer["num_blocks"] < 20
    assert answer["reason"] == "too_slow"


async def test_a_check_that_hangs_holds_up_nobody(pair, monkeypatch):
    may_sum = threading.Event()
    store(pair.nodes["b"].arena, KEYS, part=1)
    sums_wait(monkeypatch, 4, lambda start: start < 8 or may_sum.wait(HANG_S))
    answer = await pair.other.stage_here("r", [1], 0.1, 0.0, 0, PACKED)
    assert answer == {"num_blocks": 0, "reason": "too_slow"}
    may_sum.set()
    await pair.other.close()
    assert not pair.nodes["b"].arena.stats()["leased_blocks"]
    prefix = prefix_for(KEYS, [reader_of(1, pair.ranks[1])], 0.0)
    staged = Staged(num_blocks=20, reason="none")
    refused = await pair.other._verifier.valid(prefix, staged, 0, until=time.monotonic() + 1)
    assert refused.num_blocks == 0


async def test_a_long_prompt_travels_in_pieces_that_ray_sends_with_the_call(pair):
    keys, sent = chain(5000), dict[str, list[int]]()

    def answer(method: str, said: Any) -> None:
        def take(*args: Any) -> Any:
            sent[method] = [len(one) for one in args if isinstance(one, bytes)]
            return said

        pair.nodes.others[f"kvray-shard-b.{method}"] = take

    store(pair.nodes["a"].arena, keys[:4], part=0)
    answer("stage_ranks", {"num_blocks": 5000, "reason": "none"})
    answer("lease_ranks", {1: ["arena", 1, 0, 4]})
    assert (await pair.leader.stage("r", 0, b"".join(keys), wait_s=2.0))["num_blocks"] == 4
    assert max(sent["stage_ranks"]) < 100 * 2**10
    assert [sum(sent[method]) for method in ("stage_ranks", "lease_ranks")] == [160_000, 128]


@pytest.mark.parametrize("has_died", [False, True], ids=["is lost", "was cut off by its death"])
async def test_leases_whose_answer_is_lost_are_released_by_the_shard_or_the_next(pair, has_died):
    store_both(pair)

    async def lose(*args: Any) -> Any:
        assert pair.other.leases.lease(*args)
        assert pair.leased(1) == 20
        if not has_died:
            await asyncio.sleep(60)
        pair.nodes.replica_stager("b", {})  # no rank has registered again yet
        raise ShardUnavailable("The shard died.")

    pair.nodes.others["kvray-shard-b.lease_ranks"] = lose
    assert await pair.stage(0.2) == (0, "too_slow", {})
    await until(lambda: not pair.leased(1))


async def test_a_token_that_was_released_leases_nothing_any_more(pair):
    store(pair.nodes["b"].arena, KEYS, part=1)
    pair.other.leases.release("token")
    assert pair.other.leases.lease("r", [1], "token", PACKED) == {}
    assert pair.leased(1) == 0
    assert pair.other.leases.lease("r", [1], "another", PACKED)[1][3] == 20
    pair.other.leases.release("another")
    pair.other.leases.release("another")
    assert pair.leased(1) == 0


@pytest.mark.parametrize(("num_blocks", "has_left"), [(20, True), (19, False)])
async def test_no_lease_is_taken_for_who_left_nor_of_less_than_asked(pair, num_blocks, has_left):
    store(pair.nodes["b"].arena, KEYS[:num_blocks], part=1)
    if has_left:
        pair.ranks[1].leave()
        pair.ranks[1].join("somebody else in the same row")
    assert pair.other.leases.lease("r", [1], "token", PACKED) == {}
    assert pair.leased(1) == 0


async def test_a_prefetch_tells_what_it_has_brought_for_all_ranks(pair):
    store_both(pair, 12)
    store(pair.nodes["a"].arena, KEYS[:4], part=0)
    found = await pair.leader.prefetch("r", 0, PACKED)
    assert found.pop("arrivals")
    assert found == {"num_blocks": 12, "num_staged": 8, "reason": "not_stored"}
    assert pair.nodes["b"].arena.present(KEYS, [1])[0].sum() == 12
    assert pair.leased(1) == 0


async def test_who_has_not_registered_is_told_so_and_has_no_ranks_elsewhere(pair):
    for ask in (
        pair.leader.stage("unknown", 0, PACKED, wait_s=0.1),
        pair.leader.prefetch("unknown", 0, PACKED),
    ):
        with pytest.raises(ConfigError, match="has not registered"):
            await ask
    with pytest.raises(ConfigError, match=r"Ranks \[0\]"):
        await pair.other.stage_here("r", [0, 1], 0.1, 0.0, None, PACKED)
    assert [pair.leader.has_ranks_elsewhere(one, 0) for one in ("r", "unknown")] == [True, False]
