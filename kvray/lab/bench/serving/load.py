"""The requests of a round, when they come and what of them is equal; and the answers to them."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np
from numpy.random import default_rng

from kvray.errors import ConfigError, KVRayError, needs
from kvray.lab.replay import Trace

if TYPE_CHECKING:
    from openai import AsyncOpenAI

REPLICA_HEADER = "x-kvray-replica"
_HELLO_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """An endpoint that is measured; `url` is without the `/v1`."""

    name: str
    url: str
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """A request, and when it is to be sent, in seconds since the start of the round."""

    at_s: float
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of a request; times are seconds since it was due."""

    error: str = ""
    """Why there is no answer; empty: there is one."""
    text: str = ""
    replica: str = ""
    """The one that answered; empty: the endpoint does not say."""
    first_token_s: float = 0.0
    whole_s: float = 0.0
    cached_tokens: int | None = None
    """Of the prompt's tokens, those that were not computed; None: the endpoint does not say."""


def parse_endpoint(text: str) -> tuple[str, str]:
    """Return name and URL of a `--url`; without a name, the URL is it. ConfigError: it is none."""
    name, is_named, url = text.rpartition("=")
    if not is_named:
        name = url
    url = url.rstrip("/").removesuffix("/v1")
    with contextlib.suppress(ValueError):  # of what stands for a port
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return name, url
    raise ConfigError(f"--url {text}: give NAME=http://host:port.")


async def ask_model(name: str, url: str) -> str:
    """Return the first model that an endpoint lists; KVRayError: there is none, or no answer."""
    openai = _openai()
    async with _client(url, timeout_s=_HELLO_TIMEOUT_S) as client:
        try:
            models = await asyncio.wait_for(client.models.list(), _HELLO_TIMEOUT_S)
        except (openai.OpenAIError, asyncio.TimeoutError) as error:
            raise KVRayError(f"{name} does not answer at {url} ({error or 'too slow'}).") from None
    if not models.data:
        raise KVRayError(f"{name} at {url} lists no model; give its name with --model.")
    return str(models.data[0].id)


async def play(
    endpoint: Endpoint,
    requests: Sequence[Due],
    *,
    max_tokens: int,
    timeout_s: float,
    advance: Callable[[], None] = lambda: None,
) -> list[Answer]:
    """Send each request when it is due, and return the answers; one that is late has failed."""
    openai = _openai()
    async with _client(endpoint.url, timeout_s=timeout_s) as client:
        began = time.monotonic()

        async def one(due: Due) -> Answer:
            due_at = began + due.at_s
            await asyncio.sleep(due_at - time.monotonic())
            asking = _ask(client, endpoint.model, due.tokens, max_tokens, due_at)
            try:
                answer = await asyncio.wait_for(asking, timeout_s)
            except asyncio.TimeoutError:
                answer = Answer(error=f"no whole answer in {timeout_s:g} s")
            except openai.OpenAIError as error:
                answer = Answer(error=str(error) or type(error).__name__)
            advance()
            return answer

        return list(await asyncio.gather(*map(one, requests)))


def _openai() -> Any:
    with needs("serve"):
        import openai
    return openai


def _client(url: str, *, timeout_s: float) -> AsyncOpenAI:
    client: AsyncOpenAI = _openai().AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=timeout_s
    )
    return client


async def _ask(
    client: AsyncOpenAI, model: str, tokens: Sequence[int], max_tokens: int, due_at: float
) -> Answer:
    raw = await client.completions.with_raw_response.create(
        model=model,
        prompt="",
        # The client would look at each token of `prompt`: 26 ms for 800 of them.
        extra_body={"prompt": list(tokens)},
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    first_token_s, cached, pieces = None, None, []
    async for chunk in raw.parse():
        if chunk.choices and first_token_s is None:
            first_token_s = time.monotonic() - due_at
        pieces += [choice.text for choice in chunk.choices]
        if chunk.usage is not None and chunk.usage.prompt_tokens_details is not None:
            cached = chunk.usage.prompt_tokens_details.cached_tokens
    if first_token_s is None:
        return Answer(error="the answer has no token")
    return Answer(
        text="".join(pieces),
        replica=raw.headers.get(REPLICA_HEADER, ""),
        first_token_s=first_token_s,
        whole_s=time.monotonic() - due_at,
        cached_tokens=cached,
    )


VOCABULARY = 16_384
"""Token ids below are words, or parts of words, of any usual model."""
_SPECIAL = 1000
"""Token ids below may be special ones."""

_SYSTEM_TOKENS = 64
_QUESTION_TOKENS = (128, 256)
"""Of a conversation's first question, after the system prompt that all have."""
_TURN_TOKENS = (48, 128)
"""The answer to the turn before, and the next question."""
_BEGIN_SHARE = 1 / 6
"""Share of the requests that begin a conversation."""
_TURNS_MAX = 10
_PREFIX_TOKENS = 512
_OWN_TOKENS = 64
_PROMPT_TOKENS = 320

_COMMON_SHARE = 0.1
"""A block that more of a trace's requests have is of a system prompt, and names no conversation."""
_DRAW_SEED = 1

Stretch = tuple[int, int]
"""Name and number of consecutive tokens. Equal names have equal tokens, as far as both go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request, whose tokens hang on the round."""

    at_s: float
    stretches: tuple[Stretch, ...]

    @property
    def num_tokens(self) -> int:
        """Length of the prompt."""
        return sum(count for _, count in self.stretches)

    def tokens(self, seed: int, *, vocabulary: int = VOCABULARY) -> list[int]:
        """Return the prompt, without special ids; another seed's is equal where this one is."""
        low = min(_SPECIAL, vocabulary // 8)
        parts = [
            default_rng((seed, name)).integers(low, vocabulary, n) for name, n in self.stretches
        ]
        found: list[int] = np.concatenate(parts).tolist()
        return found


def generate(kind: str, *, num_requests: int, seconds: float, seed: int) -> list[Request]:
    """Return requests of `KINDS` in so many seconds, whose arrivals are a Poisson process."""
    gaps = default_rng(seed).exponential(size=num_requests)
    times = _spread(np.cumsum(gaps), seconds)
    prompts = KINDS[kind](num_requests, random.Random(seed))
    return [Request(at_s=at, stretches=one) for at, one in zip(times, prompts, strict=True)]


def from_trace(
    trace: Trace, *, num_requests: int, seconds: float, scale: float, tokens_max: int
) -> list[Request]:
    """Return conversations of a trace, drawn at random, in so many seconds.

    They are whole, but for the last: the first requests of a trace have hardly begun to reuse.
    Prompts and blocks become shorter by `scale`; longer ones than `tokens_max` lose their end.
    ConfigError: the trace is too short, or its blocks come to nothing.
    """
    if trace.num_requests < num_requests:
        raise ConfigError(
            f"{trace.name} has {trace.num_requests} requests and {num_requests} are asked for; give"
            " a smaller --rate or fewer --seconds."
        )
    if trace.block_tokens < scale:
        raise ConfigError(
            f"--scale {scale:g}: blocks of {trace.block_tokens} tokens would be empty; give at most"
            f" {trace.block_tokens}."
        )
    drawn = _draw(trace, num_requests)
    found = []
    for number, at_s in zip(drawn, _spread(trace.times[drawn], seconds), strict=True):
        stop = min(tokens_max, max(1, round(int(trace.num_tokens[number]) / scale)))
        ids = trace.ids[trace.starts[number] : trace.starts[number + 1]].tolist()
        ends = [round((depth + 1) * trace.block_tokens / scale) for depth in range(len(ids))]
        stretches, at = [], 0
        # What comes after the last block is nobody else's.
        for name, end in (*zip(ids, ends, strict=True), (trace.num_unique + number, stop)):
            if min(end, stop) > at:
                stretches.append((name, min(end, stop) - at))
                at = min(end, stop)
        found.append(Request(at_s=at_s, stretches=tuple(stretches)))
    return found


def _draw(trace: Trace, num_requests: int) -> list[int]:
    """Return requests of drawn conversations, named by the first block of no system prompt."""
    is_common = np.bincount(trace.ids) > _COMMON_SHARE * trace.num_requests
    conversations: dict[int, list[int]] = {}
    for number in range(trace.num_requests):
        ids = trace.ids[trace.starts[number] : trace.starts[number + 1]]
        own = ids[~is_common[ids]]
        name = int(own[0]) if len(own) else trace.num_unique + number
        conversations.setdefault(name, []).append(number)
    shuffled = [*conversations.values()]
    random.Random(_DRAW_SEED).shuffle(shuffled)
    drawn = [number for conversation in shuffled for number in conversation]
    return sorted(drawn[:num_requests])


def reusable_tokens(prompts: Sequence[Sequence[int]], *, tokens_per_block: int) -> list[int]:
    """Return of each prompt how many tokens a cache has that keeps all whole blocks before it.

    An engine computes the last token in any case, so no block that ends with it counts.
    """
    blocks: dict[tuple[int, tuple[int, ...]], int] = {}
    found = []
    for prompt in prompts:
        before, is_known, count = -1, True, 0
        for start in range(0, len(prompt) - tokens_per_block + 1, tokens_per_block):
            end = start + tokens_per_block
            key = before, tuple(prompt[start:end])
            is_known = is_known and key in blocks
            count += is_known and end < len(prompt)
            before = blocks.setdefault(key, len(blocks))
        found.append(count * tokens_per_block)
    return found


def _spread(times: Sequence[float] | np.ndarray, seconds: float) -> list[float]:
    """Return times from 0 to `seconds`, in the same proportions."""
    since = np.asarray(times, dtype=np.float64) - times[0]
    span = float(since[-1])
    found: list[float] = (since * (seconds / span if span else 0.0)).tolist()
    return found


def _conversations(num_requests: int, drawn: random.Random) -> list[tuple[Stretch, ...]]:
    """Each goes on with one of the open conversations but the one asked last, or begins another."""
    names = iter(range(1, 2 * num_requests + 2))
    is_open: list[tuple[Stretch, ...]] = []
    found = []
    for _ in range(num_requests):
        if len(is_open) < 2 or drawn.random() < _BEGIN_SHARE:
            question = (next(names), drawn.randint(*_QUESTION_TOKENS))
            turns: tuple[Stretch, ...] = ((0, _SYSTEM_TOKENS), question)
        else:
            before = is_open.pop(drawn.randrange(len(is_open) - 1))
            turns = *before, (next(names), drawn.randint(*_TURN_TOKENS))
        if len(turns) <= _TURNS_MAX:
            is_open.append(turns)
        found.append(turns)
    return found


KINDS: dict[str, Callable[[int, random.Random], list[tuple[Stretch, ...]]]] = {
    "conversations": _conversations,
    "one-prefix": lambda count, _: [
        ((0, _PREFIX_TOKENS), (number, _OWN_TOKENS)) for number in range(1, count + 1)
    ],
    "no-prefix": lambda count, _: [((number, _PROMPT_TOKENS),) for number in range(count)],
}
"""Generated workloads: conversations of several turns; one prefix in all prompts; none in any."""
