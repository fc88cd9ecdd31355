"""The arithmetic of a step depends on its block's index alone."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvray.errors import ConfigError
from kvray.reference.checkpoint import load_checkpoint
from kvray.reference.model import BlockModel, make_tiny_causal_lm
from kvray.reference.tokenizer import read
from tests.engine.conftest import BLOCK, forward_block, make_prompt
from tests.tiny_checkpoint import write_tiny_checkpoint

TOKENS = make_prompt(5 * BLOCK)


@pytest.fixture(scope="module")
def model() -> BlockModel:
    return BlockModel(make_tiny_causal_lm(), tokens_per_block=BLOCK)


def prefill(model: BlockModel, tokens: list[int]) -> tuple[torch.Tensor, list]:
    pasts, logits = None, torch.empty(0)
    for index in range(-(-len(tokens) // BLOCK)):
        logits, pasts = forward_block(
            model, pasts, tokens[index * BLOCK : (index + 1) * BLOCK], index
        )
    assert pasts is not None
    return logits, pasts


def test_kv_of_generated_tokens_equals_that_of_prompt_tokens_bit_for_bit(model: BlockModel) -> None:
    _, whole = prefill(model, TOKENS)
    pasts = None
    for index in range(5):
        rows: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
        for known in range(1, BLOCK + 1):
            tokens = TOKENS[index * BLOCK : index * BLOCK + known]
            _, kvs = forward_block(model, pasts, tokens, index)
            rows.append(kvs)
        at = [index * BLOCK + known for known in range(BLOCK)]
        for layer, (keys, values) in enumerate(whole):
            for known, position in enumerate(at):  # each row as its token was generated
                assert torch.equal(rows[known][layer][0][:, :, position], keys[:, :, position])
                assert torch.equal(rows[known][layer][1][:, :, position], values[:, :, position])
        pasts = rows[-1]


def test_rows_without_a_token_change_nothing(model: BlockModel) -> None:
    _, pasts = prefill(model, TOKENS[:BLOCK])
    short = TOKENS[BLOCK : BLOCK + 5]
    one, _ = forward_block(model, pasts, short, 1)
    step = model.begin(short, 1)
    with torch.inference_mode():
        step.hidden[:, 5:] = 1e6
    for layer in range(model.geometry.num_layers):
        model.layer(layer, step, pasts[layer])
    assert torch.equal(model.logits(step), one)


def test_steps_agree_with_the_model_run_at_once(model: BlockModel) -> None:
    with torch.inference_mode():
        reference = make_tiny_causal_lm()(torch.tensor([TOKENS]), use_cache=False).logits[0, -1]
    logits, _ = prefill(model, TOKENS)
    torch.testing.assert_close(logits, reference, rtol=1e-4, atol=1e-4)


def test_seeds_make_different_models_and_equal_seeds_equal_ones() -> None:
    first, same, other = (make_tiny_causal_lm(seed).model.embed_tokens.weight for seed in (1, 1, 2))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_checkpoint_on_disk_is_the_model_in_memory(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path / "tiny", seed=4)
    on_disk = load_checkpoint(path, tokens_per_block=BLOCK)
    in_memory = load_checkpoint("tiny:4", tokens_per_block=BLOCK)
    assert on_disk.name == str(path)
    assert torch.equal(prefill(on_disk.model, TOKENS)[0], prefill(in_memory.model, TOKENS)[0])
    text = "Grüße, 世界\n"
    assert on_disk.tokenizer.decode(on_disk.tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("name", "message"),
    [("tiny:x", "seed"), ("/no/such/model", "no model at /no/such/model")],
)
def test_unknown_models_are_named_in_one_sentence(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_checkpoint(name, tokens_per_block=BLOCK)


def test_directory_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no checkpoint"):
        load_checkpoint(tmp_path, tokens_per_block=BLOCK)


def test_a_gguf_file_is_read_without_the_bars_of_other_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
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
