"""TensorRT-LLM's own events, in the shapes of its versions, as routers read them."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvray.events import Batch, BlockRemoved, BlockStored, Event, native, pack
from kvray.events.native import NativePool
from kvray.events.pool_content import PoolContent, chain_digests
from tests.unit.events.publisher import leading, packed

BLOCK = 4
SHAPES = Path(__file__).parent / "shapes"


def stored(
    hashes: list[int], ids: list[int], *, parent: int | None = None, level: int = 0, **more: Any
) -> dict[str, Any]:
    """Return a `stored` of 1.2; `more` goes into each block."""
    blocks = [
        {
            "type": "stored_block",
            "block_hash": one,
            "tokens": [
                {"type": "unique_token", "token_id": token, "token_extra_id": 0}
                for token in ids[at * BLOCK : (at + 1) * BLOCK]
            ],
            "cache_level": level,
            "priority": 35,
            **more,
        }
        for at, one in enumerate(hashes)
    ]
    return {"type": "stored", "parent_hash": parent, "blocks": blocks}


def removed(*hashes: int) -> dict[str, Any]:
    return {"type": "removed", "block_hashes": [*hashes]}


def updated(one: int, old: int, new: int) -> dict[str, Any]:
    level = {"type": "event_diff", "new_value": new, "old_value": old}
    return {"type": "updated", "block_hash": one, "cache_level": level, "priority": None}


class Engine:
    """Numbers events as an engine does, for each rank."""

    def __init__(self) -> None:
        self.pool = NativePool(block_size=BLOCK)
        self.content = PoolContent(blocks_max=1000)
        self._numbers: dict[int | None, int] = {}

    def tell(self, *data: dict[str, Any], rank: int | None = None, **more: Any) -> list[Event]:
        made = self.pool.take([self.event(one, rank=rank, **more) for one in data])
        self.content.apply(Batch(at=0.0, events=made))
        return made

    def event(self, data: dict[str, Any], *, rank: int | None = None, **more: Any) -> Any:
        number = self._numbers[rank] = self._numbers.get(rank, -1) + 1
        ranked = {} if rank is None else {"attention_dp_rank": rank}
        return {"event_id": number, "data": data, **ranked, **more}

    def leading(self, tokens: list[int]) -> int:
        return leading(self.content, tokens)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@given(st.data())
def test_a_snapshot_of_any_moment_gives_what_all_events_give(data):
    engine, chains = Engine(), {None: []}
    for number in range(1, 12):
        act = data.draw(st.sampled_from(["store", "remove", "move"]))
        held = [one for one in chains if one is not None]
        if act == "store" or not held:
            parent = data.draw(st.sampled_from([*chains]))
            tokens = [number, 1, 2, data.draw(st.integers(0, 9))]
            level = data.draw(st.integers(0, 2))
            chains[number] = [*chains[parent], *tokens]
            engine.tell(stored([number], tokens, parent=parent, level=level))
        elif act == "remove":
            leaf = max(held, key=lambda one: len(chains[one]))
            del chains[leaf]
            engine.tell(removed(leaf))
        else:
            new = data.draw(st.integers(0, 2))
            engine.tell(updated(data.draw(st.sampled_from(held)), 0, new))
    again, place, step = PoolContent(blocks_max=1000), 0, data.draw(st.integers(1, 4))
    while place is not None:
        events, place = engine.pool.page(place, step)
        again.apply(Batch(at=0.0, events=events))
    assert again.digests == engine.content.digests
    assert len(again) == len(engine.content) == engine.pool.num_blocks() == len(chains) - 1


def gpu_stored(*hashes: int) -> BlockStored:
    return BlockStored(
        block_hashes=hashes, token_ids=[*range(4 * len(hashes))], block_size=BLOCK, medium="GPU"
    )


def test_full_blocks_of_a_chain_are_one_event_and_a_partial_one_is_none(engine):
    assert engine.tell(stored([5, 6], [*range(8)])) == [gpu_stored(5, 6)]
    assert engine.tell(stored([1, 2], [*range(6)])) == [gpu_stored(1)]
    assert engine.tell(stored([3], [9, 9], parent=1), removed(2, 3)) == []
    assert engine.tell(removed(1)) == [BlockRemoved(block_hashes=[1], medium="GPU")]


def test_a_block_that_moves_to_host_memory_is_still_there(engine):
    engine.tell(stored([1], [*range(4)]))
    first, second = engine.tell(updated(1, 0, 1))
    assert (first.medium, first.block_hashes) == ("CPU", (1,))
    assert second == BlockRemoved(block_hashes=[1], medium="GPU")
    assert engine.leading([*range(4)]) == 1
    assert engine.tell(updated(1, 1, 1)) == []
    engine.tell(updated(1, 1, 2))
    assert engine.leading([*range(4)]) == 0, "it is on the engine's disk"


def test_only_the_widest_window_counts(engine):
    created = {"type": "created", "num_blocks_per_cache_level": [8, 0]}
    engine.tell(created, window_size=512)
    engine.tell(created, window_size=4096)
    assert engine.tell(stored([7], [9, 9, 9, 9]), window_size=512) == []
    engine.tell(stored([1], [*range(4)]), window_size=4096)
    engine.tell(removed(1), window_size=512)
    assert engine.leading([*range(4)]) == 1


def test_a_block_goes_with_the_last_rank_that_has_it(engine):
    assert len(engine.tell(stored([1], [*range(4)]), rank=0)) == 1
    assert engine.tell(stored([1], [*range(4)]), rank=1) == []
    assert engine.tell(removed(1), rank=0) == []
    assert engine.tell(removed(1), rank=1) == [BlockRemoved(block_hashes=[1], medium="GPU")]


@pytest.mark.parametrize(
    "data",
    [
        stored([1, 2], [*range(8)], cache_salt="s"),
        {**stored([1, 2], [*range(8)]), "lora_name": "a"},
        stored([1, 2], [*range(8)], lora_id=3),
        stored([1, 2], [*range(8)], mm_keys=[{"type": "mm_key", "hash": "ab"}]),
        stored([1, 2], [*range(8)], tokens=[{"token_id": 1, "token_extra_id": 7}] * BLOCK),
    ],
)
def test_prompts_with_a_salt_an_adapter_or_media_stay_inside(engine, data):
    assert engine.tell(data, stored([3], [9] * 4, parent=2), removed(3, 2, 1)) == []


def test_lists_json_and_hashes_as_text_are_taken(engine):
    first, second = engine.event(stored(["ab"], [*range(4)])), engine.event(removed("ab"))
    taken = engine.pool.take([[first], json.dumps(second)])
    assert [one.block_hashes for one in taken] == [(b"ab",), [b"ab"]]


@pytest.mark.parametrize(
    "bad",
    [
        stored([2**64], [5] * 4),
        stored([-(2**63) - 1], [5] * 4),
        stored(["x" * 65], [5] * 4),  # type: ignore[list-item]
        stored([2], [2**32] * 4),
        stored([2], [-1] * 4),
        stored([2], [5] * 4, level=-3),
        stored([2], [5] * 4, level="host"),  # type: ignore[arg-type]
        stored([2], [5] * 4, parent=2**64),
        updated(1, 0, -3),
        updated(2**64, 0, 1),
        removed(2**64, -(2**70)),
        {**removed(7), "block_hashes": 7},
        {"type": ["stored"]},
        {},
        None,
    ],
)
def test_an_event_that_makes_no_sense_costs_itself(engine, bad):
    engine.tell(stored([1], [*range(4)]))
    pack(Batch(at=0.0, events=engine.tell(bad)))  # what it means, if anything, can be sent
    engine.tell(stored([3], [9] * 4))
    assert engine.leading([*range(4)]) == engine.leading([9] * 4) == 1
    assert (engine.pool.num_blocks(), engine.pool.num_gaps) == (2, 0)
    assert engine.tell(removed(2**64, 1)) == [BlockRemoved(block_hashes=[1], medium="GPU")]


@pytest.mark.parametrize(
    "item",
    [
        '{"event_id": 0, "da',
        b"\xff",
        "[" * 5000,
        [[[[[[{}]]]]]],
        {"event_id": -1},
        {"event_id": "0"},
        {"event_id": 0},
        7,
    ],
)
def test_what_is_no_event_is_counted(item):
    pool = NativePool(block_size=BLOCK)
    assert pool.take([item]) == []
    assert pool.num_unread == 1


def test_there_is_an_end_of_blocks(engine, monkeypatch):
    monkeypatch.setattr(native, "_BLOCKS_MAX", 3)
    for number in range(1, 9):
        engine.tell(stored([number], [number] * 4))
    assert engine.pool.num_blocks() == 3
    engine.tell(removed(1), stored([20], [20] * 4))
    assert engine.leading([20] * 4) == 1


@pytest.mark.parametrize("shape", sorted(SHAPES.glob("*.json")), ids=lambda path: path.stem)
def test_events_of_a_version_give_its_pool(shape):
    told = json.loads(shape.read_text())
    pool, content = NativePool(block_size=told["block_size"]), PoolContent(blocks_max=1000)
    content.apply(Batch(at=0.0, events=pool.take(told["events"])))
    expected = frozenset(
        chain_digests(packed(tokens), block_size=told["block_size"])[-1] for tokens in told["pool"]
    )
    assert content.digests == expected
    assert (pool.num_gaps, pool.num_unread) == (0, 0)
