"""A new engine loads the blocks that another has computed, byte for byte."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvray.actors.shard.shard import Shard
from kvray.store.arena.layout import READY
from tests.trtllm.conftest import MakeEngine
from tests.trtllm.shapes import BLOCK, FLAT, MLA, Shape, with_dtype
from tests.trtllm.version import Version
from tests.waiting import wait_for

PROMPT = list(range(100, 140))
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunked": {"chunk": 8},
    "small_chunks": {"chunk": BLOCK},
    "overlapped": {"is_overlapped": True},
    "overlapped_and_chunked": {"is_overlapped": True, "chunk": 12},
    "without_hooks": {"has_hooks": False},
}
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.uint8]


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 9, 39, 40])
def test_a_new_engine_loads_all_but_the_block_of_the_last_token(
    make_engine: MakeEngine, num_tokens: int
) -> None:
    cold = make_engine()
    assert cold.serve(PROMPT[:num_tokens]).num_hit == 0
    cold.close()
    warm = make_engine()
    assert warm.serve(PROMPT[:num_tokens]).num_hit == (num_tokens - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_hit_is_right_in_every_order_of_calls(make_engine: MakeEngine, settings: str) -> None:
    cold = make_engine(**SETTINGS[settings])
    cold.serve(PROMPT, max_new=12)
    cold.close()
    warm = make_engine(**SETTINGS[settings])
    assert warm.serve(PROMPT, max_new=12).num_hit == 36


def test_a_prompt_that_diverges_loads_what_it_shares(make_engine: MakeEngine) -> None:
    cold = make_engine()
    cold.serve(PROMPT)
    cold.close()
    warm = make_engine()
    assert warm.serve([*PROMPT[:22], *range(20)]).num_hit == 20
    assert warm.serve([7, *PROMPT]).num_hit == 0


def test_blocks_that_an_answer_filled_are_loaded_in_the_next_turn(make_engine: MakeEngine) -> None:
    cold = make_engine(is_overlapped=True)
    turn = cold.serve(PROMPT, max_new=11)
    cold.close()
    warm = make_engine()
    turns = [*PROMPT, *turn.answer]
    computed = len(turns) - 1  # the last token was sampled, and never computed
    assert warm.serve([*turns, 1, 2, 3]).num_hit == computed // BLOCK * BLOCK


def test_only_what_the_engine_lacks_is_loaded(make_engine: MakeEngine) -> None:
    cold = make_engine()
    cold.serve(PROMPT)
    cold.close()
    warm = make_engine()
    warm.serve(PROMPT[:13])
    assert warm.serve(PROMPT).num_hit == 36 - 12


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_of_every_dtype_come_back(make_engine: MakeEngine, dtype: torch.dtype) -> None:
    assert hits_of_a_new_engine(make_engine, with_dtype(dtype)) == 36


def test_a_latent_cache_comes_back(make_engine: MakeEngine) -> None:
    assert hits_of_a_new_engine(make_engine, MLA) == 36


@pytest.mark.parametrize("settings", SETTINGS)
def test_one_pool_comes_back_also_where_there_could_be_groups(
    make_engine: MakeEngine, settings: str
) -> None:
    cold = make_engine(is_flat=True, **SETTINGS[settings])
    cold.serve(PROMPT, max_new=6)
    cold.close()
    assert make_engine(is_flat=True, **SETTINGS[settings]).serve(PROMPT).num_hit == 36


def test_several_requests_of_one_batch_load_their_own(make_engine: MakeEngine) -> None:
    prompts = [PROMPT, PROMPT[:17], [*PROMPT[:8], *range(9)], list(range(30))]
    cold = make_engine(max_batch=8)
    for prompt in prompts:
        cold.submit(prompt, max_new=5)
    cold.run()
    cold.close()
    warm = make_engine(max_batch=8)
    requests = [warm.submit(prompt, max_new=5) for prompt in prompts]
    warm.run()
    assert [request.num_hit for request in requests] == [36, 16, 16, 28]


def test_engines_that_run_at_once_load_what_the_other_has_computed(
    make_engine: MakeEngine, shard: Shard
) -> None:
    engines = [make_engine(chunk=8), make_engine(chunk=8)]
    requests = []
    before = shard.status()["arena"]["blocks"]
    for turn in range(12):
        prompt = [turn // 2, *PROMPT]
        requests.append(engines[turn % 2].submit(prompt, max_new=3))
        for engine in (*engines, *engines):
            engine.step()
        engines[turn % 2].run()
        stored = before + 10 * (turn // 2 + 1)
        wait_for(lambda stored=stored: shard.status()["arena"]["blocks"] >= stored)
    assert [request.num_hit for request in requests] == [0, 40] * 6


def test_an_engine_with_fewer_pages_than_its_requests_need_reuses_them_all(
    make_engine: MakeEngine,
) -> None:
    prompts = [[seed, *PROMPT] for seed in range(12)]
    for _ in range(2):
        engine = make_engine(num_pages=30)
        requests = [engine.submit(prompt, max_new=3) for prompt in prompts]
        engine.run()
        engine.close()
    assert all(request.num_hit == 40 for request in requests)


def test_an_arena_smaller_than_the_working_set_shortens_hits_and_no_more(
    make_engine: MakeEngine,
) -> None:
    prompts = [[seed, *range(200)] for seed in range(9)]
    hits = []
    for _ in range(2):
        engine = make_engine(num_pages=128)
        requests = [engine.submit(prompt, max_new=2) for prompt in prompts]
        engine.run()
        engine.close()
        hits.append(sum(request.num_hit for request in requests))
    assert hits[0] == 0
    assert hits[1] < len(prompts) * 200


def test_padding_requests_that_nobody_asked_about_are_left_alone(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add_dummy()
    engine.serve(PROMPT, max_new=8)
    engine.serve(PROMPT[:20], max_new=8)


def test_salts_keep_requests_apart(make_engine: MakeEngine, version: Version) -> None:
    name = version.stand_in.SALT_FIELD
    salts: list[Any] = [None, 1, 2**63] if name == "cache_salt_id" else [None, "a", "b"]
    for expected in (0, 36):
        engine = make_engine(cache={"enable_block_reuse": True})
        for salt in salts:
            assert engine.serve(PROMPT, **{name: salt}).num_hit == expected
        engine.close()


def test_an_unaligned_start_loads_nothing(make_engine: MakeEngine) -> None:
    cold = make_engine()
    cold.serve(PROMPT)
    cold.close()
    warm = make_engine(partial_tokens=2, cache={"enable_partial_reuse": True})
    assert warm.serve(PROMPT).num_hit == 0
    assert warm.totals["miss_tokens_unaligned"] > 0


def test_an_engine_that_reuses_nothing_is_promised_nothing(make_engine: MakeEngine) -> None:
    make_engine().serve(PROMPT)
    warm = make_engine(cache={"enable_block_reuse": False})
    assert warm.serve(PROMPT).num_hit == 0


def test_an_offer_that_the_engine_ignores_is_neither_loaded_nor_kept(
    make_engine: MakeEngine,
) -> None:
    make_engine(is_flat=True).serve(PROMPT)
    warm = make_engine(is_flat=True)
    warm.cache.is_reused = False
    assert warm.serve(PROMPT, max_new=5).num_hit == 0
    assert warm.totals["hit_tokens"] == 36
    assert warm.totals["loaded_blocks"] == 0


def test_retention_priorities_arrive_with_the_blocks(
    make_engine: MakeEngine, version: Version
) -> None:
    is_known = "kv_cache_retention_config" in version.stand_in.REQUEST_FIELDS
    retained = {"kv_cache_retention_config": SimpleNamespace(priority=80)} if is_known else {}
    cold = make_engine(is_flat=True)
    cold.serve(PROMPT, **retained)
    cold.close()
    warm = make_engine(is_flat=True)
    assert warm.serve(PROMPT, **retained).num_hit == 36
    tables = warm.arena.tables
    mine = (tables.slot_state == READY) & (tables.slot_namespace != 0)
    assert set(tables.slot_priority[mine].tolist()) == {80 if is_known else 35}


def test_without_priorities_in_reports_a_retained_request_is_like_any_other(
    make_engine: MakeEngine, version: Version
) -> None:
    is_known = "kv_cache_retention_config" in version.stand_in.REQUEST_FIELDS
    retained = {"kv_cache_retention_config": SimpleNamespace(priority=35)} if is_known else {}
    cold = make_engine()
    cold.serve(PROMPT, **retained)
    cold.close()
    assert make_engine().serve(PROMPT, **retained).num_hit == 36


def hits_of_a_new_engine(make_engine: MakeEngine, shape: Shape = FLAT) -> int:
    cold = make_engine(shape=shape)
    cold.serve(PROMPT, max_new=6)
    cold.close()
    return make_engine(shape=shape).serve(PROMPT, max_new=6).num_hit
