"""Engines on the tiny model, with pools that show any read of a byte nobody wrote."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from kvray.reference.engine import ReferenceEngine
from kvray.reference.model import BlockModel
from tests.engine import fake_connector

BLOCK = 16
MakeEngine = Callable[..., ReferenceEngine]


@pytest.fixture
def fake() -> fake_connector.State:
    return fake_connector.reset()


@pytest.fixture
def make_engine() -> Iterator[MakeEngine]:
    """Return a maker of engines that end with the test."""
    engines: list[ReferenceEngine] = []

    def make(**options: Any) -> ReferenceEngine:
        defaults: dict[str, Any] = {"tokens_per_block": BLOCK, "num_blocks": 64, "poison": True}
        engines.append(ReferenceEngine("tiny", **{**defaults, **options}))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture(scope="session")
def expected() -> Iterator[Callable[..., tuple[int, ...]]]:
    """Return a function that answers without reuse, connector, chunks, batch or overlap."""
    with ReferenceEngine(
        "tiny", tokens_per_block=BLOCK, num_blocks=64, enable_block_reuse=False
    ) as engine:
        known: dict[Any, tuple[int, ...]] = {}

        def answer(prompt: list[int], max_tokens: int = 16) -> tuple[int, ...]:
            key = (tuple(prompt), max_tokens)
            if key not in known:
                known[key] = engine.generate(prompt, max_tokens=max_tokens).token_ids
            return known[key]

        yield answer


def make_prompt(num_tokens: int, *, seed: int = 0) -> list[int]:
    """Return tokens that look random and depend on the seed from the first one on."""
    return [
        3 + (seed * 7919 + index * (31 + seed) + index * index) % 500 for index in range(num_tokens)
    ]


def forward_block(
    model: BlockModel,
    pasts: Sequence[tuple[torch.Tensor, torch.Tensor]] | None,
    tokens: Sequence[int],
    block_index: int,
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Run one block through all layers; return the last logits, and what each layer returned."""
    step = model.begin(tokens, block_index)
    empty = torch.empty(1, model.geometry.num_kv_heads, 0, model.geometry.head_dim)
    kvs = [
        model.layer(index, step, (empty, empty) if pasts is None else pasts[index])
        for index in range(model.geometry.num_layers)
    ]
    return model.logits(step), kvs
