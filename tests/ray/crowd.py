"""Clients that ask a served model on end, and what became of each of their requests."""

import contextlib
import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from kvray.reference import Replica
from kvray.reference.tokenizer import ByteTokenizer
from kvray.serve.text import Prompts
from tests.ray.served import DEADLINE_S, Served, openai
from tests.waiting import wait_for

MAX_TOKENS = 192
"""A stream takes as long that a fault meets it in the middle."""
_FAMILIES = 16
_HEAD_WORDS = 80
"""About 15 blocks that the prompts of a family share: all of them are more than a pool holds."""
_TAIL_WORDS = 12
_MEMBERS = 12
_WORDS = ("river", "stone", "cloud", "amber", "night", "green", "paper", "quiet", "lantern")


@dataclass(slots=True, kw_only=True)
class Asked:
    """One request, as its client saw it."""

    prompt: str
    began: float
    ended: float = 0.0
    engine: str = ""
    text: str = ""
    num_pieces: int = 0
    from_tier: int = 0
    from_pool: int = 0
    error: str | None = None


class Crowd:
    """So many clients ask, each one request after the other, until it is closed."""

    def __init__(self, served: Served, number: int, *, seed: int) -> None:
        self.asked: list[Asked] = []  # in the order of their ends
        self._served = served
        self._under_way: dict[int, Asked] = {}
        self._is_over = threading.Event()
        self._threads = ThreadPoolExecutor(number)
        self._clients = [
            self._threads.submit(self._ask_on, place, random.Random(f"{seed} {place}"))
            for place in range(number)
        ]

    def wait_for_answers(self, number: int) -> None:
        """Return when so many more requests have ended, whatever their ends."""
        enough = len(self.asked) + number
        wait_for(lambda: len(self.asked) >= enough, f"{number} answers")

    def find_busy(self) -> str:
        """Return the name of an engine that is in the middle of an answer."""
        found: list[str] = []

        def is_one() -> bool:
            under_way = [*self._under_way.values()]
            found.extend(one.engine for one in under_way if 1 <= one.num_pieces < MAX_TOKENS // 4)
            return bool(found)

        wait_for(is_one, "an answer under way")
        return found[0]

    def close(self) -> None:
        """Let each client end its request. Twice is fine."""
        self._is_over.set()
        for client in self._clients:
            client.result(DEADLINE_S)
        self._threads.shutdown()

    def _ask_on(self, place: int, random_: random.Random) -> None:
        while not self._is_over.is_set():
            prompt = prompt_of(random_.randrange(_FAMILIES), random_.randrange(_MEMBERS))
            one = self._under_way[place] = Asked(prompt=prompt, began=time.monotonic())
            try:
                self._ask(one)
            except openai.APIError as error:
                one.error = repr(error)
            one.ended = time.monotonic()
            self.asked.append(one)

    def _ask(self, one: Asked) -> None:
        options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
        messages = [{"role": "user", "content": one.prompt}]
        finish_reason = None
        with self._served.ask(messages=messages, max_tokens=MAX_TOKENS, **options) as stream:
            one.engine = stream.response.headers["x-kvray-replica"]
            for chunk in stream:
                for choice in chunk.choices:
                    one.text += choice.delta.content or ""
                    one.num_pieces += 1
                    finish_reason = choice.finish_reason or finish_reason
                if chunk.usage is not None:
                    details = chunk.usage.prompt_tokens_details
                    one.from_pool = details.cached_tokens_by_source["pool"]
                    one.from_tier = details.cached_tokens - one.from_pool
        assert finish_reason is not None, "a stream that just ends says that nothing went wrong"


@contextlib.contextmanager
def crowd_of(served: Served, number: int, *, seed: int) -> Iterator[Crowd]:
    """Have so many clients ask for the time of a block."""
    crowd = Crowd(served, number, seed=seed)
    try:
        yield crowd
    finally:
        crowd.close()


def prompt_of(family: int, member: int) -> str:
    """Return a prompt; those of a family have all but the end in common."""
    head, tail = random.Random(f"head {family}"), random.Random(f"tail {family} {member}")
    return " ".join([*head.choices(_WORDS, k=_HEAD_WORDS), *tail.choices(_WORDS, k=_TAIL_WORDS)])


class Alone:
    """An engine without any cache of blocks, and the answers it gives."""

    def __init__(self) -> None:
        self._prompts = Prompts(ByteTokenizer(), None)
        self._engine = Replica.start(
            "alone", model="tiny", num_threads=1, enable_chunked_prefill=True
        )
        self._answers: dict[str, str] = {}

    def wrong(self, asked: Sequence[Asked]) -> list[Asked]:
        """Return those of the answers that are not what this engine says.

        Of an answer that was broken off its beginning counts.
        """
        return [
            one
            for one in asked
            if (one.text != self._answer(one.prompt))
            and not (one.error is not None and self._answer(one.prompt).startswith(one.text))
        ]

    def close(self) -> None:
        self._engine.close()

    def _answer(self, prompt: str) -> str:
        if prompt not in self._answers:
            tokens = self._prompts.encode_chat([{"role": "user", "content": prompt}])
            # A salt of its own: nothing is reused.
            output = self._engine.generate(tokens, max_tokens=MAX_TOKENS, salt=prompt)
            self._answers[prompt] = self._prompts.decode(list(output.token_ids))
        return self._answers[prompt]
