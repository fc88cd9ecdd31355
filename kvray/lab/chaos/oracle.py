"""The right answers: those of an engine that has no connector and reuses nothing."""

from collections.abc import Callable

from kvray.lab.chaos import load
from kvray.lab.chaos.load import Answers, Ask, Chapter
from kvray.lab.chaos.servers import Question, spawn

Questions = dict[Ask, Question]


def ask_oracle(book: list[Chapter], advance: Callable[[int], None]) -> Questions:
    """Answer every prompt of a book; `advance` hears how many more have been."""
    conversations, truth, questions = load.conversations_of(book), Answers(), Questions()
    with spawn("oracle") as oracle:
        oracle.wait_ready()
        for asks in load.all_asks(book):
            prompts = [load.prompt_of(conversations[one], turn, truth) for one, turn in asks]
            outputs = oracle.generate(prompts, max_tokens=load.MAX_TOKENS)
            for ask, prompt, output in zip(asks, prompts, outputs, strict=True):
                truth[ask] = output.token_ids
                questions[ask] = prompt, output.token_ids
            advance(len(asks))
    return questions
