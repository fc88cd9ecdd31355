"""Staging into a real arena from others: one fetch a block, deadlines, handover, and what fails."""

import asyncio
import itertools
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvray.actors.lookup.delta import partition_of
from kvray.actors.mover.orders import FetchOrder, FetchReport, SourceReport
from kvray.actors.names import lookup_name
from kvray.actors.ray_glue.arguments import unpacked
from kvray.actors.staging import stager as stager_module
from kvray.actors.staging.plan import Peer, runs_of
from kvray.actors.staging.stager import Staged, Stager
from kvray.errors import ShardUnavailable
from kvray.identity.block import BlockKey
from kvray.index import Run
from kvray.store import Arena, PartRequest
from kvray.trace.arrival import NVME
from tests.examples import examples
from tests.unit.actors.nodes import SETTINGS, Nodes, prefix_of, until
from tests.unit.store.small_arena import chain, num_here, served, store

pytestmark = pytest.mark.anyio

KEYS = chain(20)


@pytest.fixture
async def stager(nodes: Nodes, request: pytest.FixtureRequest) -> AsyncIterator[Stager]:
    """The one of node `a`; its parameter changes what it is made of."""
    made = nodes.stager(**getattr(request, "param", {}))
    yield made
    nodes.may_move.set()
    await made.close()


@pytest.fixture
def full(nodes: Nodes) -> Nodes:
    """The nodes, where `b` has KEYS."""
    store(nodes["b"].arena, KEYS)
    return nodes


@pytest.fixture
def slow(full: Nodes) -> Nodes:
    """Nothing moves before it is allowed."""
    full.may_move.clear()
    return full


def stage(
    stager: Stager, keys: list[BlockKey] = KEYS, wait_s: float = 5, *parts: PartRequest, **more: Any
) -> asyncio.Task[Staged]:
    asked = prefix_of(keys, *parts, **more)
    return asyncio.ensure_future(stager.stage(asked, until=time.monotonic() + wait_s))


async def move_five(nodes: Nodes) -> None:
    """Let the mover that has an order bring five blocks, and wait again."""
    nodes.blocks_per_step = 5
    await nodes.was_ordered.wait()
    nodes.may_move.set()
    await asyncio.sleep(0)
    nodes.may_move.clear()


# -- what comes -----------------------------------------------------------------------------------


async def test_blocks_that_came_without_a_checksum_are_counted_though_none_was_valid(nodes, stager):
    store(nodes["b"].arena, KEYS[:12])
    source = SourceReport(num_blocks=0, num_bytes=0, seconds=0.001, transport="copy", corrupt=12)
    report = FetchReport(here=(0,), sources={"kvray-mover-b": source})
    nodes.others["kvray-mover-a.fetch"] = lambda *_: report
    assert (await stage(stager)).num_blocks == 0
    assert stager.status()["corrupt_blocks"] == 12


@pytest.mark.parametrize(
    ("num_here", "stager", "gone", "wait_s", "staged"),
    [
        pytest.param(20, {}, (), 5, (20, "none"), id="what is here costs no call"),
        pytest.param(0, {"num_shards": 1}, (), 5, (0, "not_stored"), id="alone nobody is called"),
        pytest.param(0, {"num_shards": 0}, (), 5, (0, "store_down"), id="nobody knows the others"),
        pytest.param(2, {}, (), 0, (2, "too_slow"), id="no wait gets what is here"),
        pytest.param(3, {}, ("b",), 5, (3, "too_slow"), id="a holder that is gone"),
    ],
    indirect=["stager"],
)
async def test_what_cannot_come_makes_a_shorter_hit(nodes, stager, num_here, gone, wait_s, staged):
    store(nodes["a"].arena, KEYS[:num_here])
    store(nodes["b"].arena, KEYS)
    nodes.gone = {f"kvray-mover-{name}" for name in gone}
    found = await stage(stager, wait_s=wait_s)
    assert (found.num_blocks, found.reason) == staged
    assert gone or not wait_s or nodes.calls == [], "nobody is called"


async def test_a_prefix_longer_than_one_fetch_comes_in_several(full, stager, monkeypatch):
    monkeypatch.setattr("kvray.actors.staging.fetcher.FETCH_BLOCKS_MAX", 6)
    assert (await stage(stager)).num_blocks == 20
    assert [order.spans[0].depth for order in full.orders] == [0, 6, 12, 18]


@pytest.mark.parametrize("nodes", [80], indirect=True)
async def test_what_costs_more_than_computing_it_is_left(nodes, stager):
    large = chain(300, seed="large")
    store(nodes["b"].arena, large)
    await stage(stager, large)  # 1.2 MB in 1 ms: the rate is known
    store(nodes["b"].arena, KEYS)
    for seconds, reason in ((1e-9, "cheaper_to_recompute"), (1.0, "none")):
        assert (await stage(stager, seconds_per_block=seconds)).reason == reason


async def test_who_joins_waits_for_his_blocks_alone_and_gets_them_whoever_gives_up(slow, stager):
    first = stage(stager)
    await slow.was_ordered.wait()
    five, all_of_it = stage(stager, KEYS[:5]), stage(stager)
    await until(lambda: stager.status()["joined"] == 2)
    await move_five(slow)
    assert await five == Staged(num_blocks=5, reason="none")
    assert first.cancel(), "it is under way"
    slow.may_move.set()
    assert (await all_of_it).num_blocks == 20
    assert len(slow.orders) == 1


# -- deadlines ------------------------------------------------------------------------------------


async def test_what_has_come_by_the_deadline_counts_and_is_told_with_its_source(slow, stager):
    asked = stage(stager, wait_s=0.2)
    await move_five(slow)
    assert await asked == Staged(num_blocks=5, reason="too_slow")
    # Nothing is known of how the mover of b sends.
    assert asked.result().arrivals == ((5, "host", "kvray-shard-b"),)
    slow.may_move.set()
    assert (await stage(stager)).num_blocks == 20
    assert (len(slow.orders), stager.status()["late"]) == (1, 1), "it was late, and went on"

    other = chain(20, seed="other")
    store(slow["b"].arena, other)

    async def give_up(*order: Any) -> FetchReport:
        await slow.fetch(slow["a"], unpacked(*order))
        raise ShardUnavailable("The mover answered too late.")

    slow.others["kvray-mover-a.fetch"] = give_up
    staged = await stage(stager, other)
    assert staged == Staged(num_blocks=20, reason="none")
    assert staged.arrivals == ((20, "copy", "kvray-shard-b"),)


async def test_what_came_before_a_disk_was_read_is_told_with_its_source_too(nodes, stager):
    b, c = nodes["b"], nodes["c"]
    store(b.arena, KEYS[:10])
    runs = [Run(stop=10, holders={b.shard: 1}), Run(stop=20, holders={c.shard: 1})]
    nodes.others["kvray-lookup.locate"] = lambda *_: runs
    nodes.others[f"{c.shard}.promote"] = lambda *_: len(store(c.arena, KEYS).slots)

    async def fetch(*order: Any) -> FetchReport:
        asked = unpacked(*order)
        if asked.spans and num_here(nodes["a"].arena, KEYS) == 10:  # as a mover, from c alone
            found = await nodes.fetch(nodes["a"], replace(asked, spans=asked.spans[1:]))
            return replace(found, here=(10, *found.here))
        return await nodes.fetch(nodes["a"], asked)

    nodes.others["kvray-mover-a.fetch"] = fetch
    staged = await stage(stager)
    assert staged.num_blocks == 20
    assert [one[-1] for one in staged.arrivals] == [b.shard, c.shard]


async def test_a_stage_that_is_late_before_it_knows_holders_brings_blocks_anyhow(full, stager):
    async def slowly(*keys: bytes) -> list[Run]:
        await asyncio.sleep(0.1)
        return full.locate(*keys)

    full.others["kvray-lookup.locate"] = slowly
    assert await stage(stager, wait_s=0.02) == Staged(num_blocks=0, reason="too_slow")
    await until(lambda: num_here(full["a"].arena, KEYS) == 20)
    assert len(full.orders) == 1


@pytest.mark.parametrize(
    "stager",
    [{"settings": SETTINGS.model_copy(update={"deadline_s": 0.1, "call_timeout_s": 60.0})}],
    indirect=True,
)
async def test_a_stage_ends_at_its_deadline_whatever_it_waits_for(nodes, stager):
    nodes.frozen.add("kvray-lookup")
    assert await stage(stager, wait_s=60) == Staged(num_blocks=0, reason="too_slow")
    await until(lambda: not stager._stages)
    assert stager.status()["late"] == 1


async def test_a_shard_with_too_many_stages_answers_at_once(nodes, stager, monkeypatch):
    monkeypatch.setattr(stager_module, "_STAGES_MAX", 2)
    nodes.frozen.add("kvray-lookup")
    waiting = [stage(stager) for _ in range(2)]
    await asyncio.sleep(0)
    assert await stage(stager) == Staged(num_blocks=0, reason="too_slow")
    assert [one.reason for one in await asyncio.gather(*waiting)] == ["store_down"] * 2


# -- handover -------------------------------------------------------------------------------------


async def test_what_was_staged_is_kept_until_the_handover_is_over(full, stager):
    def flood(seed: str) -> int:
        """Fill the arena; return how many blocks of KEYS have stayed."""
        for number in range(8):
            store(full["a"].arena, chain(30, seed=f"{seed} {number}"))
        return num_here(full["a"].arena, KEYS)

    assert (await stage(stager)).num_blocks == 20
    assert flood("during") == 20
    stager.handovers.expire(time.monotonic() + SETTINGS.handover_s + 1)
    assert len(stager.handovers) == 0
    assert flood("after") == 0


async def test_of_too_many_handovers_the_oldest_ends(nodes, stager, monkeypatch):
    monkeypatch.setattr(stager_module, "_HANDOVERS_MAX", 3)
    store(nodes["a"].arena, KEYS)
    for _ in range(5):
        await stage(stager)
    assert len(stager.handovers) == 3


# -- what fails -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frozen", "gone"), [({"kvray-lookup"}, set()), (set(), {"kvray-mover-a"})]
)
async def test_who_does_not_answer_makes_a_miss_and_is_asked_no_more(full, stager, frozen, gone):
    full.frozen, full.gone = frozen, gone
    assert await stage(stager) == Staged(num_blocks=0, reason="store_down")
    calls = len(full.calls)
    assert (await stage(stager)).reason == "store_down"
    assert len(full.calls) == calls


async def test_a_lookup_that_nobody_can_wait_for_is_found_out_all_the_same(nodes, stager):
    nodes.frozen.add("kvray-lookup")
    assert (await stage(stager, wait_s=0.01)).reason == "too_slow"
    await asyncio.sleep(2 * SETTINGS.call_timeout_s)
    await stage(stager, wait_s=0.01)
    (peer,) = stager.status()["peers"]
    assert peer["error"]
    assert peer["breaker"] != "closed"


async def test_of_two_holders_the_dead_one_costs_nothing_after_its_first_failure(nodes, stager):
    other = chain(20, seed="other")
    for name in "bc":
        store(nodes[name].arena, KEYS)
        store(nodes[name].arena, other)
    nodes.gone.add("kvray-mover-b")
    assert (await stage(stager)).num_blocks == 20
    orders = len(nodes.orders)
    assert (await stage(stager, other)).num_blocks == 20
    assert [span.source for span in nodes.orders[orders].spans] == ["kvray-mover-c"]


@pytest.mark.parametrize(
    "stager", [{"settings": SETTINGS.model_copy(update={"deadline_s": 60.0})}], indirect=True
)
async def test_a_mover_of_its_own_that_is_frozen_is_found_out_before_the_deadline(full, stager):
    full.frozen.add("kvray-mover-a")
    began = time.monotonic()
    assert await stage(stager, wait_s=60) == Staged(num_blocks=0, reason="store_down")
    assert time.monotonic() - began < 5
    assert ("kvray-mover-a", "ping") in full.calls


async def test_a_fetch_that_waited_for_its_turn_has_its_whole_time(slow, stager):
    prompts = [chain(2, seed=str(one)) for one in range(SETTINGS.fetches_max + 1)]
    for keys in prompts:
        store(slow["b"].arena, keys)
    stages = [stage(stager, keys) for keys in prompts]
    await asyncio.sleep(0.6 * SETTINGS.deadline_s)
    slow.may_move.set()
    await asyncio.wait(stages)
    # Else its sources count as silent, for want of time.
    assert slow.orders[-1].deadline_s > 0.8 * SETTINGS.deadline_s


async def test_a_disk_that_hangs_leaves_places_for_what_others_have(full, stager, monkeypatch):
    monkeypatch.setattr(stager_module, "_STAGES_MAX", 8)
    monkeypatch.setattr(stager._fetcher, "_waiting_max", 4)
    asked: list[FetchOrder] = []

    async def promote(order: FetchOrder) -> None:
        asked.append(order)
        await asyncio.Event().wait()

    def runs(keys: list[BlockKey], parts: list[int]) -> list[Run]:
        return [Run(stop=len(keys), holders={NVME: 1})] if keys[0] not in KEYS else []

    disk = SimpleNamespace(may_ask=lambda now: True, peer=Peer, runs=runs, promote=promote)
    stager._nvme = stager._fetcher._nvme = lambda: disk
    stages = [stage(stager, chain(5, seed=str(one)), 3.0) for one in range(7)]
    await asyncio.sleep(0.1)
    assert await stage(stager, wait_s=3.0) == Staged(num_blocks=20, reason="none")
    assert len(asked) == 4
    assert [one.result().reason for one in stages if one.done()] == ["too_slow"] * 3
    for one in stages:
        one.cancel()
    await asyncio.wait(stages)


async def test_an_index_out_of_date_ends_in_a_miss(nodes, stager):
    store(nodes["b"].arena, KEYS[:4])
    said = nodes.locate(b"".join(KEYS))
    nodes.others["kvray-lookup.locate"] = lambda keys: [replace(said[0], stop=20)]
    assert (await stage(stager)).num_blocks == 4
    assert len(nodes.orders) <= 4


@pytest.mark.parametrize("stager", [{"num_partitions": 3}], indirect=True)
async def test_the_partition_that_has_the_prompts_chain_is_asked(nodes, stager):
    def only(keys: bytes) -> list[Run]:
        raise ShardUnavailable("This one is not to be asked.")

    store(nodes["b"].arena, KEYS[:4])
    asked = partition_of(KEYS[0], 3)
    for partition in range(3):
        name = f"{lookup_name(partition)}.locate"
        nodes.others[name] = nodes.locate if partition == asked else only
    assert (await stage(stager)).num_blocks == 4


async def test_closing_ends_what_is_under_way(slow, stager):
    waiting = stage(stager)
    await slow.was_ordered.wait()
    await stage(stager, wait_s=0.05)
    assert stager.status()["under_way"] == 1
    await asyncio.wait_for(stager.close(), 2)
    for ended in (waiting, stage(stager)):
        with pytest.raises(ShardUnavailable, match="ends"):
            await ended
    assert (stager.status()["under_way"], stager.status()["handovers"]) == (0, 0)


TRUNK = chain(12, seed="trunk")
BRANCHES = [TRUNK + chain(6, seed=f"branch {number}", head=TRUNK[-1]) for number in range(3)]
requests = st.lists(
    st.tuples(
        st.integers(0, len(BRANCHES) - 1),
        st.integers(1, 18),
        st.sampled_from([0.0, 0.005, 2.0]),
        st.booleans(),
    ),
    min_size=1,
    max_size=12,
)


@given(
    held=st.lists(st.tuples(st.sampled_from("bc"), st.integers(0, 2), st.integers(1, 18))),
    asked=requests,
    step=st.integers(1, 7),
    gone=st.sampled_from([set(), set(), {"kvray-mover-b"}]),
)
@settings(max_examples=examples(40))
async def test_however_many_ask_no_block_comes_twice_and_none_is_wrong(held, asked, step, gone):
    """That no block comes twice the movers of this test see to: a second copy is a failure."""
    path = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="kvray-test-"))
    nodes = Nodes.make(path, "abc")
    stager = nodes.stager()
    nodes.blocks_per_step, nodes.gone = step, gone
    try:
        for name, branch, length in held:
            store(nodes[name].arena, BRANCHES[branch][:length])
        tasks = []
        for branch, length, wait_s, is_cancelled in asked:
            tasks.append(stage(stager, BRANCHES[branch][:length], wait_s))
            await asyncio.sleep(0)
            if is_cancelled:
                tasks[-1].cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        for (branch, length, wait_s, is_cancelled), answer in zip(asked, answers, strict=True):
            if is_cancelled:
                assert isinstance(answer, asyncio.CancelledError)
                continue
            assert isinstance(answer, Staged)
            keys = BRANCHES[branch][:length]
            most = max(num_here(nodes[name].arena, keys) for name in "abc" if name not in gone)
            assert answer.num_blocks <= most
            if wait_s > 1 and not gone:
                assert answer.num_blocks == most
            if answer.num_blocks:
                assert served(nodes["a"].arena, keys[: answer.num_blocks]) == answer.num_blocks
    finally:
        await stager.close()
        assert stager.status()["under_way"] == 0
        nodes.close()
        shutil.rmtree(path)


# -- large prefixes -------------------------------------------------------------------------------


@pytest.mark.parametrize("have", [0, 7, 20])
@pytest.mark.parametrize("nodes", [16], indirect=True)
async def test_a_large_stage_comes_in_pieces_and_brings_the_same(nodes, stager, monkeypatch, have):
    monkeypatch.setattr(stager_module, "_PIECE", 3)
    store(nodes["b"].arena, KEYS[:18], part=0)
    store(nodes["b"].arena, KEYS, part=1)
    for part in (0, 1):
        store(nodes["a"].arena, KEYS[:have], part=part)
    parts, sizes, turns = (PartRequest(0), PartRequest(1, 4)), list[int](), itertools.count()

    def note(patch: pytest.MonkeyPatch, name: str, size: Callable[[Any, Any], int]) -> None:
        real = getattr(Arena, name)

        def look(arena: Arena, keys: Any, others: Any, **more: Any) -> Any:
            if arena is stager._arena:
                sizes.append(size(keys, others))
            return real(arena, keys, others, **more)

        patch.setattr(Arena, name, look)

    async def take_turns() -> None:
        for _ in turns:
            await asyncio.sleep(0)

    task = asyncio.ensure_future(take_turns())
    with monkeypatch.context() as patch:
        note(patch, "present", lambda keys, parts: len(keys) * len(parts))
        note(patch, "lease_for", lambda _, readers: len(readers[0]))
        staged = await stage(stager, KEYS, 5, *parts)
    task.cancel()
    assert staged.num_blocks == max(18, have)
    assert max(sizes) <= 20, "a step of a fetch at most"
    assert next(turns) >= len(sizes) // 2
    held = nodes["a"].arena.lease_for(KEYS, [parts])
    assert held.num_blocks == staged.num_blocks
    assert all(nodes["a"].arena.tables.slot_leases[slots].min() >= 2 for slots in held.slots)


@pytest.mark.parametrize("nodes", [16], indirect=True)
async def test_what_comes_during_a_long_look_is_not_fetched_again(full, stager, monkeypatch):
    monkeypatch.setattr(stager_module, "_PIECE", 3)
    present, looks = Arena.present, itertools.count(1)

    def late(arena: Arena, keys: Any, parts: Any) -> Any:
        found = present(arena, keys, parts)
        if next(looks) > 7 and full.calls and not present(arena, KEYS[:1], [0])[0][0]:
            store(arena, KEYS[:9])  # right after they were looked for
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Arena, "present", late)
        assert (await stage(stager)).num_blocks == 20
    assert [span.depth for order in full.orders for span in order.spans] == [9]


async def test_what_a_disk_has_of_a_long_prompt_is_told_by_places_in_it(monkeypatch):
    class Disk:
        def runs(self, keys: list[int], parts: list[int]) -> list[Run]:
            masks = {part: np.array([one % 7 != 3 for one in keys]) for part in parts}
            return runs_of(NVME, masks) if 100 not in keys else []

    monkeypatch.setattr(stager_module, "_PIECE", 10)
    keys = [*range(20), 100, 101, 102, 103, 104, *range(25, 33)]
    held, start = [False] * len(keys), 0
    for run in await stager_module._runs_on_disk(Disk(), keys, [0, 2]):
        assert run.holders in ({}, {NVME: 0b101})
        held[start : run.stop] = [bool(run.holders)] * (run.stop - start)
        start = run.stop
    assert held == [one < 99 and one % 7 != 3 for one in keys]
