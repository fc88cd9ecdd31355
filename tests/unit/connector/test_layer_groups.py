"""Caches with layer groups: windows, shared bytes and offers that are taken in part."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvray.actors.shard.shard import Shard
from kvray.connector import KvRayScheduler, KvRayWorker
from kvray.connector.base import RequestData, SchedulerOutput
from kvray.engine.meta import ConnectorMeta
from kvray.errors import ConfigError, LayoutMismatch, LeaseExpired
from kvray.store import Arena
from tests.unit.connector.model.test_cache_layout import buffers
from tests.unit.connector.pair import BLOCK, args_for

PROMPT = list(range(100, 140))
WINDOW = 10
NUM_PAGES = 64
FULL_BYTES, SHARED_BYTES, WINDOW_BYTES = 64, 8, 32


@dataclass
class Request:
    request_id: int
    tokens: list[int]
    py_num_connector_matched_tokens: int = 0
    full: list[int] = field(default_factory=list)
    window: list[int] = field(default_factory=list)

    def get_tokens(self, beam: int = 0) -> list[int]:
        return list(self.tokens)


class GroupedEngine:
    """One rank whose cache has full attention, bytes that all ranks share, and a window."""

    def __init__(self, **changes: Any) -> None:
        args = args_for(cache={"use_kv_cache_manager_v2": True}, **changes)
        self.worker, self.scheduler = KvRayWorker(args), KvRayScheduler(args)
        self.memory = {
            size: torch.full((NUM_PAGES, size), 255, dtype=torch.uint8)
            for size in (FULL_BYTES, SHARED_BYTES, WINDOW_BYTES)
        }
        full = SimpleNamespace(
            layer_group_id=0,
            layer_ids=(0, 2),
            window_size=None,
            regions=(self._region(FULL_BYTES, [0, 2]),),
            replicated_regions=(self._region(SHARED_BYTES, [0, 2], "index"),),
        )
        window = SimpleNamespace(
            layer_group_id=1,
            layer_ids=(1,),
            window_size=WINDOW,
            regions=(self._region(WINDOW_BYTES, [1]),),
        )
        self.layout = SimpleNamespace(
            tokens_per_block=BLOCK, groups=(full, window), dtype=torch.uint8
        )
        self.worker.register_kv_cache_layout(self.layout)
        self.next_page = 0

    def _region(self, size: int, layers: list[int], roles: str = "key value") -> Any:
        return SimpleNamespace(
            base=self.memory[size].data_ptr(),
            size=size,
            stride=size,
            num_slots=NUM_PAGES,
            buffers=buffers(layers, roles),
        )

    def query(self, request: Request, computed: int = 0) -> int:
        matched, is_later = self.scheduler.get_num_new_matched_tokens(request, computed)
        assert not is_later
        return matched

    def give_pages(self, request: Request, *, window_from: int = 0) -> None:
        """Give a request its pages; blocks before `window_from` have none in the window."""
        count = -(-len(request.tokens) // BLOCK)
        pages = [(self.next_page + n) % NUM_PAGES for n in range(count)]
        self.next_page += count
        request.full = pages
        request.window = [-1 if n < window_from else p for n, p in enumerate(reversed(pages))]
        for memory in self.memory.values():
            memory[pages] = 254

    def run(self, request: Request, *, taken: int) -> ConnectorMeta:
        """Do the pass that computes all but `taken` tokens."""
        request.py_num_connector_matched_tokens = taken
        report = RequestData(
            request.request_id,
            list(request.tokens),
            [],
            0,
            len(request.tokens) - taken,
            new_block_ids_by_layer_group=[request.full, request.window],
        )
        output = SchedulerOutput(new_requests=[report])
        meta = self.scheduler.build_connector_meta(output)
        self.worker.bind_connector_meta(meta)
        self.worker.start_load_kv(None)
        for block in range(len(request.tokens) // BLOCK):
            if block >= taken // BLOCK:
                self.fill(request, block)
        self.worker.wait_for_save(None)
        return meta

    def fill(self, request: Request, block: int) -> None:
        content = sum(request.tokens[: (block + 1) * BLOCK]) % 251
        self.memory[FULL_BYTES][request.full[block]] = content
        self.memory[SHARED_BYTES][request.full[block]] = content
        if request.window[block] >= 0:
            self.memory[WINDOW_BYTES][request.window[block]] = content

    def has(self, request: Request, block: int) -> tuple[bool, bool]:
        """Whether a block's bytes are right: full and shared, window."""
        content = sum(request.tokens[: (block + 1) * BLOCK]) % 251
        full = [self.memory[size][request.full[block]] for size in (FULL_BYTES, SHARED_BYTES)]
        window = self.memory[WINDOW_BYTES][request.window[block]]
        return all(bool((one == content).all()) for one in full), bool((window == content).all())

    def flush(self) -> None:
        self.worker._rank.close_pool()
        self.worker.register_kv_cache_layout(self.layout)

    def close(self) -> None:
        self.scheduler.shutdown()
        self.worker.shutdown()

    @property
    def arena(self) -> Arena:
        arena = self.worker._rank.shared.link.arena
        assert arena is not None
        return arena


@pytest.fixture
def engine(shard: Shard) -> Iterator[GroupedEngine]:
    made = GroupedEngine()
    yield made
    assert made.arena.stats()["leased_blocks"] == 0
    made.close()


def stored(engine: GroupedEngine, *, window_from: int) -> None:
    request = Request(1, PROMPT)
    assert engine.query(request) == 0
    engine.give_pages(request, window_from=window_from)
    engine.run(request, taken=0)
    engine.flush()


def test_what_every_group_needs_is_loaded_and_nothing_behind_a_window(
    engine: GroupedEngine,
) -> None:
    stored(engine, window_from=0)
    request = Request(2, PROMPT)
    assert engine.query(request) == 9 * BLOCK
    engine.give_pages(request, window_from=6)
    engine.run(request, taken=9 * BLOCK)
    assert [engine.has(request, block)[0] for block in range(9)] == [True] * 9
    assert [engine.has(request, block)[1] for block in range(6, 9)] == [True] * 3


def test_a_prefix_is_found_where_its_last_window_is_there(engine: GroupedEngine) -> None:
    stored(engine, window_from=7)
    # Of the prompt's 10 blocks the window group has 7, 8 and 9; a prefix of 9 needs 6, 7 and 8.
    assert engine.query(Request(2, PROMPT)) == 0
    assert engine.query(Request(3, [*PROMPT, 1])) == 10 * BLOCK
    engine.scheduler.build_connector_meta(SchedulerOutput())


@pytest.mark.parametrize("taken", [0, 1, 4, 8])
def test_an_offer_that_is_taken_in_part_is_loaded_so_far(engine: GroupedEngine, taken: int) -> None:
    stored(engine, window_from=0)
    request = Request(2, PROMPT)
    assert engine.query(request) == 9 * BLOCK
    engine.give_pages(request)
    engine.run(request, taken=taken * BLOCK)
    assert all(all(engine.has(request, block)) for block in range(max(0, taken - 3), 10))


def test_a_part_of_an_offer_whose_window_is_not_there_stops_the_engine(
    engine: GroupedEngine,
) -> None:
    stored(engine, window_from=7)
    request = Request(2, [*PROMPT, 1])
    assert engine.query(request) == 10 * BLOCK
    engine.give_pages(request)
    with pytest.raises(LeaseExpired, match="last window"):
        engine.run(request, taken=6 * BLOCK)


def test_a_promised_block_without_a_page_in_full_attention_stops_the_engine(
    engine: GroupedEngine,
) -> None:
    stored(engine, window_from=0)
    request = Request(2, PROMPT)
    assert engine.query(request) == 9 * BLOCK
    engine.give_pages(request)
    request.full[3] = -1
    with pytest.raises(LayoutMismatch, match="8 of them"):
        engine.run(request, taken=9 * BLOCK)


def test_an_offer_can_be_cut_or_called_off(engine: GroupedEngine) -> None:
    stored(engine, window_from=0)
    request = Request(2, PROMPT)
    engine.query(request)
    engine.scheduler.cancel_load(request, 4 * BLOCK, 9 * BLOCK)
    engine.give_pages(request)
    meta = engine.run(request, taken=4 * BLOCK)
    assert len(meta.loads[0].pages[0].ids()) == 4
    again = Request(3, PROMPT)
    engine.query(again)
    engine.scheduler.cancel_load(again, 0, 9 * BLOCK)
    assert engine.arena.stats()["leased_blocks"] == 0


def test_a_reset_request_starts_over(engine: GroupedEngine) -> None:
    stored(engine, window_from=0)
    request = Request(2, PROMPT)
    engine.query(request)
    engine.scheduler.request_reset(request)
    assert engine.arena.stats()["leased_blocks"] == 0
    assert engine.query(request) == 9 * BLOCK
    engine.give_pages(request)
    engine.run(request, taken=9 * BLOCK)


def test_a_corrupt_block_voids_an_offer_that_needs_whole_windows(engine: GroupedEngine) -> None:
    stored(engine, window_from=0)
    tables = engine.arena.tables
    (victim,) = ((tables.slot_part == 0) & (tables.slot_depth == 5)).nonzero()[0]
    engine.arena.slot_bytes(int(victim))[0] ^= 1
    assert engine.query(Request(2, PROMPT)) == 0


def test_a_cache_of_other_blocks_than_the_arguments_say_is_refused(engine: GroupedEngine) -> None:
    engine.layout.tokens_per_block = 8
    with pytest.raises(ConfigError, match="8 tokens in a block"):
        engine.worker.register_kv_cache_layout(engine.layout)
    engine.layout.tokens_per_block = BLOCK
    engine.worker.register_kv_cache_layout(engine.layout)
