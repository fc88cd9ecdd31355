"""The prompts of a run: conversations over shared and private documents, from a seed."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

TOKENS_PER_BLOCK = 32
MAX_TOKENS = 8
PROMPT_TOKENS_MAX = 1024
BATCH_SIZE = 12
"""Prompts that a replica gets at once; it computes some, and the others wait in its queue."""
BATCHES = 12
"""Batches of a replica until it moves on to the next phase."""

_VOCABULARY = range(3, 259)
_TURNS = 3
_SHARED_DOCUMENTS = 4
_QUESTIONS = 2
_PRIVATE = 5
_DOCUMENT_BLOCKS = (4, 10)
_QUESTION_TOKENS = (12, 50)

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A document and questions about it; a turn's prompt has all so far, with their answers."""

    number: int
    document: Tokens
    questions: tuple[Tokens, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """The conversations of one stretch of a run; then other documents come."""

    shared: tuple[tuple[Conversation, ...], ...]
    """By document: every replica gets them, some sooner, some later."""
    private: tuple[tuple[Conversation, ...], ...]
    """By replica: no other one gets these."""


class Ask(NamedTuple):
    """One prompt: a turn of the conversation with this number."""

    conversation: int
    turn: int


class Batch(NamedTuple):
    """The prompts that a replica gets at once."""

    place: int
    """The batch's index in its phase: the prompts of the first ones are new to all replicas."""
    asks: list[Ask]


Answers = dict[Ask, Tokens]


def make_workload(*, seed: int, num_phases: int, num_replicas: int) -> list[Phase]:
    """Return all conversations; no two documents begin with the same block."""
    random_ = random.Random(seed)
    numbers = itertools.count()

    def converse(document: Tokens) -> Conversation:
        questions = tuple(_words(random_, *_QUESTION_TOKENS) for _ in range(_TURNS))
        return Conversation(number=next(numbers), document=document, questions=questions)

    def group(num_documents: int, num_conversations: int) -> tuple[Conversation, ...]:
        found: list[Conversation] = []
        for _ in range(num_documents):
            blocks = random_.randint(*_DOCUMENT_BLOCKS)
            about = _words(random_, blocks * TOKENS_PER_BLOCK, (blocks + 1) * TOKENS_PER_BLOCK)
            found += (converse(about) for _ in range(num_conversations))
        return tuple(found)

    return [
        Phase(
            shared=tuple(group(1, _QUESTIONS) for _ in range(_SHARED_DOCUMENTS)),
            private=tuple(group(_PRIVATE, 1) for _ in range(num_replicas)),
        )
        for _ in range(num_phases)
    ]


def conversations_of(workload: list[Phase]) -> dict[int, Conversation]:
    """Return every conversation by its number."""
    groups = [group for phase in workload for group in (*phase.shared, *phase.private)]
    return {one.number: one for group in groups for one in group}


def prompt_of(conversation: Conversation, turn: int, answers: Answers) -> Tokens:
    """Return the tokens of a turn's prompt; the answers to the turns before it are known."""
    tokens = conversation.document
    for earlier in range(turn):
        tokens += conversation.questions[earlier] + answers[Ask(conversation.number, earlier)]
    return tokens + conversation.questions[turn]


def batches_of(
    workload: list[Phase], *, replica: int, num_replicas: int, seed: int
) -> Iterator[Batch]:
    """Yield a replica's batches for ever: a pure function of the arguments.

    Half of the documents reach a replica one phase after another replica had them, so that it
    can find what the other one computed. Another half does for each replica.
    """
    random_ = random.Random(seed * 1000 + replica)
    for number in itertools.count():
        phase, place = divmod(number, BATCHES)
        # Phases come round again.
        conversations = list(workload[phase % len(workload)].private[replica])
        for index in range(_SHARED_DOCUMENTS):
            lag = (index + replica) % num_replicas
            conversations += workload[(phase - lag) % len(workload)].shared[index]
        asks = [
            Ask(one.number, min(_TURNS - 1, random_.randrange(place + 1))) for one in conversations
        ]
        yield Batch(place, random_.sample(asks, min(BATCH_SIZE, len(asks))))


def all_asks(workload: list[Phase]) -> Iterator[list[Ask]]:
    """Yield every prompt once: the prompts of a turn together, after those of the turn before."""
    for phase in workload:
        numbers = conversations_of([phase])
        for turn in range(_TURNS):
            yield [Ask(number, turn) for number in numbers]


def _words(random_: random.Random, least: int, most: int) -> Tokens:
    return tuple(random_.choices(_VOCABULARY, k=random_.randint(least, most)))
