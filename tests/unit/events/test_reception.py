"""Whatever is lost, repeated or begun again: the content is the publisher's, and is found."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvray.events import AllBlocksCleared, Batch, BlockRemoved, BlockStored, Event
from kvray.events.pool_content import PoolContent, chain_digests
from kvray.events.reception import Reception
from tests.examples import examples
from tests.unit.events.publisher import Publisher, leading, packed

TOKENS = st.lists(st.integers(0, 3), min_size=2, max_size=6).map(
    lambda made: made[: len(made) & ~1]
)


def reception(*, can_replay: bool = True, pending_max: int = 8) -> Reception:
    content = PoolContent(blocks_max=10_000)
    return Reception(content, can_replay=can_replay, pending_max=pending_max, pending_bytes=2**20)


def ask(made: Reception, publisher: Publisher) -> int | None:
    """Ask for a replay if one is due, and take it; return the number that was asked for."""
    start = made.replay_from
    if start is not None:
        made.replay_begun()
        for number, payload in publisher.replay(start):
            made.replayed(number, payload)
        made.replay_over()
    return start


def catch_up(made: Reception, publisher: Publisher) -> None:
    for _ in range(8):
        if ask(made, publisher) is None:
            return
    raise AssertionError("it asks without end")


class ReceptionMachine(RuleBasedStateMachine):
    """A publisher, a connection that loses batches, and replays that break off."""

    @initialize(log_max=st.sampled_from([1, 3, 1000]), has_snapshot=st.booleans())
    def begin(self, log_max: int, has_snapshot: bool) -> None:
        self.options = {"log_max": log_max, "has_snapshot": has_snapshot}
        self.life = 0
        self.publisher = Publisher(log_max=log_max, has_snapshot=has_snapshot)
        self.reception = reception()
        self.under_way: list[tuple[int, bytes]] = []
        self.replay: list[tuple[int, bytes]] | None = None

    @rule(tokens=TOKENS, data=st.data())
    def store(self, tokens: list[int], data: st.DataObject) -> None:
        parents = [None, *self.publisher.blocks]
        parent = data.draw(st.sampled_from(parents))
        before = [] if parent is None else self.publisher.blocks[parent]
        held = [*self.publisher.blocks.values()]
        if not any(before + tokens[:end] in held for end in range(2, len(tokens) + 1, 2)):
            self.under_way.append(self.publisher.store(parent, tokens))

    @precondition(lambda self: self.publisher.blocks)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        """Remove a block that is nobody's parent."""
        chains = self.publisher.blocks
        leaves = [
            block
            for block, tokens in chains.items()
            if sum(other[: len(tokens)] == tokens for other in chains.values()) == 1
        ]
        self.under_way.append(self.publisher.remove(data.draw(st.sampled_from(leaves))))

    @rule()
    def clear(self) -> None:
        self.under_way.append(self.publisher.clear())

    @rule(survives=st.integers(0, 3))
    def restart(self, survives: int) -> None:
        """Begin again with nothing; some batches of before may still arrive."""
        for number, payload in self.under_way[:survives]:
            self.reception.live(number, payload)
        self.under_way.clear()
        self.replay = None if self.replay is None else self.replay[:survives]
        self.reception.interrupted()
        self.life += 1
        self.publisher = Publisher(**self.options, life=self.life)

    @precondition(lambda self: self.under_way)
    @rule(is_lost=st.booleans())
    def deliver(self, is_lost: bool) -> None:
        number, payload = self.under_way.pop(0)
        if not is_lost:
            self.reception.live(number, payload)

    @precondition(lambda self: self.replay is None)
    @rule()
    def begin_replay(self) -> None:
        start = self.reception.replay_from
        if start is not None:
            self.reception.replay_begun()
            self.replay = [*self.publisher.replay(start)]

    @precondition(lambda self: self.replay is not None)
    @rule(number=st.integers(0, 4))
    def take_some_of_the_replay(self, number: int) -> None:
        assert self.replay is not None
        for one, payload in self.replay[:number]:
            self.reception.replayed(one, payload)
        self.replay = self.replay[number:]
        if not self.replay:
            self.reception.replay_over()
            self.replay = None

    @precondition(lambda self: self.replay is not None)
    @rule()
    def break_the_replay_off(self) -> None:
        self.reception.replay_failed()
        self.replay = None

    @rule()
    def settle(self) -> None:
        """When all has come and the publisher was asked for its last, the content is its own."""
        if self.replay is not None:
            self.take_some_of_the_replay(1000)
        for number, payload in self.under_way:
            self.reception.live(number, payload)
        self.under_way.clear()
        self.reception.check()
        catch_up(self.reception, self.publisher)
        content = self.reception.content
        if self.options["has_snapshot"] or self.options["log_max"] == 1000 or content.is_whole:
            assert content.digests == self.publisher.digests
        else:
            assert content.digests <= self.publisher.digests

    @invariant()
    def waiting_is_bounded(self) -> None:
        assert len(self.reception._pending) <= 8


TestReception = ReceptionMachine.TestCase
TestReception.settings = settings(max_examples=examples(600), stateful_step_count=40, deadline=None)


def followed(log_max: int = 100) -> tuple[Publisher, Reception]:
    """Return a publisher, and a reception that has asked it for all."""
    publisher, made = Publisher(log_max=log_max, has_snapshot=False), reception()
    catch_up(made, publisher)
    return publisher, made


def test_batches_in_order_need_no_question_and_a_gap_is_filled_and_counted():
    publisher, made = followed()
    for _ in range(3):
        made.live(*publisher.store(None, [len(publisher.blocks), 1]))
    assert made.replay_from is None
    assert made.content.is_whole
    assert (made.num_applied, made.num_gaps, made.num_lost) == (3, 0, 0)
    publisher.store(None, [3, 4])
    made.live(*publisher.remove(1))
    assert made.replay_from is not None
    catch_up(made, publisher)
    assert made.content.digests == publisher.digests
    assert (made.num_gaps, made.num_lost) == (1, 0)


def test_what_the_log_no_longer_has_is_lost_and_an_unreadable_batch_is_not_all_that_is_known():
    publisher, made = followed(log_max=2)
    made.live(*publisher.store(None, [1, 2]))
    for token in range(4):
        last = publisher.store(None, [token, 7])
    made.live(*last)
    catch_up(made, publisher)
    assert not made.content.is_whole
    assert made.content.digests < publisher.digests
    assert made.num_lost == 1
    publisher, made = followed()
    made.live(*publisher.store(None, [1, 2]))
    publisher.number += 1
    made.live(1, b"\xc1")
    assert not made.content.is_whole
    made.live(*publisher.store(None, [5, 6]))
    assert len(made.content) == 2


def test_what_waits_for_a_replay_is_bounded_in_bytes():
    content = PoolContent(blocks_max=10)
    made = Reception(content, can_replay=True, pending_max=1000, pending_bytes=1000)
    made.replay_begun()
    for number in range(100):
        made.live(number, bytes(90))
    assert len(made._pending) == 11
    made.live(0, bytes(90))  # another publisher's
    for number in range(1, 100):
        made.live(number, bytes(90))
    assert len(made._pending) == 11


def test_a_publisher_without_replays_is_followed_from_where_it_is():
    publisher, made = Publisher(log_max=100, has_snapshot=False), reception(can_replay=False)
    assert made.replay_from is None
    publisher.store(None, [1, 2])
    made.live(*publisher.store(None, [3, 4]))
    assert (len(made.content), made.content.is_whole, made.num_lost) == (1, False, 0)
    publisher.store(None, [5, 6])
    made.live(*publisher.store(None, [7, 8]))
    assert (len(made.content), made.num_lost) == (1, 1), "the second may be gone since"
    again = Publisher(log_max=100, has_snapshot=False, life=1)
    made.interrupted()
    made.live(*again.store(None, [9, 9]))
    assert made.content.is_whole
    assert made.content.digests == again.digests


@pytest.mark.parametrize("failures", [3, 7])
def test_a_publisher_that_answers_no_question_is_followed_all_the_same(failures):
    publisher, made = Publisher(log_max=100, has_snapshot=False), reception()
    for _ in range(failures):
        made.live(*publisher.store(None, [publisher.number, 1]))
        if made.replay_from is not None:
            made.replay_begun()
            made.replay_failed()
    assert made.content.digests == publisher.digests


BLOCK = 4
PROMPT = [*range(100, 116)]
FIRST_TWO = [1, 2], PROMPT[:8]


def stored(hashes: Sequence[int | bytes], tokens: Sequence[int], **more: Any) -> BlockStored:
    return BlockStored(**{"block_hashes": hashes, "token_ids": tokens, "block_size": BLOCK, **more})


def content(*events: Event, blocks_max: int = 100) -> PoolContent:
    made = PoolContent(blocks_max=blocks_max)
    made.apply(Batch(at=0.0, events=events))
    return made


def test_a_prompt_finds_its_leading_blocks_over_several_events():
    later = stored([b"\3"], PROMPT[8:12], parent_block_hash=2)
    made = content(stored([1, 2], PROMPT[:8]), later)
    assert leading(made, PROMPT) == 3
    assert leading(made, PROMPT[:7]) == 1
    assert leading(made, [0, *PROMPT]) == 0
    assert made.block_sizes == {BLOCK}
    salted = content(stored(*FIRST_TWO, extra_keys=[("salt",), None]))
    assert [leading(salted, PROMPT, salt=one) for one in ("salt", "other")] == [2, 0]


@pytest.mark.parametrize(
    ("events", "found", "blocks"),
    [
        ([stored([1, 2, 3], PROMPT[:12]), BlockRemoved(block_hashes=[3, 99])], 2, 2),
        ([stored(*FIRST_TWO, lora_name="a")], 0, 2),
        ([stored(*FIRST_TWO, lora_id=3)], 0, 2),
        ([stored(*FIRST_TWO, extra_keys=[("salt",), None])], 0, 2),
        ([stored([5], PROMPT[4:8], parent_block_hash=4)], 0, 0),
    ],
    ids=["a removed one", "an adapter's", "likewise", "a salted one", "behind an unknown one"],
)
def test_a_plain_prompt_does_not_find(events, found, blocks):
    made = content(*events)
    assert (leading(made, PROMPT), len(made)) == (found, blocks)


def test_a_block_counts_while_a_fast_medium_of_some_rank_has_it():
    gpu = stored([1], PROMPT[:4], medium="GPU")
    made = content(gpu, stored([1], PROMPT[:4], medium="CPU"), BlockRemoved(block_hashes=[1]))
    assert leading(made, PROMPT) == 1
    made.apply(Batch(at=1.0, events=[stored([1], PROMPT[:4], medium="STORAGE")]))
    made.apply(Batch(at=2.0, events=[BlockRemoved(block_hashes=[1], medium="CPU")]))
    assert (leading(made, PROMPT), len(made)) == (0, 1)
    for rank in (0, 1):
        made.apply(Batch(at=3.0, events=[gpu], dp_rank=rank))
    made.apply(Batch(at=4.0, events=[BlockRemoved(block_hashes=[1])], dp_rank=0))
    assert leading(made, PROMPT) == 1


def test_of_too_many_blocks_the_oldest_are_forgotten_and_groups_without_end_not_kept():
    made = content(AllBlocksCleared(), blocks_max=50)
    for number in range(200):
        assert made.is_whole == (number <= 50)
        tokens = [number, 0, 0, 0]
        made.apply(Batch(at=0.0, events=[stored([number], tokens)]))
    assert len(made) == len(made.digests) == 50
    assert leading(made, [199, 0, 0, 0]) == 1
    assert leading(made, [149, 0, 0, 0]) == 0
    made = content(AllBlocksCleared(), *(of_group(at, FULL, blocks=1) for at in range(1000)))
    assert len(made) < 100
    assert not made.is_whole


FULL, WINDOW, STATE = "full_attention", "sliding_window", "mamba"
PROMPT_TOKENS = [*range(200, 240)]


def of_group(
    group: int | None, kind: str | None, *, size: int = BLOCK, blocks: int = 10, **more: Any
) -> BlockStored:
    """Return a store of the first blocks of a prompt, as vLLM sends one for each cache group."""
    more |= {"block_size": size, "group_idx": group, "kv_cache_spec_kind": kind}
    return stored(range(1000, 1000 + blocks), PROMPT_TOKENS[: size * blocks], **more)


def held(made: PoolContent) -> int:
    """Return how many of 40 tokens a router believes to be there."""
    sizes = made.block_sizes
    chains = {size: chain_digests(packed(PROMPT_TOKENS), block_size=size) for size in sizes}
    return made.num_tokens(chains)


def sparse(kind: str, *resident: int) -> BlockStored:
    """Return a store that names all tokens of a prompt and the hashes that are resident."""
    hashes = [1000 + at for at in resident]
    return stored(hashes, PROMPT_TOKENS, group_idx=1, kv_cache_spec_kind=kind)


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
def test_of_a_hybrid_model_only_full_attention_counts(other, others_first):
    full = of_group(0, FULL)
    assert held(content(*([other, full] if others_first else [full, other]))) == 40
    assert held(content(other)) == 0


MOVED_ON = BlockRemoved(block_hashes=range(1000, 1008), group_idx=1)


@pytest.mark.parametrize(
    ("events", "tokens"),
    [
        *(
            ([of_group(0, kind)], 40)
            for kind in (None, FULL, "mla_attention", "sink_full_attention")
        ),
        ([stored([1, 2], PROMPT_TOKENS)], 0),  # of a kind that is not said, with other tokens
        ([of_group(0, FULL), of_group(1, WINDOW), MOVED_ON], 40),
        ([of_group(0, FULL, medium="CPU", locality="REMOTE")], 0),
        ([of_group(0, FULL, medium="CPU", locality="LOCAL")], 40),
    ],
)
def test_what_counts_is_of_a_kind_that_every_prompt_begins_with_and_near(events, tokens):
    assert held(content(*events)) == tokens


def test_a_prompt_is_there_as_far_as_every_full_group_has_it():
    made = content(of_group(0, FULL), of_group(1, FULL, size=8, blocks=5))
    assert made.block_sizes == {4, 8}
    assert held(made) == 40
    made.apply(Batch(at=0.0, events=[BlockRemoved(block_hashes=[1003, 1004], group_idx=1)]))
    assert held(made) == 24
    made.apply(Batch(at=0.0, events=[BlockRemoved(block_hashes=range(1003, 1010), group_idx=0)]))
    assert held(made) == 12
