"""Caches with layer groups: windows, shared bytes and offers that are taken in part."""

import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from kvray.config import load_config
from kvray.engine.meta import ConnectorMeta
from kvray.errors import ConfigError, LeaseExpired
from kvray.store import Arena
from tests.kit.connector import BLOCK, HIT, PROMPT, GroupedEngine, GroupedRequest, parallel
from tests.kit.two_nodes import TwoNodes


class Groups:
    """An engine with layer groups, of one rank or with a second one on another node."""

    def __init__(self, nodes: TwoNodes, num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nodes = nodes
        self.ranks: list[GroupedEngine] = []
        spread = {"tensor_parallel_size": 2, "gpus_per_node": 1} if num_ranks == 2 else {}
        if not spread:
            monkeypatch.setenv("KVRAY_CONNECTOR__STAGE_WAIT_S", "0")  # it asks no other node
        for rank, directory in enumerate(nodes.directories[:num_ranks]):
            monkeypatch.setenv("KVRAY_ARENA__DIR", str(directory))
            self.ranks.append(GroupedEngine(parallel_config=parallel(rank), **spread))
        self.leader, *self.followers = self.ranks

    def offered(self, tokens: list[int], num_tokens: int, **pages: int) -> GroupedRequest:
        """Return a request that was offered so many tokens, and has its pages."""
        request = GroupedRequest(2, tokens)
        assert self.leader.query(request) == num_tokens
        self.leader.give_pages(request, **pages)
        return request

    def run(self, request: GroupedRequest, *, taken: int) -> ConnectorMeta:
        meta = self.leader.run(request, taken=taken)
        self._begin(meta)
        for one in self.followers:
            one.compute_from(request, taken)
        return meta

    def pass_on(self) -> None:
        """Do a pass without requests, which gives up what was offered and not taken."""
        self._begin(self.leader.begin_pass())

    def _begin(self, meta: ConnectorMeta) -> None:
        for one in self.followers:
            one.worker.bind_connector_meta(pickle.loads(pickle.dumps(meta)))  # noqa: S301 - ours
            one.worker.start_load_kv(None)

    def store(self, *, window_from: int = 0) -> None:
        """Store the prompt, by a pass that also gives the ranks one name."""
        request = GroupedRequest(1, PROMPT)
        assert self.leader.query(request) == 0
        self.leader.give_pages(request, window_from=window_from)
        self.run(request, taken=0)
        for one in self.ranks:
            one.flush()
        if self.followers:
            self.nodes.wait_for_ranks(self.leader.engine)


@pytest.fixture(params=[1, 2], ids=["one node", "two nodes"])
def groups(
    nodes: TwoNodes, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Groups]:
    made = Groups(nodes, request.param, monkeypatch)
    yield made
    if not made.followers:
        assert made.leader.leased == 0
    for one in made.ranks:
        one.close()
    nodes.wait_for_release()


on_one_node = pytest.mark.parametrize("groups", [1], indirect=True, ids=["one node"])


def test_what_every_group_needs_is_loaded_and_nothing_behind_a_window(groups):
    groups.store()
    request = groups.offered(PROMPT, HIT, window_from=6)
    groups.run(request, taken=HIT)
    for one in groups.ranks:
        assert [one.has(request, block) for block in range(6)] == [[True] * 2] * 6
        assert [one.has(request, block) for block in range(6, 9)] == [[True] * 3] * 3
    groups.nodes.wait_for_release()


def test_a_prefix_counts_only_where_its_last_window_is_on_every_node(groups):
    groups.store(window_from=7)
    # Of the prompt's 10 blocks the window group has 7, 8 and 9; a prefix of 9 needs 6, 7 and 8.
    assert groups.leader.query(GroupedRequest(2, PROMPT)) == 0
    assert groups.leader.query(GroupedRequest(3, [*PROMPT, 1])) == 10 * BLOCK
    groups.pass_on()


@pytest.mark.parametrize("taken", [0, 1, 4, 8])
def test_an_offer_that_is_taken_in_part_is_loaded_so_far(groups, taken):
    groups.store()
    request = groups.offered(PROMPT, HIT)
    groups.run(request, taken=taken * BLOCK)
    for one in groups.ranks:
        assert all(all(one.has(request, block)) for block in range(max(0, taken - 3), 10))
    groups.leader.scheduler.request_finished(request, [])
    groups.pass_on()
    groups.nodes.wait_for_release()


def test_a_part_of_an_offer_whose_window_is_not_there_stops_the_engine(groups):
    groups.store(window_from=7)
    request = groups.offered([*PROMPT, 1], 10 * BLOCK)
    with pytest.raises(LeaseExpired, match="last window"):
        groups.run(request, taken=6 * BLOCK)


@on_one_node
def test_what_is_counted_on_is_tried_for_until_a_stopped_process_has_ended(groups, monkeypatch):
    groups.store()
    lease_for, waits = Arena.lease_for, list[float]()

    def noted(arena: Arena, *args: Any, wait_s: float = 0.0, **wanted: Any) -> Any:
        waits.append(wait_s)
        return lease_for(arena, *args, wait_s=wait_s, **wanted)

    request = groups.offered(PROMPT, HIT)
    monkeypatch.setattr(Arena, "lease_for", noted)
    groups.run(request, taken=4 * BLOCK)
    assert waits
    assert min(waits) > load_config().arena.stopped_s
    groups.leader.scheduler.request_finished(request, [])
    groups.pass_on()


@on_one_node
def test_a_corrupt_block_voids_an_offer_that_needs_whole_windows(groups):
    groups.store()
    arena = groups.leader.arena
    (victim,) = ((arena.tables.slot_part == 0) & (arena.tables.slot_depth == 5)).nonzero()[0]
    arena.slot_bytes(int(victim))[0] ^= 1
    assert groups.leader.query(GroupedRequest(2, PROMPT)) == 0


@on_one_node
def test_a_cache_of_other_blocks_than_the_arguments_say_is_refused(groups):
    layout, register = groups.leader.layout, groups.leader.worker.register_kv_cache_layout
    layout.tokens_per_block = 8
    with pytest.raises(ConfigError, match="8 tokens in a block"):
        register(layout)
    layout.tokens_per_block = BLOCK
    register(layout)
