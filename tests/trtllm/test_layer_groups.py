"""Caches with several layer groups, windows, gaps and bytes that all ranks share."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from kvray.errors import ConfigError
from tests.trtllm.conftest import PROMPT
from tests.trtllm.engine import Engine
from tests.trtllm.memory import ALL_WINDOWS, BLOCK, REPLICATED, WINDOWED, GroupShape, Memory, Shape
from tests.trtllm.version import WITH_GROUPS, GroupManager, on

SEVERAL = Shape(
    name="several",
    groups=(
        GroupShape(layers=(0, 3)),
        GroupShape(layers=(1,), own=("key", "value", "key_scale")),
        GroupShape(layers=(2,), own=("key",)),
    ),
)
SHAPES = pytest.mark.parametrize(
    "shape", [SEVERAL, WINDOWED, ALL_WINDOWS], ids=lambda shape: shape.name
)


@SHAPES
@pytest.mark.parametrize(
    "settings", [{}, {"chunk": 8}, {"is_overlapped": True, "chunk": 12}], ids=str
)
@on(*WITH_GROUPS)
def test_every_group_is_loaded_where_its_window_reaches(make_warm, shape, settings):
    assert make_warm(shape=shape, **settings).serve(PROMPT, max_new=12).num_hit == 36


@on(*WITH_GROUPS)
def test_pages_that_a_window_has_passed_go_to_others_and_are_saved_before(make_engine):
    prompts = [[seed, *range(50)] for seed in range(6)]
    cold, warm = [make_engine(shape=WINDOWED, num_pages=50, chunk=8) for _ in range(2)]
    for prompt in prompts:
        cold.submit(prompt, max_new=9)
    cold.finish()
    assert [warm.serve(prompt, max_new=9).num_hit for prompt in prompts] == [48] * 6


@on(*WITH_GROUPS)
@pytest.mark.parametrize("shape", [WINDOWED, ALL_WINDOWS], ids=lambda shape: shape.name)
def test_pages_that_a_window_passed_while_the_tier_was_away_are_not_saved_later(
    make_engine, monkeypatch, shape
):
    cold = make_engine(shape=shape)
    monkeypatch.setattr(type(cold.workers[0]._rank.shared.link), "arena", None)
    cold.submit(PROMPT, max_new=9)
    cold.step()
    monkeypatch.undo()
    cold.finish()
    assert cold.totals["dropped_blocks_store_down"] == 10
    warm = make_engine(shape=shape)
    warm.serve(PROMPT[:9])
    assert warm.serve(PROMPT).num_hit <= 8


@on(*WITH_GROUPS)
@SHAPES
@pytest.mark.parametrize("taken", [0, 1, 3, 8])
def test_an_offer_that_is_taken_in_part_is_loaded_in_part(make_warm, shape, taken):
    warm = make_warm(shape=shape)
    warm.cache.accept = lambda _request, offer: min(offer, taken * BLOCK)
    assert warm.serve(PROMPT, max_new=9).num_hit == taken * BLOCK


@on(*WITH_GROUPS)
@pytest.mark.parametrize("trouble", ["busy", "retired"])
def test_part_of_an_offer_is_loaded_from_an_arena_that_is_busy_or_was_given_up(
    make_warm, monkeypatch, trouble
):
    warm = make_warm(shape=WINDOWED)
    warm.cache.accept = lambda _request, offer: min(offer, 3 * BLOCK)

    def make_trouble(_engine: Engine) -> None:
        warm.at.clear()
        if trouble == "busy":
            tries, lease_for = iter(range(3)), warm.arena.lease_for
            monkeypatch.setattr(
                warm.arena,
                "lease_for",
                lambda *args, **named: (
                    None if next(tries, None) is not None else lease_for(*args, **named)
                ),
            )
        else:  # for this thread; what runs beside it would leave the arena
            own = threading.get_ident()
            monkeypatch.setattr(
                type(warm.arena), "retired", property(lambda _: threading.get_ident() == own)
            )

    warm.at["asked"] = make_trouble
    assert warm.serve(PROMPT, max_new=9).num_hit == 3 * BLOCK
    monkeypatch.undo()


@on(*WITH_GROUPS)
def test_windows_are_refused_where_the_engine_reuses_pages_that_they_passed_unwritten(
    version, shard
):
    """A request gets pages for its first chunk before it is asked about; see `refuse_layout`."""
    reuse = SimpleNamespace(policy="all_reusable")
    windowed, several = [
        Memory(shape, num_pages=8).layout(version) for shape in (WINDOWED, SEVERAL)
    ]
    with version.halves(cache={"block_reuse_config": reuse}) as (worker, _):
        with pytest.raises(ConfigError, match=r"block_reuse_config\.policy to per_request"):
            worker.register_kv_cache_layout(windowed)
        worker.register_kv_cache_layout(several)


@on(*WITH_GROUPS)
def test_new_pages_may_come_as_a_mapping(make_warm, monkeypatch):
    """Some branches report pages as group -> pages."""
    report = GroupManager._report

    def as_mapping(*args: Any) -> Any:
        data = report(*args)
        data.new_block_ids_by_layer_group = dict(enumerate(data.new_block_ids_by_layer_group))
        return data

    monkeypatch.setattr(GroupManager, "_report", as_mapping)
    assert make_warm(shape=WINDOWED, chunk=8).serve(PROMPT, max_new=9).num_hit == 36


@on("feature_branch")
def test_bytes_that_all_ranks_share_are_stored_once(make_engine):
    cold = make_engine(shape=REPLICATED, num_ranks=2)
    cold.serve(PROMPT)
    cold.close()
    counts = [one._rank.shared.figures.totals["stored_blocks"] for one in cold.workers]
    assert counts == [2 * 10, 10]
    assert make_engine(shape=REPLICATED, num_ranks=2).serve(PROMPT).num_hit == 36
