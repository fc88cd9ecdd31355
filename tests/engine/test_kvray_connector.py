"""Engines over the real connector and real shards, of one rank or several, answer as one alone."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvray.reference.engine import ReferenceEngine
from kvray.reference.model import TINY_CONFIG, make_random_weights
from tests.engine.conftest import BLOCK, KVRAY, check, make_prompt
from tests.engine.test_tensor_parallel import start
from tests.kit.tier import tier_environment
from tests.kit.two_nodes import PATIENT, TwoNodes
from tests.tiny_checkpoint import save_checkpoint
from tests.waiting import wait_for

TRUNK = make_prompt(80, seed=5)
DIVERGING = TRUNK[:50] + make_prompt(40, seed=6)
PROMPTS = {
    "aligned": make_prompt(96, seed=1),
    "unaligned": make_prompt(100, seed=2),
    "one block": make_prompt(17, seed=3),
    "short": make_prompt(15, seed=4),
    "one token": [7],
}
ON_TWO_NODES = [PROMPTS[name] for name in ("aligned", "unaligned", "one block")]
CHUNKED = {"enable_chunked_prefill": True, "chunk_tokens": 2 * BLOCK, "connector": KVRAY}


VARIANTS: list[dict[str, Any]] = [
    {},
    {"overlap": True},
    {"enable_chunked_prefill": True, "chunk_tokens": 2 * BLOCK},
    {"enable_chunked_prefill": True, "chunk_tokens": BLOCK, "overlap": True},
    {"enable_block_reuse": False},
    {"enable_partial_reuse": True},
    {"num_blocks": 12},
]


@pytest.mark.parametrize("options", VARIANTS, ids=lambda options: ",".join(options) or "plain")
def test_answers_are_those_of_an_engine_alone(make_joined, expected, options):
    prompts = [*PROMPTS.values(), DIVERGING, TRUNK]
    for is_fresh in (False, True):
        engine = make_joined(**options)
        outputs = engine.generate(prompts, max_tokens=20)
        check(outputs, expected, prompts, 20)
        if is_fresh and engine.cache.enable_block_reuse:
            assert outputs[0].hit_tokens == 80
        engine.close()


def test_fresh_ranks_load_what_cold_ranks_stored(tier, expected):
    """Pools full of NaN: a byte of the wrong rank, or of none, would show in the answer."""
    with start(2, **CHUNKED) as cold:
        for prompt in [*PROMPTS.values(), TRUNK]:
            assert cold.generate(prompt, max_tokens=8).token_ids == expected(prompt, 8)
    prompts = {**PROMPTS, "diverging": DIVERGING}
    hits = {name: (len(prompt) - 1) // BLOCK * BLOCK for name, prompt in prompts.items()}
    with start(2, **CHUNKED, overlap=True, num_blocks=48, runtime="main") as fresh:
        outputs = fresh.generate(list(prompts.values()), max_tokens=8)
    found = {name: one.hit_tokens for name, one in zip(prompts, outputs, strict=True)}
    assert found == {**hits, "diverging": 48}
    check(outputs, expected, list(prompts.values()), 8)


@pytest.mark.long
def test_four_ranks_load_what_their_pools_forgot(tier, expected):
    """The model has two KV heads, so two ranks hold the same bytes, each as a part of its own."""
    with start(4, **CHUNKED, overlap=True) as engine:
        engine.generate([PROMPTS["aligned"], TRUNK], max_tokens=1)
        tier.wait_for_stored(4 * (6 + 5))
        engine.generate(make_prompt(250, seed=8), max_tokens=1)  # as many as the pools hold
        for prompt, hit in ((PROMPTS["aligned"], 80), (DIVERGING, 48)):
            output = engine.generate(prompt, max_tokens=8)
            assert (output.hit_tokens, output.reused_tokens) == (hit, 0)
            assert output.token_ids == expected(prompt, 8)


def test_what_one_owner_stored_the_other_hits(tier, expected):
    with start(2, enable_attention_dp=True, runtime="main", connector=KVRAY) as owners:
        for prompt in PROMPTS.values():
            stored = tier.stored()
            first = owners.generate(prompt, max_tokens=8)
            if len(prompt) >= BLOCK:
                tier.wait_for_stored(stored + 1)
            second = owners.generate(prompt, max_tokens=8)
            assert (first.hit_tokens, first.reused_tokens) == (0, 0)
            assert second.hit_tokens == (len(prompt) - 1) // BLOCK * BLOCK
            assert first.token_ids == second.token_ids == expected(prompt, 8)


# Ranks on two nodes, each with its own tier.


@pytest.fixture
def nodes() -> Iterator[TwoNodes]:
    """Two nodes; the engine's leader is on the first."""
    with tier_environment(ARENA__CAPACITY="32MiB", **PATIENT) as variables:
        made = TwoNodes(Path(variables["KVRAY_ARENA__DIR"]))
        os.environ["KVRAY_ARENA__DIR"] = str(made.directories[0])
        yield made
        made.close()


def spread(
    nodes: TwoNodes, name: str, monkeypatch: pytest.MonkeyPatch, **options: object
) -> ReferenceEngine:
    """Return an engine with a rank on each node, once their shards know of both."""
    monkeypatch.setenv("KVRAY_CONNECTOR__REPLICA", name)
    env = {"KVRAY_ARENA__DIR": str(nodes.directories[1])}
    options = {"num_blocks": 64, "connector": KVRAY, **options}
    engine = start(2, ranks_per_node=1, rank_env=[env], **options)
    nodes.wait_for_ranks(engine.connector.scheduler._shared)  # type: ignore[union-attr]
    return engine


def test_fresh_ranks_load_on_each_node_what_cold_ranks_stored_there(nodes, expected, monkeypatch):
    """Pools full of NaN: a byte of the wrong rank, or of none, would show in the answer."""
    with spread(nodes, "cold", monkeypatch) as cold:
        for prompt in ON_TWO_NODES:
            assert cold.generate(prompt, max_tokens=8).token_ids == expected(prompt, 8)
    with spread(nodes, "fresh", monkeypatch, overlap=True, runtime="main") as fresh:
        outputs = fresh.generate(ON_TWO_NODES, max_tokens=8)
    assert [one.hit_tokens for one in outputs] == [
        (len(prompt) - 1) // BLOCK * BLOCK for prompt in ON_TWO_NODES
    ]
    check(outputs, expected, ON_TWO_NODES, 8)
    wait_for(lambda: nodes.leased() == [0, 0])


# Engines with 1, 2 and 4 ranks answer from what the others have computed.

SMALL_BLOCK, HEADS = 8, 4
LONG = [3 + (7 * index * index) % 490 for index in range(60)]
WHOLE = 56


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of which 4 ranks have a KV head each."""
    config = {**TINY_CONFIG, "num_key_value_heads": HEADS}
    directory = tmp_path_factory.mktemp("model")
    save_checkpoint(config, make_random_weights(1, config), directory)
    return directory


def heads_of(engine: ReferenceEngine, size: int) -> torch.Tensor:
    """Return what rank 0 has of the prompt: [blocks, layers, 2, heads, elements of a head]."""
    pool = engine.cache.get_unique_primary_pool()
    ids = engine.cache._blocks.match(LONG, namespace=None, allow_partial=False).block_ids
    assert len(ids) == WHOLE // SMALL_BLOCK
    return pool[list(ids)].view(len(ids), pool.shape[1], 2, HEADS // size, -1).clone()


@pytest.mark.long
def test_ranks_load_their_heads_of_what_any_number_of_ranks_has_stored(tier, model):
    """What rank 0 has loaded is held, byte for byte, against the same heads of what was stored."""
    answers, stored = [], {}
    for stored_by in (1, 2, 4):
        tier.shard.clear(10)
        for size in (stored_by, 1, 2, 4):
            with ReferenceEngine(
                model,
                tokens_per_block=SMALL_BLOCK,
                num_blocks=32,
                connector=KVRAY,
                poison=True,
                num_threads=1,
                tensor_parallel_size=size,
            ) as engine:
                (output,) = engine.generate([LONG], max_tokens=8)
                answers.append(output.token_ids)
                found = heads_of(engine, size)
            if stored_by not in stored:
                assert output.hit_tokens == 0
                stored[stored_by] = found
                continue
            assert output.hit_tokens == WHOLE
            source = stored[stored_by]
            shared = min(source.shape[3], found.shape[3])
            assert torch.equal(found[:, :, :, :shared], source[:, :, :, :shared])
    assert answers == answers[:1] * len(answers)
