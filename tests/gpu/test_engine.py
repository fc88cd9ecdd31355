"""Random lives of reference engines over one tier, on a GPU if there is one.

Every answer is compared token for token with that of an engine alone. Pools are full of NaN, so a
byte that was not loaded, or saved too early, shows in an answer.
"""

import os
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import pytest
import torch

from kvray.engine.meta import LoadPlan
from kvray.reference import KvConnectorConfig
from kvray.reference.engine import ReferenceEngine
from tests.kit.tier import Tier, tier_environment

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIVES = int(os.environ.get("LIVES", "8" if DEVICE == "cuda" else "1"))
BLOCK = 16
ANSWER_TOKENS = 6
KVRAY = KvConnectorConfig()
OPTIONS: list[dict[str, Any]] = [
    {},
    {"overlap": True},
    {"enable_chunked_prefill": True, "chunk_tokens": 2 * BLOCK},
    {"enable_chunked_prefill": True, "chunk_tokens": BLOCK, "overlap": True, "runtime": "main"},
    {"enable_partial_reuse": True},
    {"max_draft_len": 3},
    {"blocks_per_step": 4, "enable_chunked_prefill": True, "chunk_tokens": 4 * BLOCK},
]


@pytest.fixture(scope="module")
def running() -> Iterator[Tier]:
    with tier_environment(ARENA__CAPACITY="64MiB"):
        tier = Tier()
        yield tier
        tier.stop()


@pytest.fixture
def tier(running: Tier) -> Tier:
    """A tier without blocks: what was computed in other steps has other bits."""
    running.shard.clear(10)
    return running


def make(options: dict[str, Any], **more: Any) -> ReferenceEngine:
    return ReferenceEngine("tiny", device=DEVICE, tokens_per_block=BLOCK, **{**options, **more})


def poison_promised(engine: ReferenceEngine) -> None:
    """Fill pages with NaN before anything is loaded into them."""
    assert engine.connector is not None
    rank = engine.connector.worker._rank
    load, pool = rank._load, engine.cache.get_unique_primary_pool()

    def poisoned(plans: Sequence[LoadPlan], *where: Any) -> None:
        for plan in plans:
            for pages in plan.pages:
                ids = pages.ids()
                pool[ids[ids >= 0].tolist()] = float("nan")
        load(plans, *where)

    rank._load = poisoned


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(options) or "plain")
@pytest.mark.parametrize("seed", range(LIVES))
def test_answers_are_those_of_an_engine_alone(tier, options, seed):
    random = Random(seed)
    trunks = [[random.randrange(3, 500) for _ in range(200)] for _ in range(3)]
    known: dict[tuple[int, ...], tuple[int, ...]] = {}
    num_hits = 0

    def prompt() -> list[int]:
        tokens = random.choice(trunks)[: random.randrange(1, 200)]
        return tokens + [random.randrange(3, 500) for _ in range(random.choice((0, 5, 40)))]

    joined = {"connector": KVRAY, "num_blocks": 48, "poison": True}
    with (
        make(options, enable_block_reuse=False) as alone,
        make(options, **joined) as first,
        make(options, **joined) as second,
    ):
        for engine in (first, second):
            poison_promised(engine)
        for _ in range(10):
            engine = random.choice((first, second))
            if random.random() < 0.5:
                engine.reset_prefix_cache()
            prompts = [prompt() for _ in range(random.randrange(1, 4))]
            calls = [engine.submit(tokens, max_tokens=ANSWER_TOKENS) for tokens in prompts]
            gone = random.choice(calls) if random.random() < 0.3 else None
            if gone is not None:
                engine.cancel(gone)
            for tokens, call in zip(prompts, calls, strict=True):
                output = call.result(60)
                if tuple(tokens) not in known:
                    answer = alone.generate(tokens, max_tokens=ANSWER_TOKENS)
                    known[tuple(tokens)] = answer.token_ids
                expected = known[tuple(tokens)]
                assert output.token_ids == expected[: len(output.token_ids)]
                assert call is gone or len(output.token_ids) == len(expected)
                num_hits += output.hit_tokens
        for engine in (first, second):
            assert engine.connector is not None
            assert engine.connector.scheduler._shared.figures.totals["errors"] == 0
            assert engine.failure is None
    assert num_hits > 0
