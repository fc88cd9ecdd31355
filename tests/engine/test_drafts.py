"""Drafts change how soon tokens come, and neither the answer nor the KV of its full blocks."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from kvray.errors import ConfigError
from kvray.reference.engine import ReferenceEngine
from kvray.reference.executor import find_drafts
from kvray.reference.model import TINY_CONFIG, make_random_weights
from kvray.reference.output import Output
from kvray.reference.request import LlmRequest
from tests.engine import conftest, fake_connector
from tests.engine.conftest import make_prompt
from tests.engine.fake_connector import CONFIG
from tests.tiny_checkpoint import save_checkpoint

BLOCK = 8  # so small that drafts often cross into the next block
MAX_TOKENS = 40
PROMPTS = [
    make_prompt(30),
    make_prompt(41, seed=1),
    make_prompt(5, seed=2) * 9,
    [7] * 24,
    [8] * 33,
    make_prompt(3, seed=4) * 5,
    [9],
    make_prompt(16, seed=5) * 2,
]
FEWEST_BLOCKS = 12  # of the longest prompt, its answer and 5 drafts
SEEDS = range(3)


Ends = dict[int, tuple[list[int], torch.Tensor]]
"""By request id: its blocks at its end, and the KV of those whose tokens are all computed."""


class Plain(NamedTuple):
    """What comes of the prompts without drafts."""

    outputs: list[Output]
    ends: Ends

    @property
    def texts(self) -> list[list[int]]:
        """Each prompt and its answer, as one list of tokens."""
        pairs = zip(PROMPTS, self.outputs, strict=True)
        return [[*prompt, *output.token_ids] for prompt, output in pairs]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return tiny models whose weak attention lets answers run in circles for a while."""
    made = [tmp_path_factory.mktemp("models") for _ in SEEDS]
    for seed, directory in zip(SEEDS, made, strict=True):
        weights = make_random_weights(seed)
        for name, weight in weights.items():
            if "o_proj" in name:
                weight.mul_(0.03)
        save_checkpoint(TINY_CONFIG, weights, directory)
    return made


def start(model: Path, max_draft_len: int = 0, **options: Any) -> ReferenceEngine:
    defaults = {"tokens_per_block": BLOCK, "num_blocks": 3 * FEWEST_BLOCKS, "num_threads": 1}
    return conftest.start(model, max_draft_len=max_draft_len, **{**defaults, **options})


@pytest.fixture(scope="module")
def plain(models: list[Path]) -> list[Plain]:
    """Return what each model answers without drafts, reuse or batch."""
    all_plain = []
    for model in models:
        fake_connector.reset()
        with start(model, connector=CONFIG, enable_block_reuse=False, max_batch_size=1) as engine:
            ends = watch_ends(engine)
            outputs = engine.generate(PROMPTS, max_tokens=MAX_TOKENS)
        all_plain.append(Plain(outputs, ends))
    return all_plain


def watch_ends(engine: ReferenceEngine) -> Ends:
    """Return a record, by request id, of what `request_finished` finds in the pool."""
    assert engine.connector is not None
    scheduler: Any = engine.connector.scheduler
    request_finished = scheduler.request_finished
    ends: Ends = {}

    def watch(request: LlmRequest, block_ids: list[int]) -> bool:
        full = block_ids[: (len(request.get_tokens(0)) - 1) // BLOCK]
        kv = engine.cache.get_unique_primary_pool()[full].clone()
        ends[request.request_id] = list(block_ids), kv
        is_saving: bool = request_finished(request, block_ids)
        return is_saving

    scheduler.request_finished = watch
    return ends


def draft_from(
    monkeypatch: pytest.MonkeyPatch,
    texts: list[list[int]],
    choose: Callable[[int, random.Random], tuple[int, int]],
) -> None:
    """Let the engine draft what really follows, with as many tokens, and right ones, as chosen."""

    def find(tokens: Sequence[int], *, max_draft_len: int) -> list[int]:
        count, num_right = choose(max_draft_len, random.Random(sum(tokens)))
        text = next(text for text in texts if text[: len(tokens)] == list(tokens))
        follows = [*text[len(tokens) :], *[0] * count][:count]
        return [*follows[:num_right], *((token + 1) % 512 for token in follows[num_right:])]

    monkeypatch.setattr("kvray.reference.executor.find_drafts", find)


def choose_at_random(max_draft_len: int, chance: random.Random) -> tuple[int, int]:
    count = chance.randint(0, max_draft_len)
    return count, chance.randint(0, count)


def answers(outputs: list[Output]) -> list[tuple[tuple[int, ...], str]]:
    return [(output.token_ids, output.finish_reason) for output in outputs]


@pytest.mark.parametrize(
    ("tokens", "drafts"),
    [
        ([1, 2, 3, 4, 5, 6, 1, 2, 3], [4, 5, 6, 1]),
        ([5, 2, 3, 7, 8, 2, 3, 9, 9, 2, 3], [9, 9, 2, 3]),  # the latest occurrence
        ([1, 2, 3, 7, 8, 2, 3, 9, 1, 2, 3], [7, 8, 2, 3]),  # but rather one of three tokens
        ([6, 4, 4, 4], [4, 4, 4, 4]),
        ([1, 2, 1, 2], [1, 2, 1, 2]),
        ([1, 2, 3, 1], []),
        ([1], []),
    ],
)
def test_drafts_go_on_as_the_last_tokens_did_before(tokens, drafts):
    assert find_drafts(tokens, max_draft_len=4) == drafts


@pytest.mark.parametrize("max_draft_len", [1, 2, 3, 4, 5])
def test_answers_are_those_without_drafts(models, plain, max_draft_len):
    seed = max_draft_len % len(SEEDS)
    with start(models[seed], max_draft_len) as engine:
        outputs = engine.generate(PROMPTS, max_tokens=MAX_TOKENS)
        assert engine.cache.get_num_free_blocks() == 3 * FEWEST_BLOCKS
    assert answers(outputs) == answers(plain[seed].outputs)
    num_accepted = sum(output.accepted_tokens for output in outputs)
    assert 0 < num_accepted < sum(output.drafted_tokens for output in outputs)


VARIANTS: list[dict[str, Any]] = [
    {},
    {"num_blocks": FEWEST_BLOCKS},
    {"enable_chunked_prefill": True, "chunk_tokens": 2 * BLOCK},
    {"enable_partial_reuse": True, "num_blocks": 2 * FEWEST_BLOCKS},
    {"enable_block_reuse": False, "num_blocks": 6 * FEWEST_BLOCKS},
    {"max_draft_len": 2 * BLOCK + 1, "num_blocks": 4 * FEWEST_BLOCKS},
]


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_rewinds_change_neither_answers_nor_full_blocks_and_leave_ids_untold(
    models, plain, fake, monkeypatch, options
):
    seed = VARIANTS.index(options) % len(SEEDS)
    draft_from(monkeypatch, plain[seed].texts, choose_at_random)
    with start(models[seed], **{"connector": CONFIG, "max_draft_len": 5, **options}) as engine:
        ends = watch_ends(engine)
        outputs = engine.generate(PROMPTS, max_tokens=MAX_TOKENS)
    assert answers(outputs) == answers(plain[seed].outputs)
    assert all(0 < output.accepted_tokens < output.drafted_tokens for output in outputs)
    for request_id, (_, kv) in plain[seed].ends.items():
        assert torch.equal(ends[request_id][1], kv)
    # Some told ids are untrue at the end, and none of the blocks of a prompt.
    told: dict[int, list[int]] = {}
    for data in fake.reported():
        told.setdefault(data.request_id, []).extend(data.new_block_ids)
    untrue = [
        (request_id, index)
        for request_id, (block_ids, _) in ends.items()
        for index, block_id in enumerate(block_ids)
        if told[request_id][index] != block_id
    ]
    assert untrue
    assert all(index * BLOCK >= len(PROMPTS[number - 1]) for number, index in untrue)


def test_report_counts_drafts_as_scheduled_and_tells_accepted_tokens_alone(
    models, plain, fake, monkeypatch
):
    choices = iter([(5, 0), (0, 0), (5, 5)])
    draft_from(monkeypatch, plain[0].texts, lambda *_: next(choices))
    with start(models[0], 5, connector=CONFIG) as engine:
        ends = watch_ends(engine)
        output = engine.generate(PROMPTS[0], max_tokens=9)
    tokens = list(plain[0].outputs[0].token_ids)
    assert list(output.token_ids) == tokens[:9]
    assert (output.drafted_tokens, output.accepted_tokens) == (10, 5)
    assert (
        fake.reports()
        == [
            (PROMPTS[0], 4, 0, 30),
            (tokens[:1], 1, 30, 6),
            (tokens[1:2], 0, 31, 1),  # the fifth block has been taken back
            (tokens[2:3], 0, 32, 6),  # and another one in its place is not told
        ]
    )
    assert fake.outputs[1].cached_requests[0].new_block_ids != ends[1][0][4:]


@pytest.mark.parametrize("num_tokens", [2, 4, 6, 7])
def test_answer_ends_inside_an_accepted_run_where_it_ends_without_drafts(
    models, plain, monkeypatch, num_tokens
):
    draft_from(monkeypatch, plain[0].texts, lambda longest, _: (longest, longest))
    tokens = plain[0].outputs[0].token_ids
    assert tokens[num_tokens - 1] not in tokens[: num_tokens - 1]
    with start(models[0], 5) as engine:
        output = engine.generate(PROMPTS[0], max_tokens=num_tokens)
        assert answers([output]) == [(tokens[:num_tokens], "length")]
        engine.tokenizer.end_ids = frozenset({tokens[num_tokens - 1]})
        output = engine.generate(PROMPTS[0], max_tokens=MAX_TOKENS)
        assert answers([output]) == [(tokens[:num_tokens], "stop")]
        # The prompt's pass sampled the first token, and the last of seven comes after the drafts.
        assert output.accepted_tokens == min(num_tokens - 1, 5)
        assert engine.cache.get_num_free_blocks() == 3 * FEWEST_BLOCKS


def test_prompt_that_continues_an_answer_reuses_its_blocks(models, plain, monkeypatch):
    draft_from(monkeypatch, plain[0].texts, choose_at_random)
    text = plain[0].texts[0]
    with start(models[0], 5) as engine:
        engine.generate(PROMPTS[0], max_tokens=20)
        output = engine.generate(text[:50], max_tokens=20)
    assert output.reused_tokens == 48
    assert list(output.token_ids) == text[50:70]


def test_ranks_that_share_the_model_draft_alike(models, plain):
    with start(models[0], 3, tensor_parallel_size=2) as engine:
        outputs = engine.generate(PROMPTS[3:5], max_tokens=MAX_TOKENS)
    assert answers(outputs) == answers(plain[0].outputs[3:5])
    assert all(0 < output.accepted_tokens < output.drafted_tokens for output in outputs)


def test_connector_is_told_of_drafts_for_which_a_prompt_must_leave_room(models):
    with start(models[0], 5, num_blocks=2) as engine:
        told = engine.llm_args.speculative_config
        assert (told.decoding_type, told.max_draft_len) == ("NGram", 5)
        engine.generate([1] * 8, max_tokens=3)
        with pytest.raises(ConfigError, match="8 tokens and 9 more, 5 of them drafts, do not fit"):
            engine.submit([1] * 8, max_tokens=4)
