"""The arithmetic of a step depends on its block's index alone, also where ranks share the model."""

import functools
import operator
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvray.errors import ConfigError, KVRayError
from kvray.reference.checkpoint import load_checkpoint, split_weights
from kvray.reference.child_process import Child, Pipe
from kvray.reference.model import TINY_CONFIG, BlockModel, make_random_weights
from kvray.reference.ranks import Ranks
from kvray.reference.tokenizer import import_transformers, read
from tests.engine.conftest import BLOCK, make_prompt
from tests.tiny_checkpoint import write_tiny_checkpoint

TOKENS = make_prompt(3 * BLOCK)
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a head of its own size, tied": {"head_dim": 32, "tie_word_embeddings": True},
    "biased": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4},
    "Llama 3": {
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "other constants": {"rope_theta": 500_000.0, "rms_norm_eps": 1e-2, "hidden_act": "gelu"},
}


@pytest.fixture(scope="module")
def model() -> BlockModel:
    return BlockModel(TINY_CONFIG, make_random_weights(), tokens_per_step=BLOCK)


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


def prefill(model: BlockModel, tokens: list[int]) -> tuple[torch.Tensor, list]:
    pasts, logits = None, torch.empty(0)
    for index in range(-(-len(tokens) // BLOCK)):
        logits, pasts = forward_block(
            model, pasts, tokens[index * BLOCK : (index + 1) * BLOCK], index
        )
    assert pasts is not None
    return logits, pasts


def test_kv_of_generated_tokens_equals_that_of_prompt_tokens_bit_for_bit(model):
    _, whole = prefill(model, TOKENS)
    pasts = None
    for index in range(3):
        rows: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
        for known in range(1, BLOCK + 1):
            tokens = TOKENS[index * BLOCK : index * BLOCK + known]
            _, kvs = forward_block(model, pasts, tokens, index)
            rows.append(kvs)
        at = [index * BLOCK + known for known in range(BLOCK)]
        for layer, pair in enumerate(whole):
            for known, position in enumerate(at):  # each row as its token was generated
                for row, of_prompt in zip(rows[known][layer], pair, strict=True):
                    assert torch.equal(row[:, :, position], of_prompt[:, :, position])
        pasts = rows[-1]


def test_rows_without_a_token_change_nothing(model):
    _, pasts = prefill(model, TOKENS[:BLOCK])
    short = TOKENS[BLOCK : BLOCK + 5]
    one, _ = forward_block(model, pasts, short, 1)
    step = model.begin(short, 1)
    with torch.inference_mode():
        step.hidden[:, 5:] = 1e6
    for layer in range(model.geometry.num_layers):
        model.layer(layer, step, pasts[layer])
    assert torch.equal(model.logits(step), one)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_steps_agree_with_transformers_run_at_once(tmp_path, config):
    config = {**TINY_CONFIG, **config}
    transformers = import_transformers()
    torch.manual_seed(1)
    causal_lm = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).eval()
    with torch.no_grad():
        for weight in causal_lm.parameters():
            weight.add_(torch.randn(weight.shape) * 0.1)
    causal_lm.save_pretrained(tmp_path)
    with torch.inference_mode():
        reference = causal_lm(torch.tensor([TOKENS]), use_cache=False).logits[0, -1]
    model = load_checkpoint(tmp_path, tokens_per_step=BLOCK).model
    torch.testing.assert_close(prefill(model, TOKENS)[0], reference, rtol=1e-4, atol=1e-4)


def test_checkpoint_on_disk_is_the_model_in_memory(tmp_path):
    path = write_tiny_checkpoint(tmp_path / "tiny", seed=4)
    on_disk = load_checkpoint(path, tokens_per_step=BLOCK)
    in_memory = load_checkpoint("tiny:4", tokens_per_step=BLOCK)
    assert on_disk.name == str(path)
    assert torch.equal(prefill(on_disk.model, TOKENS)[0], prefill(in_memory.model, TOKENS)[0])
    text = "Grüße, 世界\n"
    assert on_disk.tokenizer.decode(on_disk.tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("name", "message"),
    [("tiny:x", "seed"), ("/no/such/model", "no model at /no/such/model"), ("", "no checkpoint")],
)
def test_unknown_models_are_named_in_one_sentence(name, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        load_checkpoint(name or tmp_path, tokens_per_step=BLOCK)


def test_a_gguf_file_is_read_without_the_bars_of_other_libraries(tmp_path, monkeypatch, capfd):
    import transformers
    from transformers import modeling_gguf_pytorch_utils as gguf

    def from_pretrained(source: Path, **options: object) -> list[int]:
        assert (source, options["gguf_file"]) == (tmp_path, "model.gguf")
        return list(gguf.tqdm([1, 2], desc="Converting"))

    monkeypatch.setattr(
        transformers, "AutoTokenizer", SimpleNamespace(from_pretrained=from_pretrained)
    )
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert read("AutoTokenizer", tmp_path / "model.gguf") == [1, 2]
    assert capfd.readouterr().err == ""


# Collectives between ranks move any object, sum in one order, and always end.

TIMEOUT_S = 10.0


class Running(Child):
    """Another rank, whose process is a thread here, and does not end."""

    def __init__(self, rank: int, pipe: Pipe) -> None:
        self.name, self.pipe = f"Rank {rank} (pid 7)", pipe
        self.process: Any = SimpleNamespace(kill=lambda: None)
        self._output, self._advice = 2, "Restart the engine."

    def wait(self, timeout_s: float) -> None:
        return


def make_ranks(size: int, *, timeout_s: float = TIMEOUT_S) -> list[Any]:
    """Return the leader and the followers of an engine, whose processes are threads here."""
    others, followers = [], []
    for rank in range(1, size):
        near, far = map(Pipe, socket.socketpair())
        others.append(Running(rank, near))
        followers.append(Ranks(rank, size, leader=far, timeout_s=timeout_s))
    return [Ranks(size=size, children=others, timeout_s=timeout_s), *followers]


def on_ranks(size: int, act: Callable[[Any], Any], *, timeout_s: float = TIMEOUT_S) -> list[Any]:
    """Return what `act` returns, or raises, on each of `size` ranks."""

    def run(ranks: Any) -> Any:
        try:
            return act(ranks)
        except KVRayError as error:
            if ranks.rank:
                ranks.fail(error)
            return error

    all_ranks = make_ranks(size, timeout_s=timeout_s)
    with ThreadPoolExecutor(size, thread_name_prefix="ThreadPoolExecutor") as threads:
        results = list(threads.map(run, all_ranks))
    all_ranks[0].leave()
    for follower in all_ranks[1:]:
        follower._leader.close()
    return results


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("length", [0, 200_000])
def test_objects_of_any_length_arrive_on_every_rank(size, length):
    def act(ranks: Any) -> Any:
        told = ranks.broadcast({"from": ranks.rank, "data": "x" * length})
        return told, ranks.allgather((ranks.rank, "y" * (length if ranks.rank == 1 else 1)))

    for told, gathered in on_ranks(size, act):
        assert told == {"from": 0, "data": "x" * length}
        assert gathered == [(rank, "y" * (length if rank == 1 else 1)) for rank in range(size)]


@pytest.mark.parametrize("size", [2, 4])
def test_sums_have_the_same_bits_on_every_rank_and_in_every_run(size):
    parts = [torch.randn(1, 16, 64) * 10.0**rank for rank in range(size)]
    in_order = functools.reduce(operator.add, parts)
    for _ in range(2):
        for total in on_ranks(size, lambda ranks: ranks.sum(parts[ranks.rank])):
            assert torch.equal(total, in_order)


def test_a_rank_that_fails_is_named_with_its_error_and_the_others_end_at_once(capfd):
    def act(ranks: Any) -> Any:
        try:
            if ranks.rank == 2:
                raise ConfigError("no such model")
            ranks.allgather(1)
        finally:
            if ranks.rank == 0:
                ranks.leave()

    started = time.monotonic()
    leader, follower, _ = on_ranks(3, act)
    assert isinstance(leader, ConfigError)
    assert str(leader) == "Rank 2 (pid 7) failed: no such model"
    assert isinstance(follower, KVRayError)
    assert "Restart the engine" in str(follower)
    assert "rank 2 ends: no such model" in capfd.readouterr().err
    assert time.monotonic() - started < TIMEOUT_S / 2


@pytest.mark.parametrize("idle", [0, 1])
def test_rank_that_does_nothing_fails_the_others_in_time(idle):
    has_failed = threading.Event()

    def act(ranks: Any) -> Any:
        ranks.meet(timeout_s=TIMEOUT_S)
        if ranks.rank == idle:
            return has_failed.wait(TIMEOUT_S)
        try:
            return ranks.broadcast(1) and ranks.allgather(1)
        finally:
            has_failed.set()

    results = on_ranks(2, act, timeout_s=0.5)
    assert isinstance(results[1 - idle], KVRayError)
    assert "in vain" in str(results[1 - idle])
    assert results[idle] is True


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_have_their_heads_of_the_kv_and_all_of_the_logits(size):
    """Two KV heads: with four ranks, two hold the same one."""
    tokens = make_prompt(BLOCK)
    one = BlockModel(TINY_CONFIG, make_random_weights(), tokens_per_step=BLOCK)
    whole, kvs = forward_block(one, None, tokens, 0)

    def act(ranks: Any) -> Any:
        weights = split_weights(TINY_CONFIG, make_random_weights(), ranks)
        model = BlockModel(TINY_CONFIG, weights, tokens_per_step=BLOCK, ranks=ranks)
        assert model.geometry.num_kv_heads == 1
        return forward_block(model, None, tokens, 0)

    results = on_ranks(size, act)
    for rank, (logits, own) in enumerate(results):
        assert torch.equal(logits, results[0][0])
        torch.testing.assert_close(logits, whole, rtol=1e-4, atol=1e-4)
        head = rank * 2 // size
        for pair, whole_pair in zip(own, kvs, strict=True):
            for one, all_heads in zip(pair, whole_pair, strict=True):
                torch.testing.assert_close(one[0, 0], all_heads[0, head], rtol=1e-4, atol=1e-4)


def test_ranks_that_cannot_share_a_model_evenly_are_refused():
    leader: Any = SimpleNamespace(rank=0, size=3)
    with pytest.raises(ConfigError, match="3 ranks cannot share 4 attention heads"):
        split_weights(TINY_CONFIG, make_random_weights(), leader)
