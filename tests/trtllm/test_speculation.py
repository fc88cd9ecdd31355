"""Speculative decoding by n-grams on the first cache manager: only accepted tokens are ever stored.

A pass writes what it drafts behind the answer, and the pages of rejected tokens go to others. The
engine reports a page once: another one in its place later is not reported.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvray.errors import ConfigError
from tests.trtllm.conftest import MakeEngine
from tests.trtllm.engine import Engine
from tests.trtllm.llm_request import LlmRequest
from tests.trtllm.shapes import BLOCK
from tests.trtllm.test_start_up import make_halves
from tests.trtllm.version import WITH_GROUPS, Version, on

PROMPTS = [list(range(at, at + 30 + at // 100)) for at in range(100, 900, 100)]
FIRST_MANAGER = {"use_kv_cache_manager_v2": False}
"""Setting of the versions that have a choice."""


def drafting(make_engine: MakeEngine, draft_len: int, **options: Any) -> Engine:
    """Make an engine that drafts, with hardly more pages than its requests need."""
    options.setdefault("num_pages", 64)
    return make_engine(is_flat=True, draft_len=draft_len, cache=FIRST_MANAGER, **options)


def serve_all(
    engine: Engine, prompts: Sequence[list[int]] = PROMPTS, *, max_new: int = 1
) -> list[LlmRequest]:
    """Serve all prompts, some at once."""
    requests = [engine.submit(list(prompt), max_new=max_new) for prompt in prompts]
    engine.run()
    return requests


def hits(requests: Sequence[LlmRequest]) -> list[int]:
    return [request.num_hit for request in requests]


def whole(prompts: Sequence[list[int]]) -> list[int]:
    """Return how many tokens can be loaded of each."""
    return [(len(prompt) - 1) // BLOCK * BLOCK for prompt in prompts]


@pytest.mark.parametrize("draft_len", [1, 3, 7])
@pytest.mark.parametrize("chunk", [None, 2 * BLOCK])
def test_engines_load_the_prompts_that_a_drafting_one_has_computed(
    make_engine: MakeEngine, draft_len: int, chunk: int | None
) -> None:
    cold = drafting(make_engine, draft_len, chunk=chunk)
    serve_all(cold, max_new=20)
    assert cold.model.num_accepted > 0
    cold.close()
    assert hits(serve_all(make_engine(is_flat=True))) == whole(PROMPTS)
    assert hits(serve_all(drafting(make_engine, draft_len), max_new=20)) == whole(PROMPTS)


def test_blocks_of_answers_are_stored_by_the_next_turn(make_engine: MakeEngine) -> None:
    cold = drafting(make_engine, 7, num_pages=80)
    turns = [
        [*request.tokens[: request.num_read], 1, 2, 3] for request in serve_all(cold, max_new=30)
    ]
    cold.close()
    warm = drafting(make_engine, 7, num_pages=80)
    assert hits(serve_all(warm, turns)) == [len(prompt) // BLOCK * BLOCK for prompt in PROMPTS]
    warm.close()
    assert hits(serve_all(make_engine(is_flat=True), turns)) == whole(turns)


def test_ranks_that_draft_load_their_own_bytes(make_engine: MakeEngine) -> None:
    drafting(make_engine, 3, num_ranks=2).serve(PROMPTS[0], max_new=9)
    warm = drafting(make_engine, 3, num_ranks=2)
    assert warm.serve(PROMPTS[0], max_new=9).num_hit == (len(PROMPTS[0]) - 1) // BLOCK * BLOCK


KINDS = [
    "MTP", "Eagle", "Eagle3", "Draft_Target", "PARD", "SA", "DFlash", "DSpark", "User_Provided",
    "SaveState", "Medusa", "Lookahead", "", "a kind of tomorrow",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_with_layers_of_their_own_are_refused(version: Version, kind: str) -> None:
    config = SimpleNamespace(decoding_type=kind, max_draft_len=3)
    with pytest.raises(ConfigError, match="unset speculative_config"):
        make_halves(version, speculative_config=config)


@pytest.mark.parametrize("kind", ["NGram", "AUTO"])
def test_n_grams_are_served(version: Version, kind: str) -> None:
    config = SimpleNamespace(decoding_type=kind, max_draft_len=3)
    for half in make_halves(version, speculative_config=config, cache=FIRST_MANAGER):
        half.shutdown()


@on(*WITH_GROUPS)
@pytest.mark.parametrize("switch", [True, "auto"])
def test_n_grams_are_refused_where_the_second_manager_may_be_in_use(
    version: Version, switch: Any
) -> None:
    config = SimpleNamespace(decoding_type="NGram", max_draft_len=3)
    with pytest.raises(ConfigError, match="use_kv_cache_manager_v2 to false"):
        make_halves(version, speculative_config=config, cache={"use_kv_cache_manager_v2": switch})
