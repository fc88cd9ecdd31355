"""What an engine tells of its blocks' tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvray.identity.keys import chain_packed, pack
from kvray.node import BlockTokens, block_tokens

SIZE = 4
SEED = bytes(32)


def prompt(*blocks: int, tail: int = 0) -> list[int]:
    return [block for block in blocks for _ in range(SIZE)] + [0] * tail


def note(tokens: BlockTokens, *blocks: int, tail: int = 0):
    """Note a prompt as a request does, and return its keys."""
    packed = pack(prompt(*blocks, tail=tail))
    keys = chain_packed(packed, tokens_per_block=SIZE, seed=SEED)
    tokens.note(keys, 0, packed)
    return keys


def told(chains) -> dict[bytes, tuple[bytes, tuple[int, ...]]]:
    """Return hash -> parent and tokens."""
    found = {}
    for before, hashes, tokens in chains:
        parent = before
        assert len(tokens) == SIZE * 4 * len(hashes) // 8
        for at in range(0, len(hashes), 8):
            ids = np.frombuffer(tokens, "<u4")[at // 8 * SIZE : (at // 8 + 1) * SIZE]
            found[hashes[at : at + 8]] = parent, tuple(ids.tolist())
            parent = hashes[at : at + 8]
    return found


def asked(generation: int = 1) -> BlockTokens:
    tokens = BlockTokens()
    tokens.hear(generation)
    return tokens


def test_nothing_is_noted_for_a_shard_that_publishes_nothing():
    tokens = BlockTokens()
    note(tokens, 1, 2)
    tokens.hear(None)
    note(tokens, 1, 2)
    tokens.hear(7)
    assert tokens.take(SIZE) == []


def test_what_was_noted_before_the_shard_has_answered_is_told():
    tokens = BlockTokens()
    keys = note(tokens, 1, 2)
    tokens.hear(7)
    assert set(told(tokens.take(SIZE))) == {key[:8] for key in keys}


def test_a_prompt_is_told_with_parents_and_tokens():
    tokens = asked()
    first, second = note(tokens, 5, 6, tail=2)
    assert told(tokens.take(SIZE)) == {
        first[:8]: (b"", (5,) * SIZE),
        second[:8]: (first[:8], (6,) * SIZE),
    }
    assert tokens.take(SIZE) == []


def test_only_what_was_not_told_is_told(monkeypatch):
    monkeypatch.setattr(block_tokens, "_STRIDE", 1)
    tokens = asked()
    note(tokens, 1, 2, 3)
    tokens.take(SIZE)
    keys = note(tokens, 1, 2, 3, 4)
    other = note(tokens, 1, 9)
    note(tokens, 1, 2)

    assert told(tokens.take(SIZE)) == {
        keys[3][:8]: (keys[2][:8], (4,) * SIZE),
        other[1][:8]: (keys[0][:8], (9,) * SIZE),
    }


def test_blocks_that_become_full_while_a_request_runs_are_told_with_their_parent():
    tokens = asked()
    keys = note(tokens, 1, 2)
    packed = pack(prompt(3))
    keys += chain_packed(packed, tokens_per_block=SIZE, seed=keys[-1])
    tokens.note(keys, 2, packed)
    assert told(tokens.take(SIZE))[keys[2][:8]] == (keys[1][:8], (3,) * SIZE)


def test_another_generation_has_everything_told_again():
    tokens = asked()
    note(tokens, 1, 2)
    tokens.take(SIZE)
    tokens.hear(2)
    keys = note(tokens, 1, 2)
    assert set(told(tokens.take(SIZE))) == {key[:8] for key in keys}


def test_what_could_not_be_told_is_told_with_the_next_prompt():
    tokens = asked()
    note(tokens, 1, 2)
    tokens.take(SIZE)
    tokens.forget()
    keys = note(tokens, 1, 2)
    assert set(told(tokens.take(SIZE))) == {key[:8] for key in keys}


def test_of_too_much_no_more_is_noted_until_some_is_taken(monkeypatch):
    monkeypatch.setattr(block_tokens, "_TOKEN_BYTES_MAX", 40)
    tokens = asked()
    for at in range(10):
        note(tokens, at, at + 100)
    assert len(told(tokens.take(SIZE))) == 4
    note(tokens, 50)
    assert len(told(tokens.take(SIZE))) == 1


def test_a_long_prompt_of_many_tokens_is_told_in_frames(monkeypatch):
    monkeypatch.setattr(block_tokens, "_FRAME_MAX", 64)
    tokens = asked()
    keys = note(tokens, *range(2000))  # more than are packed as bytes
    found = {}
    while chains := tokens.take(SIZE):
        assert sum(len(chain.tokens) for chain in chains) <= 128
        found |= told(chains)
    assert list(found) == [key[:8] for key in keys]
    assert found[keys[1999][:8]] == (keys[1998][:8], (1999,) * SIZE)


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=9), max_size=20),
    st.integers(1, 9),
    st.sampled_from([1, 2, 4]),
)
def test_whatever_prompts_come_each_block_is_told_and_few_twice(prompts, every, stride):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_tokens, "_STRIDE", stride)
        tokens, keys, found = asked(), {}, {}
        for at, blocks in enumerate(prompts):
            for key, block in zip(note(tokens, *blocks), blocks, strict=True):
                keys[key[:8]] = block
            if at % every == 0:
                chains = tokens.take(SIZE)
                for chain in chains:
                    assert len(told([chain]).keys() & found.keys()) < stride
                    found |= told([chain])
        found |= told(tokens.take(SIZE))
    assert {hash_: ids[0] for hash_, (_, ids) in found.items()} == keys
