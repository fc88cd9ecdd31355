"""An engine that drafts by n-grams, with the connector: its answers are those of plain decoding.

Pages of rejected drafts go to other requests, and hold NaN in between.
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvray.actors.shard.shard import Shard
from kvray.reference.engine import ReferenceEngine
from tests.engine.test_drafts import choose_at_random, draft_from, write_weak_model

BLOCK = 8
NEW_TOKENS = 24
CONNECTOR = {
    "connector_module": "kvray.connector",
    "connector_scheduler_class": "KvRayScheduler",
    "connector_worker_class": "KvRayWorker",
}
MakeEngine = Callable[..., ReferenceEngine]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose weak attention has answers run in circles for a while."""
    return write_weak_model(tmp_path_factory.mktemp("model"), 0)


@pytest.fixture
def make_engine(shard: Shard, model: Path) -> Iterator[MakeEngine]:
    """Make engines that end with the test."""
    made: list[ReferenceEngine] = []

    def make(**options: Any) -> ReferenceEngine:
        options = {"num_blocks": 64, "poison": True, "num_threads": 1, **options}
        made.append(ReferenceEngine(model, tokens_per_block=BLOCK, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def prompts() -> list[list[int]]:
    """Return prompts that repeat themselves."""
    random_ = random.Random(5)
    phrases = [[random_.randrange(3, 250) for _ in range(7)] for _ in range(6)]
    return [phrase * 5 + phrase[:3] for phrase in phrases]


@pytest.mark.parametrize("chunked", [False, True])
def test_answers_and_what_others_load_of_them_are_those_of_plain_decoding(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, chunked: bool
) -> None:
    alone, asked = make_engine(enable_block_reuse=False), prompts()
    expected = [alone.generate(prompt, max_tokens=NEW_TOKENS).token_ids for prompt in asked]
    texts = [[*prompt, *answer] for prompt, answer in zip(asked, expected, strict=True)]
    turns = [[*text, 9, 8, 7] for text in texts]
    again = [alone.generate(turn, max_tokens=NEW_TOKENS).token_ids for turn in turns]
    texts += [[*turn, *answer] for turn, answer in zip(turns, again, strict=True)]
    # Some of what follows, and then something else: blocks are taken back all the time.
    draft_from(monkeypatch, [[*text, *[1] * 9] for text in texts], choose_at_random)
    drafting = make_engine(connector=CONNECTOR, max_draft_len=9, enable_chunked_prefill=chunked)
    outputs = drafting.generate(asked, max_tokens=NEW_TOKENS)
    assert [one.token_ids for one in outputs] == expected
    assert sum(one.accepted_tokens for one in outputs) > 0
    assert sum(one.accepted_tokens for one in outputs) < sum(one.drafted_tokens for one in outputs)
    drafting.close()
    for options in ({"max_draft_len": 9}, {}):
        other = make_engine(connector=CONNECTOR, **options)
        loaded = other.generate(turns, max_tokens=NEW_TOKENS)
        assert [one.token_ids for one in loaded] == again
        assert all(one.hit_tokens >= len(asked[0]) // BLOCK * BLOCK for one in loaded)
        other.close()
