"""Reference engines with 1, 2 and 4 ranks answer from what the others have computed.

What rank 0 has loaded is held, byte for byte, against the same heads of what was stored.
"""

from pathlib import Path

import pytest
import torch

from kvray.actors.shard.shard import Shard
from kvray.reference.engine import ReferenceEngine
from kvray.reference.model import TINY_CONFIG
from kvray.reference.tokenizer import import_transformers
from tests.unit.connector.test_drafting_engine import CONNECTOR

BLOCK = 8
HEADS = 4
PROMPT = [3 + (7 * index * index) % 490 for index in range(60)]
WHOLE = 56


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of which 4 ranks have a KV head each."""
    transformers = import_transformers()
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**TINY_CONFIG | {"num_key_value_heads": HEADS})
    directory = tmp_path_factory.mktemp("model")
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def heads_of(engine: ReferenceEngine, size: int) -> torch.Tensor:
    """Return what rank 0 has of the prompt: [blocks, layers, 2, heads, elements of a head]."""
    pool = engine.cache.get_unique_primary_pool()
    ids = engine.cache._blocks.match(PROMPT, namespace=None, allow_partial=False).block_ids
    assert len(ids) == WHOLE // BLOCK
    return pool[list(ids)].view(len(ids), pool.shape[1], 2, HEADS // size, -1).clone()


@pytest.mark.long
def test_ranks_load_their_heads_of_what_any_number_of_ranks_has_stored(
    shard: Shard, model: Path
) -> None:
    answers, stored = [], {}
    for stored_by in (1, 2, 4):
        shard.clear(10)
        for size in (stored_by, 1, 2, 4):
            with ReferenceEngine(
                model,
                tokens_per_block=BLOCK,
                num_blocks=32,
                connector=CONNECTOR,
                poison=True,
                num_threads=1,
                tensor_parallel_size=size,
            ) as engine:
                (output,) = engine.generate([PROMPT], max_tokens=8)
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
