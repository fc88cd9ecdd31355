"""Notes on their way to the shard: of requests, of prompts, and of blocks' tokens."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvray.identity.block import BlockKey, split_keys
from kvray.identity.keys import chain_packed, pack
from kvray.node import BlockTokens, EngineLog, PromptCounts, PromptNotes, engine_log
from kvray.store.sizing.prompts import BLOCKS_MAX, KEYS_MAX, LIMIT_MAX, SampledPrompts
from kvray.trace.request_note import NOTES_MAX, RequestNote, unpack
from tests.examples import examples


def note(request_id: int, *, end: int = 0) -> RequestNote:
    return RequestNote(request_id, 1.0, 40, 4, 0, end, 9, "not_stored")


def reported(log: EngineLog) -> list[RequestNote]:
    """Return the requests of the next report."""
    return [unpack(one) for one in log.drain()["requests"]]


def noted(*numbers: int) -> EngineLog:
    log = EngineLog()
    for number in numbers:
        log.note(note(number))
    return log


def test_what_was_noted_is_taken_once_in_its_order_and_what_could_not_be_reported_first():
    log = noted(3, 1)
    assert [one.request_id for one in reported(log)] == [3, 1]
    log.note(note(2))
    log.give_back()
    assert [one.request_id for one in reported(log)] == [3, 1, 2]
    assert reported(log) == []


def test_a_request_that_is_asked_about_again_with_the_same_end_is_noted_once():
    log = noted(1, 1)
    log.note(note(1, end=4))
    assert [one.end for one in reported(log)] == [0, 4]


def test_notes_that_nobody_takes_are_bounded_and_the_latest_stay():
    log = noted(*range(2000))
    assert len(reported(log)) == NOTES_MAX
    log.give_back()
    taken = []
    while some := reported(log):
        taken += some
    assert [one.request_id for one in taken] == list(range(2000 - len(taken), 2000))


def test_a_number_that_no_frame_carries_costs_its_own_note_only():
    assert [one.request_id for one in reported(noted(1, 2**70, 2))] == [1, 2]


def keys(count: int, seed: int = 0) -> list[BlockKey]:
    return split_keys(np.random.default_rng(seed).bytes(32 * count))


def heard() -> PromptNotes:
    """Return notes for a shard that has said that it wants all."""
    notes = PromptNotes()
    notes.hear(LIMIT_MAX)
    return notes


def all_of(notes: PromptNotes) -> list[SampledPrompts]:
    """Return what each report has."""
    return list(iter(notes.take, None))


def test_nothing_is_looked_at_before_the_shard_has_said_what_it_wants():
    notes = PromptNotes()
    notes.note(keys(4), PromptCounts(130, 4))
    assert notes.take() is None
    notes.hear(None)
    assert notes.take() is None
    notes.hear(0)
    taken = notes.take()
    assert (len(taken.ages), taken.num_blocks) == (0, 4), "without a sampled key it is in the sums"
    assert notes.take() is None


def test_a_sample_has_the_keys_below_the_limit_and_the_sums_of_all():
    now, limit = [100.0], 2**63
    notes = PromptNotes(lambda: now[0])
    notes.hear(limit)
    first, second = keys(50, 1), keys(60, 2)
    notes.note(first, PromptCounts(1600, 45, 10, 20, 2, 5))
    now[0] += 2.5
    notes.note(second, PromptCounts(1920, 60, hit=99, disk=50, remote=70))
    taken = notes.take()

    def below(some: list[BlockKey]) -> list[int]:
        numbers = (int.from_bytes(key[:8], "little") for key in some)
        return [number for number in numbers if number <= limit]

    assert taken.keys.tolist() == below(first) + below(second)
    lengths = [len(below(some)) for some in (first, first[:45], first[:10], second, second, [])]
    assert taken.lengths.ravel().tolist() == lengths
    assert (taken.num_blocks, taken.num_own, taken.num_tokens) == (105, 10, 3520)
    assert (taken.num_hit, taken.num_disk) == (20 + 60, 2 + 50), "no more than it has"
    assert taken.num_remote == 5 + 10
    assert taken.ages.tolist() == [2.5, 0.0]


def test_of_a_very_long_prompt_the_first_blocks_are_looked_at():
    notes = heard()
    counts = PromptCounts(32 * (BLOCKS_MAX + 100), BLOCKS_MAX + 90)
    notes.note([keys(1)[0]] * (BLOCKS_MAX + 100), counts)
    taken = notes.take()
    assert taken.lengths.tolist() == [[BLOCKS_MAX, BLOCKS_MAX, 0]]
    assert taken.num_blocks == BLOCKS_MAX
    assert taken.num_tokens == 32 * (BLOCKS_MAX + 100), "the rest counts as never found"


def test_a_report_has_a_bound_and_the_next_one_has_the_rest():
    notes = heard()
    prompt = keys(10_000)
    for _ in range(5):
        notes.note(prompt, PromptCounts(320_000, len(prompt)))
    reports = all_of(notes)
    assert max(len(one.keys) for one in reports) <= KEYS_MAX
    assert sum(len(one.ages) for one in reports) == 5


def test_prompts_beyond_the_bound_are_lost_and_the_shard_is_told_once():
    notes = heard()
    prompt = keys(1000)
    for _ in range(1000):
        notes.note(prompt, PromptCounts(32_000, len(prompt)))
    reports = all_of(notes)
    seen = sum(one.num_blocks for one in reports) // 1000
    assert seen + sum(one.num_lost for one in reports) == 1000
    assert 100 < seen < 200
    notes.note(prompt, PromptCounts(32_000, len(prompt)))
    assert notes.take().num_lost == 0


SIZE = 4
SEED = bytes(32)


def prompt(*blocks: int) -> list[int]:
    return [block for block in blocks for _ in range(SIZE)]


def tell(tokens: BlockTokens, *blocks: int):
    """Note a prompt as a request does, and return its keys."""
    packed = pack(prompt(*blocks))
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


def asked() -> BlockTokens:
    tokens = BlockTokens()
    tokens.hear(1)
    return tokens


@pytest.mark.parametrize("publishes", [True, False])
def test_what_was_noted_before_the_shard_has_answered_is_told_if_it_publishes(publishes):
    tokens = BlockTokens()
    keys = tell(tokens, 1, 2)
    if not publishes:
        tokens.hear(None)
        tell(tokens, 1, 2)
    tokens.hear(7)
    assert set(told(tokens.take(SIZE))) == ({key[:8] for key in keys} if publishes else set())


def test_blocks_that_become_full_while_a_request_runs_are_told_with_their_parent():
    tokens = asked()
    keys = tell(tokens, 1, 2)
    packed = pack(prompt(3))
    keys += chain_packed(packed, tokens_per_block=SIZE, seed=keys[-1])
    tokens.note(keys, 2, packed)
    assert told(tokens.take(SIZE))[keys[2][:8]] == (keys[1][:8], (3,) * SIZE)


def test_what_could_not_be_told_is_told_again_with_the_next_prompt():
    tokens = asked()
    tell(tokens, 1, 2)
    tokens.take(SIZE)
    tokens.forget()
    keys = tell(tokens, 1, 2)
    assert set(told(tokens.take(SIZE))) == {key[:8] for key in keys}


def test_of_too_much_no_more_is_noted_until_some_is_taken(monkeypatch):
    monkeypatch.setattr(engine_log, "_TOKEN_BYTES_MAX", 40)
    tokens = asked()
    for at in range(10):
        tell(tokens, at, at + 100)
    assert len(told(tokens.take(SIZE))) == 4
    tell(tokens, 50)
    assert len(told(tokens.take(SIZE))) == 1


def test_a_long_prompt_of_many_tokens_is_told_in_frames(monkeypatch):
    monkeypatch.setattr(engine_log, "_FRAME_MAX", 64)
    tokens = asked()
    keys = tell(tokens, *range(2000))  # more than are packed as bytes
    found = {}
    while chains := tokens.take(SIZE):
        assert sum(len(chain.tokens) for chain in chains) <= 128
        found |= told(chains)
    assert list(found) == [key[:8] for key in keys]
    assert found[keys[1999][:8]] == (keys[1998][:8], (1999,) * SIZE)


@settings(max_examples=examples(100))
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=9), max_size=20),
    st.integers(1, 9),
    st.sampled_from([1, 2, 4]),
)
def test_whatever_prompts_come_each_block_is_told_with_parent_and_tokens_and_few_twice(
    prompts, every, stride
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_log, "_STRIDE", stride)
        tokens, keys, found = asked(), {}, {}
        for at, blocks in enumerate(prompts):
            parent = b""
            for key, block in zip(tell(tokens, *blocks), blocks, strict=True):
                keys[key[:8]] = parent, (block,) * SIZE
                parent = key[:8]
            if at % every == 0:
                chains = tokens.take(SIZE)
                for chain in chains:
                    assert len(told([chain]).keys() & found.keys()) < stride
                    found |= told([chain])
        found |= told(tokens.take(SIZE))
    assert found == keys
