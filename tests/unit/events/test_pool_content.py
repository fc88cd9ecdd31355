"""The blocks of a publisher, found by the tokens of a prompt."""

from collections.abc import Sequence

import pytest

from kvray.events import AllBlocksCleared, Batch, BlockRemoved, BlockStored, Event
from kvray.events.pool_content import PoolContent, chain_digests
from tests.unit.events.publisher import packed

BLOCK = 4
PROMPT = [*range(100, 116)]


def stored(
    hashes: Sequence[int | bytes],
    tokens: Sequence[int],
    parent: int | bytes | None = None,
    **more: object,
) -> BlockStored:
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=parent,
        token_ids=tokens,
        block_size=BLOCK,
        **more,  # type: ignore[arg-type]
    )


def content(*events: Event, blocks_max: int = 100, dp_rank: int | None = None) -> PoolContent:
    made = PoolContent(blocks_max=blocks_max)
    made.apply(Batch(at=0.0, events=events, dp_rank=dp_rank))
    return made


def leading(made: PoolContent, tokens: list[int] = PROMPT, salt: str | None = None) -> int:
    digests = {BLOCK: chain_digests(packed(tokens), block_size=BLOCK, salt=salt)}
    return made.num_tokens(digests) // BLOCK


def test_a_prompt_finds_its_leading_blocks_over_several_events() -> None:
    made = content(stored([1, 2], PROMPT[:8]), stored([b"\3"], PROMPT[8:12], parent=2))
    assert leading(made) == 3
    assert leading(made, PROMPT[:7]) == 1
    assert leading(made, [0, *PROMPT]) == 0
    assert made.block_sizes == {BLOCK}


def test_a_removed_block_and_all_behind_it_are_not_found() -> None:
    made = content(stored([1, 2, 3], PROMPT[:12]), BlockRemoved(block_hashes=[3, 99]))
    assert leading(made) == 2
    assert len(made) == 2


def test_a_block_counts_while_a_fast_medium_has_it() -> None:
    gpu = stored([1], PROMPT[:4], medium="GPU")
    made = content(gpu, stored([1], PROMPT[:4], medium="CPU"), BlockRemoved(block_hashes=[1]))
    assert leading(made) == 1
    made.apply(Batch(at=1.0, events=[stored([1], PROMPT[:4], medium="STORAGE")]))
    made.apply(Batch(at=2.0, events=[BlockRemoved(block_hashes=[1], medium="CPU")]))
    assert (leading(made), len(made)) == (0, 1)


def test_ranks_have_blocks_of_their_own() -> None:
    made = content(stored([1], PROMPT[:4]), dp_rank=0)
    made.apply(Batch(at=0.0, events=[stored([1], PROMPT[:4])], dp_rank=1))
    made.apply(Batch(at=0.0, events=[BlockRemoved(block_hashes=[1])], dp_rank=0))
    assert leading(made) == 1


@pytest.mark.parametrize(
    "marks", [{"lora_name": "a"}, {"lora_id": 3}, {"extra_keys": [("salt",), None]}]
)
def test_blocks_of_an_adapter_or_a_salt_are_no_block_of_a_plain_prompt(
    marks: dict[str, object],
) -> None:
    assert leading(content(stored([1, 2], PROMPT[:8], **marks))) == 0


def test_a_salted_prompt_finds_blocks_of_its_salt_only() -> None:
    made = content(stored([1, 2], PROMPT[:8], extra_keys=[("salt",), None]))
    assert leading(made, salt="salt") == 2
    assert leading(made, salt="other") == 0


def test_blocks_behind_an_unknown_one_are_passed_over() -> None:
    made = content(stored([5], PROMPT[4:8], parent=4))
    assert len(made) == 0


def test_a_cleared_pool_is_known_to_be_empty() -> None:
    made = content(stored([1], PROMPT[:4]), AllBlocksCleared())
    assert (len(made), made.is_whole, made.digests) == (0, True, frozenset())


def test_of_too_many_blocks_the_oldest_are_forgotten() -> None:
    made = content(AllBlocksCleared(), blocks_max=50)
    for number in range(200):
        assert made.is_whole == (number <= 50)
        tokens = [number, 0, 0, 0]
        made.apply(Batch(at=0.0, events=[stored([number], tokens)]))
    assert len(made) == len(made.digests) == 50
    assert leading(made, [199, 0, 0, 0]) == 1
    assert leading(made, [149, 0, 0, 0]) == 0


FULL, WINDOW, STATE = "full_attention", "sliding_window", "mamba"
TOKENS = [*range(200, 240)]


def of_group(
    group: int | None, kind: str | None, *, size: int = BLOCK, blocks: int = 10, **more: object
) -> BlockStored:
    """Return a store of the first blocks of a prompt, as vLLM sends one for each cache group."""
    return BlockStored(
        block_hashes=[1000 + at for at in range(blocks)],
        token_ids=TOKENS[: size * blocks],
        block_size=size,
        group_idx=group,
        kv_cache_spec_kind=kind,
        **more,  # type: ignore[arg-type]
    )


def held(made: PoolContent) -> int:
    """Return how many of 40 tokens a router believes to be there."""
    sizes = made.block_sizes
    chains = {size: chain_digests(packed(TOKENS), block_size=size) for size in sizes}
    return made.num_tokens(chains)


def sparse(kind: str, *resident: int) -> BlockStored:
    """Return a store that names all tokens of a prompt and the hashes that are resident."""
    return BlockStored(
        block_hashes=[1000 + at for at in resident],
        token_ids=TOKENS,
        block_size=BLOCK,
        group_idx=1,
        kv_cache_spec_kind=kind,
    )


@pytest.mark.parametrize("others_first", [True, False])
@pytest.mark.parametrize(
    "other",
    [
        sparse(WINDOW, 8, 9),
        sparse("sliding_window_mla", 8, 9),
        sparse("chunked_local_attention", 0, 1),
        sparse("something_new", 0, 1),
        sparse("unknown", 0, 1),
        of_group(1, STATE, size=20, blocks=2),
        of_group(1, "cross_attention", size=8, blocks=5),
    ],
)
def test_of_a_hybrid_model_only_full_attention_counts(
    other: BlockStored, others_first: bool
) -> None:
    full = of_group(0, FULL)
    assert held(content(*([other, full] if others_first else [full, other]))) == 40
    assert held(content(other)) == 0


@pytest.mark.parametrize("kind", [None, FULL, "mla_attention", "sink_full_attention"])
def test_kinds_that_every_prompt_begins_with_count(kind: str | None) -> None:
    assert held(content(of_group(0, kind))) == 40


def test_of_a_group_of_unsaid_kind_that_names_other_tokens_nothing_counts() -> None:
    assert held(content(BlockStored(block_hashes=[1, 2], token_ids=TOKENS, block_size=BLOCK))) == 0


def test_a_prompt_is_there_as_far_as_every_full_group_has_it() -> None:
    made = content(of_group(0, FULL), of_group(1, FULL, size=8, blocks=5))
    assert made.block_sizes == {4, 8}
    assert held(made) == 40
    made.apply(Batch(at=0.0, events=[BlockRemoved(block_hashes=[1003, 1004], group_idx=1)]))
    assert held(made) == 24
    made.apply(Batch(at=0.0, events=[BlockRemoved(block_hashes=range(1003, 1010), group_idx=0)]))
    assert held(made) == 12


def test_a_window_that_moves_on_takes_nothing_from_the_full_group() -> None:
    made = content(of_group(0, FULL), of_group(1, WINDOW))
    made.apply(Batch(at=0.0, events=[BlockRemoved(block_hashes=range(1000, 1008), group_idx=1)]))
    assert held(made) == 40


def test_blocks_in_memory_far_away_do_not_count() -> None:
    assert held(content(of_group(0, FULL, medium="CPU", locality="REMOTE"))) == 0
    assert held(content(of_group(0, FULL, medium="CPU", locality="LOCAL"))) == 40


def test_groups_without_end_are_not_kept() -> None:
    made = content(AllBlocksCleared(), *(of_group(at, FULL, blocks=1) for at in range(1000)))
    assert len(made) < 100
    assert not made.is_whole
