"""The prompts of an engine: sampled by the shard's limit, bounded, none forgotten silently."""

import numpy as np

from kvray.identity.block import BlockKey, split_keys
from kvray.node import PromptNotes
from kvray.store.sizing.prompts import BLOCKS_MAX, KEYS_MAX, LIMIT_MAX


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def keys(count: int, seed: int = 0) -> list[BlockKey]:
    return split_keys(np.random.default_rng(seed).bytes(32 * count))


def number(key: BlockKey) -> int:
    return int.from_bytes(key[:8], "little")


def test_nothing_is_looked_at_before_the_shard_has_said_what_it_wants() -> None:
    notes = PromptNotes()
    notes.note(keys(4), 130, 4, 0)
    assert notes.take() is None
    notes.heard(None)
    assert notes.take() is None
    notes.heard(LIMIT_MAX)
    assert notes.take() is not None
    assert notes.take() is None


def test_a_sample_has_the_keys_below_the_limit_and_the_sums_of_all() -> None:
    clock = Clock()
    notes = PromptNotes(clock)
    first, second = keys(50, 1), keys(60, 2)
    limit = 2**63
    notes.heard(limit)
    notes.note(first, 1600, 45, 10)
    clock.now += 2.5
    notes.note(second, 1920, 60, 0)
    taken = notes.take()
    assert taken is not None
    below = [[number(key) for key in some if number(key) <= limit] for some in (first, second)]
    assert taken.keys.tolist() == below[0] + below[1]
    asked = sum(number(key) <= limit for key in first[:45])
    own = sum(number(key) <= limit for key in first[:10])
    assert taken.lengths.tolist() == [[len(below[0]), asked, own], [len(below[1])] * 2 + [0]]
    assert (taken.num_blocks, taken.num_own, taken.num_tokens) == (105, 10, 3520)
    assert taken.ages.tolist() == [2.5, 0.0]


def test_a_prompt_without_a_sampled_key_is_in_the_sums() -> None:
    notes = PromptNotes()
    notes.heard(0)
    notes.note(keys(10), 320, 10, 0)
    taken = notes.take()
    assert taken is not None
    assert (len(taken.ages), taken.num_blocks) == (0, 10)


def test_of_a_very_long_prompt_the_first_blocks_are_looked_at() -> None:
    notes = PromptNotes()
    notes.heard(LIMIT_MAX)
    notes.note([keys(1)[0]] * (BLOCKS_MAX + 100), 32 * (BLOCKS_MAX + 100), BLOCKS_MAX + 90, 0)
    taken = notes.take()
    assert taken is not None
    assert taken.lengths.tolist() == [[BLOCKS_MAX, BLOCKS_MAX, 0]]
    assert taken.num_blocks == BLOCKS_MAX
    assert taken.num_tokens == 32 * (BLOCKS_MAX + 100), "the rest counts as never found"


def test_a_report_has_a_bound_and_the_next_one_has_the_rest() -> None:
    notes = PromptNotes()
    notes.heard(LIMIT_MAX)
    prompt = keys(10_000)
    for _ in range(5):
        notes.note(prompt, 320_000, len(prompt), 0)
    counts = []
    while (taken := notes.take()) is not None:
        assert len(taken.keys) <= KEYS_MAX
        counts.append(len(taken.ages))
    assert sum(counts) == 5
    assert len(counts) > 1


def test_prompts_beyond_the_bound_are_lost_and_the_shard_is_told_once() -> None:
    notes = PromptNotes()
    notes.heard(LIMIT_MAX)
    prompt = keys(1000)
    for _ in range(1000):
        notes.note(prompt, 32_000, len(prompt), 0)
    seen, lost = 0, 0
    while (taken := notes.take()) is not None:
        seen += taken.num_blocks // 1000
        lost += taken.num_lost
    assert seen + lost == 1000
    assert 100 < seen < 200
    notes.note(prompt, 32_000, len(prompt), 0)
    after = notes.take()
    assert after is not None
    assert after.num_lost == 0
