"""A new engine loads the blocks that another has computed, byte for byte."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvray.store.arena.layout import READY
from tests.trtllm.conftest import PROMPT, MakeEngine
from tests.trtllm.engine import Engine
from tests.trtllm.llm_request import LlmRequest
from tests.trtllm.memory import BLOCK, MLA, with_dtype
from tests.trtllm.version import on
from tests.waiting import wait_for

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunked": {"chunk": 8},
    "small_chunks": {"chunk": BLOCK},
    "overlapped": {"is_overlapped": True},
    "overlapped_and_chunked": {"is_overlapped": True, "chunk": 12},
    "without_hooks": {"has_hooks": False},
}
FIRST_MANAGER = {"use_kv_cache_manager_v2": False}
"""Setting of the versions that have a choice."""
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.uint8]


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 9, 39, 40])
def test_a_new_engine_loads_all_but_the_block_of_the_last_token(make_engine, stored, num_tokens):
    assert stored(PROMPT[:num_tokens], max_new=1).num_hit == 0
    hit = make_engine().serve(PROMPT[:num_tokens]).num_hit
    assert hit == (num_tokens - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("is_flat", [False, True], ids=["any_manager", "first_manager"])
def test_a_hit_is_right_in_every_order_of_calls(make_warm, settings, is_flat):
    warm = make_warm(is_flat=is_flat, **SETTINGS[settings])
    assert warm.serve(PROMPT, max_new=12).num_hit == 36


def test_a_prompt_that_diverges_loads_what_it_shares(make_warm):
    warm = make_warm()
    assert warm.serve([*PROMPT[:22], *range(20)]).num_hit == 20
    assert warm.serve([7, *PROMPT]).num_hit == 0


def test_blocks_that_an_answer_filled_are_loaded_in_the_next_turn(make_engine, stored):
    turns = [*PROMPT, *stored(max_new=11, is_overlapped=True).generated_tokens]
    computed = len(turns) - 1  # the last token was sampled, and never computed
    assert make_engine().serve([*turns, 1, 2, 3]).num_hit == computed // BLOCK * BLOCK


def test_only_what_the_engine_lacks_is_loaded(make_warm):
    warm = make_warm()
    warm.serve(PROMPT[:13])
    assert warm.serve(PROMPT).num_hit == 36 - 12


@pytest.mark.parametrize("shape", [*map(with_dtype, DTYPES), MLA], ids=lambda shape: shape.name)
def test_bytes_of_every_kind_come_back(make_warm, shape):
    assert make_warm(shape=shape).serve(PROMPT, max_new=6).num_hit == 36


def test_engines_that_run_at_once_load_what_the_other_has_computed(make_engine, shard):
    engines = [make_engine(chunk=8), make_engine(chunk=8)]
    hits, before = [], shard.status()["arena"]["blocks"]
    for turn in range(12):
        request = engines[turn % 2].submit([turn // 2, *PROMPT], max_new=3)
        for engine in (*engines, *engines):
            engine.step()
        engines[turn % 2].run()
        hits.append(request.num_hit)
        blocks = before + 10 * (turn // 2 + 1)
        wait_for(lambda blocks=blocks: shard.status()["arena"]["blocks"] >= blocks)
    assert hits == [0, 40] * 6


def test_an_engine_with_fewer_pages_than_its_requests_need_reuses_them_all(make_engine):
    prompts = [[seed, *PROMPT] for seed in range(12)]
    prefill_all(make_engine(num_pages=30), prompts, max_new=3)
    assert prefill_all(make_engine(num_pages=30), prompts, max_new=3) == [40] * 12


def test_an_arena_smaller_than_the_working_set_shortens_hits_and_no_more(make_engine):
    prompts = [[seed, *range(200)] for seed in range(9)]
    assert sum(prefill_all(make_engine(), prompts, max_new=2)) == 0
    assert sum(prefill_all(make_engine(), prompts, max_new=2)) < len(prompts) * 200


def test_padding_requests_that_nobody_asked_about_are_left_alone(make_engine):
    engine = make_engine()
    engine.add_dummy()
    engine.serve(PROMPT, max_new=8)
    engine.serve(PROMPT[:20], max_new=8)


def test_salts_keep_requests_apart(make_engine, version):
    name = version.salt_field
    salts: list[Any] = [None, 1, 2**63] if name == "cache_salt_id" else [None, "a", "b"]
    for expected in (0, 36):
        engine = make_engine()
        for salt in salts:
            assert engine.serve(PROMPT, **{name: salt}).num_hit == expected
        engine.close()


FAMILY = [
    [*range(start, start + end), *range(700 + end, 700 + end + 12)]
    for end in (35, 22, 31, 6, 26, 11, 21, 14)
    for start in (0, 100)
]
"""Prompts that share tokens up to the middle of some block, and go on each in its own way."""
PARTIAL = {"enable_partial_reuse": True}


@pytest.mark.parametrize("at_once", [1, 8])
@pytest.mark.parametrize("chunk", [None, 2 * BLOCK], ids=["whole", "chunked"])
@pytest.mark.parametrize("is_flat", [False, True], ids=["any_manager", "first_manager"])
def test_blocks_of_which_the_engine_has_a_part_are_loaded_whole(
    on_device, make_engine, at_once, chunk, is_flat
):
    """Others whose pages were copied go on reading them, and answer; what is computed is saved."""
    options = {"chunk": chunk, "is_flat": is_flat, "max_batch": at_once}
    serve_all(make_engine(cache=PARTIAL, **options), FAMILY, max_new=3)
    reused = []
    for cache in ({}, PARTIAL):
        warm = make_engine(cache=cache, **options)
        requests = [warm.submit(prompt, max_new=2 + len(prompt)) for prompt in map(list, FAMILY)]
        warm.run()
        hits, totals = [request.num_hit for request in requests], warm.totals
        reused.append([hits, totals["local_tokens"]])
        assert totals["hit_tokens"] == totals["hit_tokens_from_host"] == sum(hits)
        assert totals["miss_tokens_unaligned"] == 0
    (plain, local), (partial, local_in_part) = reused
    assert sum(partial) + local_in_part >= sum(plain) + local
    if at_once == 1:
        assert local_in_part > local
        assert {a - b for a, b in zip(plain, partial, strict=True)} == {0, 1, 2, 3}


def test_what_it_has_a_part_of_is_not_loaded_if_the_model_is_compiled(make_engine):
    """The hooks may not run then, and nothing else names the stream that pages are copied on."""
    serve_all(make_engine(), FAMILY)
    warm = make_engine(cache=PARTIAL, torch_compile_config=SimpleNamespace())
    prefill_all(warm, FAMILY)
    assert warm.totals["miss_tokens_unaligned"] > 0


def test_an_engine_that_reuses_nothing_is_promised_nothing(make_engine, stored):
    stored()
    engine = make_engine(cache={"enable_block_reuse": False})
    engine.serve(PROMPT)
    assert engine.totals["hit_tokens"] == 0


def test_an_offer_that_the_engine_ignores_is_neither_loaded_nor_kept(make_warm):
    warm = make_warm(is_flat=True)
    warm.cache.is_reused = False
    assert warm.serve(PROMPT, max_new=5).num_hit == 0
    assert warm.totals["hit_tokens"] == 36
    assert warm.totals["loaded_blocks"] == 0


@pytest.mark.parametrize("is_flat", [True, False], ids=["first_manager", "any_manager"])
def test_retention_priorities_arrive_with_the_blocks(make_engine, stored, version, is_flat):
    """Reports of the second manager have none: a request is like any other there."""
    is_told = version.retains and (is_flat or not version.has_groups)
    config = SimpleNamespace(priority=80)
    fields = {"kv_cache_retention_config": config} if version.retains else {}
    stored(fields=fields, is_flat=is_flat)
    warm = make_engine(is_flat=is_flat)
    assert warm.serve(PROMPT, **fields).num_hit == 36
    tables = warm.arena.tables
    mine = (tables.slot_state == READY) & (tables.slot_namespace != 0)
    assert set(tables.slot_priority[mine].tolist()) == {80 if is_told else 35}


PROMPTS = [list(range(at, at + 30 + at // 100)) for at in range(100, 900, 100)]
WHOLE = [(len(prompt) - 1) // BLOCK * BLOCK for prompt in PROMPTS]
SENDING = {
    "disable_overlap_scheduler": True,
    "cache_transceiver_config": SimpleNamespace(backend="DEFAULT"),
}
"""A context server: a request ends with its prompt, whose blocks TensorRT-LLM sends on.

Its pages stay until the other server and the saves have them."""


@on("v1_3rc", "main_line", "feature_branch")
@pytest.mark.parametrize("options", [{}, {"chunk": 2 * BLOCK}, {"num_ranks": 2}], ids=str)
def test_context_servers_load_and_send_what_another_has_computed(on_device, make_engine, options):
    servers = [make_engine(num_pages=48, **options, **SENDING) for _ in range(2)]
    prefill_all(servers[0], PROMPTS, is_only_prefilled=True)
    assert prefill_all(servers[1], PROMPTS, is_only_prefilled=True) == WHOLE


def drafting(make_engine: MakeEngine, draft_len: int, **options: Any) -> Engine:
    """Make an engine that drafts by n-grams, with hardly more pages than its requests need.

    A pass writes what it drafts behind the answer, and the pages of rejected tokens go to others.
    The engine reports a page once: another one in its place later is not reported.
    """
    options = {"num_pages": 64, "cache": FIRST_MANAGER, **options}
    return make_engine(is_flat=True, draft_len=draft_len, **options)


@pytest.mark.parametrize(
    ("draft_len", "options"),
    [*itertools.product((1, 3, 7), ({}, {"chunk": 2 * BLOCK})), (3, {"num_ranks": 2})],
    ids=str,
)
def test_engines_load_the_prompts_that_a_drafting_one_has_computed(make_engine, draft_len, options):
    cold = drafting(make_engine, draft_len, **options)
    prefill_all(cold, PROMPTS, max_new=20)
    assert cold.model.num_accepted > 0
    assert prefill_all(make_engine(is_flat=True, **options), PROMPTS) == WHOLE
    assert prefill_all(drafting(make_engine, draft_len, **options), PROMPTS, max_new=20) == WHOLE


def test_blocks_of_drafted_answers_are_stored_by_the_next_turn(make_engine):
    cold = drafting(make_engine, 7, num_pages=80)
    answered = serve_all(cold, PROMPTS, max_new=30)
    turns = [[*request.get_tokens(0), 1, 2, 3] for request in answered]
    told = [len(prompt) // BLOCK * BLOCK for prompt in PROMPTS]
    assert prefill_all(drafting(make_engine, 7, num_pages=80), turns) == told
    whole = [(len(turn) - 1) // BLOCK * BLOCK for turn in turns]
    assert prefill_all(make_engine(is_flat=True), turns) == whole


def serve_all(engine: Engine, prompts: list[list[int]], **named: Any) -> list[LlmRequest]:
    """Serve all prompts, some at once, and end the engine."""
    requests = [engine.submit(list(prompt), **named) for prompt in prompts]
    engine.finish()
    return requests


def prefill_all(engine: Engine, prompts: list[list[int]], **named: Any) -> list[int]:
    """Return how many tokens were loaded of each prompt."""
    return [request.num_hit for request in serve_all(engine, prompts, **named)]
