"""Ranks that are processes share prompts through a real shard: with heads split, and as owners."""

import shutil
import tempfile
from collections.abc import Callable, Iterator

import pytest

from kvray.actors.owner.ownership import sweep
from kvray.config import load_config
from tests.engine.conftest import BLOCK, make_prompt
from tests.engine.test_kvray_connector import CONNECTOR, Tier
from tests.engine.test_tensor_parallel import start

Expected = Callable[..., tuple[int, ...]]
TRUNK = make_prompt(80, seed=5)
DIVERGING = TRUNK[:50] + make_prompt(40, seed=6)
PROMPTS = {
    "aligned": make_prompt(96, seed=1),
    "unaligned": make_prompt(100, seed=2),
    "one block": make_prompt(17, seed=3),
    "short": make_prompt(15, seed=4),
    "one token": [7],
}
CHUNKED = {"enable_chunked_prefill": True, "chunk_tokens": 2 * BLOCK, "connector": CONNECTOR}


@pytest.fixture
def tier(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tier]:
    """A shard of this test's own, which children find through the environment."""
    parent = tempfile.mkdtemp(dir="/dev/shm", prefix="kvray-test-")
    for name, value in {
        "KVRAY_ARENA__DIR": parent,
        "KVRAY_ARENA__CAPACITY": "32MiB",
        "KVRAY_ARENA__LOCK_WAIT_S": "0.5",
        "KVRAY_CONNECTOR__MODEL_KEY": "tiny",
        "KVRAY_CONNECTOR__ATTACH_RETRY_S": "0.05",
    }.items():
        monkeypatch.setenv(name, value)
    made = Tier()
    yield made
    made.stop()
    sweep(load_config().node_dir)
    shutil.rmtree(parent)


def test_fresh_ranks_load_what_cold_ranks_stored(tier: Tier, expected: Expected) -> None:
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
    for prompt, output in zip(prompts.values(), outputs, strict=True):
        assert output.token_ids == expected(prompt, 8)


@pytest.mark.long
def test_four_ranks_load_what_their_pools_forgot(tier: Tier, expected: Expected) -> None:
    """The model has two KV heads, so two ranks hold the same bytes, each as a part of its own."""
    with start(4, **CHUNKED, overlap=True) as engine:
        engine.generate([PROMPTS["aligned"], TRUNK], max_tokens=1)
        tier.wait_for(lambda: tier.stored() >= 4 * (6 + 5))
        engine.generate(make_prompt(250, seed=8), max_tokens=1)  # as many as the pools hold
        for prompt, hit in ((PROMPTS["aligned"], 80), (DIVERGING, 48)):
            output = engine.generate(prompt, max_tokens=8)
            assert (output.hit_tokens, output.reused_tokens) == (hit, 0)
            assert output.token_ids == expected(prompt, 8)


def test_what_one_owner_stored_the_other_hits(tier: Tier, expected: Expected) -> None:
    with start(2, enable_attention_dp=True, runtime="main", connector=CONNECTOR) as owners:
        for prompt in PROMPTS.values():
            stored = tier.stored()
            first = owners.generate(prompt, max_tokens=8)
            if len(prompt) >= BLOCK:
                tier.wait_for(lambda before=stored: tier.stored() > before)
            second = owners.generate(prompt, max_tokens=8)
            assert (first.hit_tokens, first.reused_tokens) == (0, 0)
            assert second.hit_tokens == (len(prompt) - 1) // BLOCK * BLOCK
            assert first.token_ids == second.token_ids == expected(prompt, 8)
