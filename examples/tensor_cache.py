"""Two processes with a plain Hugging Face model share the KV of a prompt, without an engine.

The first computes the prompt's `past_key_values` and stores them by their tokens; the second
retrieves them, computes what is left and says the same. Neither of them imports ray.

    python examples/tensor_cache.py
    python examples/tensor_cache.py --model ~/models/Llama-3.2-1B
"""

import argparse
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaConfig

from kvray import TensorCache
from kvray.config import KVRayConfig, load_config
from kvray.tensor_cache import KV, TensorMetadata

TEXT = "The harbour master writes down every ship, every crane and every delay. " * 20
TINY = LlamaConfig(vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=4)


class Answer(NamedTuple):
    """What a process found in the tier, and what its model said."""

    prompt_tokens: int
    hit_tokens: int
    prefill_s: float
    tokens: list[int]


def load(path: str | None) -> tuple[Any, list[int]]:
    """Return a model and a prompt of its tokens: a tiny random one without a path."""
    if path is None:
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(TINY).eval(), list(TEXT.encode())
    tokens = AutoTokenizer.from_pretrained(path)(TEXT)["input_ids"]
    return AutoModelForCausalLM.from_pretrained(path).eval(), tokens


def metadata_of(model: Any, path: str | None) -> TensorMetadata:
    """Return what a cache has to know of a model."""
    config, heads = model.config, model.config.num_attention_heads
    return TensorMetadata(
        model=path or "tiny-llama",  # of a checkpoint the content counts, of a name the name
        dtype=model.dtype,
        num_layers=config.num_hidden_layers,
        num_kv_heads=config.num_key_value_heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
        layout="huggingface",
        tokens_per_block=32,
    )


def to_kv(past: DynamicCache) -> KV:
    """Return past_key_values without their batch dimension: [heads, tokens, head_size] each."""
    return [(layer.keys[0], layer.values[0]) for layer in past.layers]


def to_past(kv: KV) -> DynamicCache:
    """Return the past_key_values, of a batch of one, that `to_kv` makes `kv` of."""
    past = DynamicCache()
    for index, (keys, values) in enumerate(kv):
        past.update(keys[None], values[None], index)
    return past


@torch.inference_mode()
def answer(config: KVRayConfig, path: str | None) -> Answer:
    """Answer the prompt from what the tier has; runs in a process of its own."""
    model, prompt = load(path)
    with TensorCache(config, metadata_of(model, path)) as cache:
        began = time.perf_counter()
        # The last token is always computed: its logits are what the answer begins with.
        kv, found = cache.retrieve(prompt[:-1])
        past, hit_tokens = to_past(kv), int(found.sum())
        block = cache.metadata.tokens_per_block
        blocks_end = (len(prompt) - 1) // block * block
        if hit_tokens < blocks_end:
            model(torch.tensor([prompt[hit_tokens:blocks_end]]), past_key_values=past)
            cache.store(prompt[:blocks_end], to_kv(past))
        prefill_s = time.perf_counter() - began
    tokens, rest = [], prompt[blocks_end:]
    for _ in range(24):
        logits = model(torch.tensor([rest]), past_key_values=past).logits
        rest = [int(logits[0, -1].argmax())]
        tokens += rest
    return Answer(len(prompt), hit_tokens, prefill_s, tokens)


def main() -> None:
    """Ask two processes, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="path of a checkpoint (default: a tiny random model)")
    parser.add_argument("--config", type=Path, help="kvray.yaml (default: the one `kvray` takes)")
    args = parser.parse_args()
    config = load_config(args.config)

    from kvray.actors.tier.launch import local_tier  # here, so that the two processes import no ray

    spawn = multiprocessing.get_context("spawn")
    answers = []
    # The tier that runs under this configuration's name, else one for the time of the block.
    with local_tier(config):
        for name in ("first", "second"):
            with ProcessPoolExecutor(max_workers=1, mp_context=spawn) as process:
                one = process.submit(answer, config, args.model).result()
            print(
                f"{name} process: {one.hit_tokens} of {one.prompt_tokens} tokens from the tier,"
                f" the others in {one.prefill_s * 1000:.0f} ms"
            )
            answers.append(one)
    if answers[0].tokens != answers[1].tokens:
        raise SystemExit("The two answers differ.")
    print("Both said the same.")


if __name__ == "__main__":
    main()
