from itertools import islice

from kvray.lab.chaos.load import (
    BATCHES,
    PROMPT_TOKENS_MAX,
    TOKENS_PER_BLOCK,
    Answers,
    Ask,
    Batch,
    Chapter,
    all_asks,
    batches_of,
    conversations_of,
    make_book,
    prompt_of,
)

REPLICAS = 2


def book(seed: int = 1) -> list[Chapter]:
    return make_book(seed=seed, num_chapters=3, num_replicas=REPLICAS)


def batches(replica: int, count: int, seed: int = 1) -> list[Batch]:
    made = batches_of(book(), replica=replica, num_replicas=REPLICAS, seed=seed)
    return list(islice(made, count))


def shared_and_private() -> tuple[set[int], list[set[int]]]:
    shared = {one.number for chapter in book() for about in chapter.shared for one in about}
    private = [
        {one.number for chapter in book() for one in chapter.private[replica]}
        for replica in range(REPLICAS)
    ]
    return shared, private


def truth() -> Answers:
    return {ask: (5, 6, 7) for asks in all_asks(book()) for ask in asks}


def test_equal_seeds_ask_the_same() -> None:
    assert book(2) == book(2)
    assert book(2) != book(3)
    assert batches(0, 30) == batches(0, 30)
    assert batches(0, 30) != batches(0, 30, seed=2)


def test_replicas_share_some_documents_and_keep_others_to_themselves() -> None:
    shared, private = shared_and_private()
    asked = [
        {ask.conversation for batch in batches(one, 200) for ask in batch.asks} for one in (0, 1)
    ]
    assert asked[0] & asked[1] == shared
    assert asked[0] - shared == private[0]
    assert asked[1] - shared == private[1]


def test_a_batch_asks_nothing_twice() -> None:
    for batch in batches(0, 60):
        assert len(set(batch.asks)) == len(batch.asks) == 12


def test_the_book_begins_again_after_its_last_chapter() -> None:
    read = batches(0, 3 * BATCHES + 1)
    assert read[0].place == read[-1].place == 0
    shared, private = book()[0].shared[0], book()[0].private[0]
    open_ = {one.number for one in (*shared, *private)}
    for batch in (read[0], read[-1]):
        assert open_ & {ask.conversation for ask in batch.asks}


def test_every_prompt_is_answered_in_time_for_the_turns_after_it() -> None:
    seen: set[Ask] = set()
    for asks in all_asks(book()):
        for ask in asks:
            assert all(Ask(ask.conversation, turn) in seen for turn in range(ask.turn))
        seen |= set(asks)
    assert len(seen) == 3 * len(conversations_of(book()))
    assert {
        ask for replica in (0, 1) for batch in batches(replica, 200) for ask in batch.asks
    } <= seen


def test_a_turn_begins_with_everything_said_before_it() -> None:
    conversations, answers = conversations_of(book()), truth()
    for number, conversation in conversations.items():
        first = prompt_of(conversation, 0, answers)
        second = prompt_of(conversation, 1, answers)
        assert first[: len(conversation.document)] == conversation.document
        assert second[: len(first) + 3] == (*first, *answers[Ask(number, 0)])


def test_prompts_fit_and_no_two_documents_begin_with_the_same_block() -> None:
    conversations = conversations_of(book()).values()
    longest = max(len(prompt_of(one, 2, truth())) for one in conversations)
    assert longest <= PROMPT_TOKENS_MAX
    documents = {one.document for one in conversations}
    assert len({one[:TOKENS_PER_BLOCK] for one in documents}) == len(documents)
