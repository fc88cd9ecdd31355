"""Collectives between ranks move any object, sum in one order, and always end."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from kvray.errors import ConfigError, KVRayError
from kvray.reference.checkpoint import split_causal_lm
from kvray.reference.model import BlockModel, make_tiny_causal_lm
from kvray.reference.ranks import CollectiveError, GlooRanks, SingleRank
from tests.engine.conftest import BLOCK, forward_block, make_prompt

TIMEOUT_S = 10.0


def on_ranks(
    size: int, directory: Path, act: Callable[[GlooRanks], Any], *, timeout_s: float = TIMEOUT_S
) -> list[Any]:
    """Return what `act` returns, or raises, on each of `size` ranks, which are threads here."""

    def run(rank: int) -> Any:
        ranks = GlooRanks(rank, size, directory, timeout_s=timeout_s)
        try:
            return act(ranks)
        except KVRayError as error:
            return error
        finally:
            ranks.leave()

    with ThreadPoolExecutor(size, thread_name_prefix="ThreadPoolExecutor") as threads:
        return list(threads.map(run, range(size)))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("length", [0, 1000, 1008, 1009, 50_000])
def test_objects_of_any_length_arrive_on_every_rank(tmp_path: Path, size: int, length: int) -> None:
    def act(ranks: GlooRanks) -> Any:
        told = ranks.broadcast({"from": ranks.rank, "data": "x" * length})
        return told, ranks.allgather((ranks.rank, "y" * (length if ranks.rank == 1 else 1)))

    for told, gathered in on_ranks(size, tmp_path, act):
        assert told == {"from": 0, "data": "x" * length}
        assert gathered == [(rank, "y" * (length if rank == 1 else 1)) for rank in range(size)]


@pytest.mark.parametrize("size", [2, 4])
def test_sums_have_the_same_bits_on_every_rank_and_in_every_run(tmp_path: Path, size: int) -> None:
    parts = [
        torch.randn(1, 16, 64, generator=torch.Generator().manual_seed(seed)) * 10.0**seed
        for seed in range(size)
    ]
    in_order = torch.zeros(1, 16, 64)
    for part in parts:
        in_order = in_order + part
    for run in range(2):
        directory = tmp_path / str(run)
        directory.mkdir()
        for total in on_ranks(size, directory, lambda ranks: ranks.sum(parts[ranks.rank])):
            assert torch.equal(total, in_order)


def test_rank_that_leaves_fails_the_others_at_once(tmp_path: Path) -> None:
    def act(ranks: GlooRanks) -> Any:
        ranks.meet(timeout_s=TIMEOUT_S)
        return None if ranks.rank == 1 else ranks.allgather(1)

    started = time.monotonic()
    first, second = on_ranks(2, tmp_path, act)
    assert isinstance(first, CollectiveError)
    assert "Restart the engine" in str(first)
    assert second is None
    assert time.monotonic() - started < TIMEOUT_S / 2


def test_rank_that_does_nothing_fails_the_others_in_time(tmp_path: Path) -> None:
    has_failed = threading.Event()

    def act(ranks: GlooRanks) -> Any:
        ranks.meet(timeout_s=TIMEOUT_S)
        if ranks.rank == 1:
            return has_failed.wait(TIMEOUT_S)
        try:
            return ranks.broadcast(1) and ranks.allgather(1)
        finally:
            has_failed.set()

    first, second = on_ranks(2, tmp_path, act, timeout_s=0.5)
    assert isinstance(first, CollectiveError)
    assert second


def test_diagnosis_takes_the_place_of_what_gloo_says(tmp_path: Path) -> None:
    with pytest.raises(KVRayError, match="the other is ill"):
        GlooRanks(0, 2, tmp_path, timeout_s=0.2, diagnose=lambda: KVRayError("the other is ill"))


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_have_their_heads_of_the_kv_and_all_of_the_logits(tmp_path: Path, size: int) -> None:
    """Two KV heads: with four ranks, two hold the same one."""
    tokens = make_prompt(BLOCK)
    one = BlockModel(make_tiny_causal_lm(), tokens_per_block=BLOCK)
    whole, kvs = forward_block(one, None, tokens, 0)

    def act(ranks: GlooRanks) -> Any:
        causal_lm = make_tiny_causal_lm()
        split_causal_lm(causal_lm, ranks)
        model = BlockModel(causal_lm, tokens_per_block=BLOCK)
        assert model.geometry.num_kv_heads == 1
        return forward_block(model, None, tokens, 0)

    make_tiny_causal_lm()  # transformers imports on first use, which two threads may not share
    results = on_ranks(size, tmp_path, act)
    for rank, (logits, own) in enumerate(results):
        assert torch.equal(logits, results[0][0])
        torch.testing.assert_close(logits, whole, rtol=1e-4, atol=1e-4)
        head = rank * 2 // size
        for (keys, values), (all_keys, all_values) in zip(own, kvs, strict=True):
            torch.testing.assert_close(keys[0, 0], all_keys[0, head], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(values[0, 0], all_values[0, head], rtol=1e-4, atol=1e-4)


def test_ranks_that_cannot_share_a_model_evenly_are_refused() -> None:
    ranks = SingleRank()
    ranks.size = 3
    with pytest.raises(ConfigError, match="3 ranks cannot share 4 attention heads"):
        split_causal_lm(make_tiny_causal_lm(), ranks)
