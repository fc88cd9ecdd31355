"""Events for vLLM's own publisher, over a real arena; of vLLM there are stand-ins."""

import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvray.identity.keys import chain_keys, request_seed
from tests.kit.apart import BLOCK, Apart
from tests.kit.connector import HIT, PROMPT, stand_in
from tests.unit.vllm.conftest import MakeHalf
from tests.unit.vllm.test_scheduling import asked, nothing, offered, taken
from tests.waiting import wait_for

NUM_BLOCKS = len(PROMPT) // BLOCK
"""The last one is computed by each engine, but one has stored it."""


@dataclass
class Stored:
    block_hashes: list[Any]
    parent_block_hash: Any
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[Any] = field(default_factory=list)
    group_idx: int | None = None


@dataclass
class Removed:
    block_hashes: list[Any]
    medium: str
    group_idx: int | None = None


@pytest.fixture
def half(scheduling: ModuleType, make_half: MakeHalf, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A half over stand-ins of what is imported for events; a hash of vLLM's is a number here."""

    def extra_keys(request: Any, start: int, *_: Any) -> tuple[Any, int]:
        return (("salt", request.cache_salt),) if request.cache_salt and not start else None, 0

    utils = stand_in(
        monkeypatch,
        "vllm.v1.core.kv_cache_utils",
        maybe_convert_block_hash=lambda block_hash: f"told {block_hash}",
        generate_block_hash_extra_keys=extra_keys,
    )
    events = {"MEDIUM_CPU": "CPU", "BlockStored": Stored, "BlockRemoved": Removed}
    stand_in(monkeypatch, "vllm.distributed.kv_events", **events)
    stand_in(monkeypatch, "vllm.v1")
    stand_in(monkeypatch, "vllm.v1.core", kv_cache_utils=utils)
    return make_half(tells_events=True)


def hashed(name: str, tokens: list[int], **changes: Any) -> SimpleNamespace:
    """Return a request whose blocks have the hashes 0, 1, ..."""
    hashes = list(range(len(tokens) // BLOCK))
    return asked(name, tokens, **{"block_hashes": hashes, **changes})


def names(count: int, first: int = 0) -> list[str]:
    return [f"told {place}" for place in range(first, count)]


def told(half: Any, stored: Apart, **changes: Any) -> list[Any]:
    """Have the prompt noted of which no lease is left, and return what is told."""
    seed = request_seed(stored.leader.shared.identity.digest, salt=None, lora=None)
    keys = chain_keys(PROMPT, tokens_per_block=BLOCK, seed=seed)
    half._events.note(hashed("a", PROMPT, **changes), keys, 0)
    return heard(half)


def heard(half: Any) -> list[Any]:
    """Return the next events; what an engine has saved is readable a little later."""
    found: list[Any] = []
    wait_for(lambda: found.extend(half.take_events()) or found, "an event")
    return found


def loaded(half: Any) -> None:
    """Have the half load the prompt."""
    request = hashed("a", PROMPT)
    assert offered(half, request) == HIT
    taken(half, request, HIT)


def test_a_block_that_is_loaded_is_told_once(half):
    assert half.take_events() == []
    loaded(half)
    (event,) = heard(half)
    assert (event.block_hashes, event.parent_block_hash) == (names(NUM_BLOCKS), None)
    assert (event.token_ids, event.block_size) == (PROMPT[: NUM_BLOCKS * BLOCK], BLOCK)
    assert (event.medium, event.lora_id, event.lora_name) == ("CPU", None, None)
    assert event.extra_keys == [None] * NUM_BLOCKS
    assert half.take_events() == []
    loaded(half)
    assert half.take_events() == []


def test_a_block_is_told_once_it_is_readable_and_not_when_it_is_planned(half, stored):
    tokens = [7, *PROMPT]
    request = hashed("b", tokens)
    assert half.match(request, 0) == 0
    assert taken(half, request, 0).meta.saves
    assert half.take_events() == []
    stored.serve(tokens)
    (event,) = heard(half)
    assert event.block_hashes == names(len(tokens) // BLOCK)


def test_a_block_that_never_gets_there_is_forgotten(half):
    events, now = half._events, [0.0]
    events._clock = lambda: now[0]
    events.note(hashed("c", [9] * 8), [b"\1" * 32, b"\2" * 32], 0)
    half.take_events()
    assert len(events._untold) == 2
    now[0] = 61.0
    half.take_events()
    assert events._untold == {}


def test_blocks_that_leave_the_memory_are_removed_and_told_again_when_they_are_back(
    half, shard, stored
):
    told(half, stored)
    shard.clear(10)
    (event,) = half.take_events()
    assert isinstance(event, Removed)
    assert (sorted(event.block_hashes), event.medium) == (names(NUM_BLOCKS), "CPU")
    assert half.take_events() == []
    stored.serve(PROMPT)
    (event,) = told(half, stored)
    assert event.block_hashes == names(NUM_BLOCKS)


def test_many_blocks_are_looked_for_in_pieces(half, shard, stored, monkeypatch):
    monkeypatch.setattr("kvray.vllm.tier_events._LOOK", 4)
    first, second, third = told(half, stored), half.take_events(), half.take_events()
    parts = [names(4), names(8, 4), names(NUM_BLOCKS, 8)]
    assert [one.block_hashes for one in first + second + third] == parts
    assert second[0].parent_block_hash == "told 3"
    shard.clear(10)
    gone = [name for _ in range(6) for event in half.take_events() for name in event.block_hashes]
    assert sorted(gone) == sorted(names(NUM_BLOCKS))


def test_without_an_arena_nothing_is_there(half, stored, monkeypatch):
    told(half, stored)
    monkeypatch.setattr(type(half._leader.shared.link), "arena", None)
    (event,) = half.take_events()
    assert len(event.block_hashes) == NUM_BLOCKS


def test_blocks_of_weights_that_are_replaced_are_removed(half, stored):
    told(half, stored)
    half._leader.shared.name_weights("2")
    half.plan(nothing())
    (event,) = half.take_events()
    assert isinstance(event, Removed)


def test_after_a_reset_for_which_vllm_has_all_cleared_blocks_are_told_again(half, stored):
    pool = SimpleNamespace(cached_block_hash_to_block={})
    half.watch(pool)
    told(half, stored)
    pool.cached_block_hash_to_block = {}
    (event,) = told(half, stored)
    assert event.block_hashes == names(NUM_BLOCKS)
    pool.cached_block_hash_to_block = {}
    assert half.take_events() == [], "nothing is removed of which nobody knows"


def test_an_adapter_and_a_salt_are_told_as_vllm_tells_them(half, stored):
    lora = SimpleNamespace(adapter_id=3, name="poet")
    (event,) = told(half, stored, lora_request=lora, cache_salt="s")
    assert (event.lora_id, event.lora_name) == (3, "poet")
    assert event.extra_keys == [(("salt", "s"),)] + [None] * (NUM_BLOCKS - 1)


def test_blocks_of_which_vllm_hashes_parts_are_not_told(half):
    request = hashed("e", PROMPT, block_hashes=list(range(len(PROMPT) // 2)))
    half._events.note(request, [b"\1" * 32] * NUM_BLOCKS, 0)
    assert half._events._untold == {}


def test_a_defect_costs_the_events_and_no_pass(half, monkeypatch):
    def fail(*_: Any) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(half._events, "note", fail)
    loaded(half)
    monkeypatch.setattr(half._events, "take", fail)
    assert half.take_events() == ()
    assert half._leader.shared.figures.totals["errors"] == 2


@pytest.mark.parametrize("tells_events", [True, False], ids=["of another vLLM", "not published"])
def test_without_such_events_the_connector_serves_and_tells_nothing(make_half, tells_events):
    """Another vLLM's classes have other names; where it publishes nothing, none is imported."""
    assert make_half(tells_events=tells_events).take_events() == ()
    assert "kvray.vllm.tier_events" not in sys.modules
